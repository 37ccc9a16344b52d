"""The messages between scheduler and runner: the scheduler output of one step, and its model output.

Job: two frozen, complete, serialisable messages (msgspec), made of plain numbers, never of tensors or references.
Owns: their fields. Does not know: how either side works.

The scheduler names *rows* (a request's place in the runner's tables), *pages* (KV) and *slots* (recurrent states); the
runner executes them. The order of a step: ``new_requests`` fill their rows, ``page_copies`` and ``state_forks``
run, then the batch, then sampling. ``finished_rows`` are forgotten before anything else.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left

import msgspec

from weft.multimodal.items import MediaItem


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a row with every default resolved (see ``SamplingParams`` for the meanings).

    ``top_k`` 0 means all. ``seed`` is an unsigned 64-bit number. ``bad_words`` are token-id sequences.
    ``grammar`` constrains the text (llguidance's format); its masks come with each scheduler output.
    ``blocked_before_min`` are the EOS and stop ids that may not be sampled before ``min_tokens`` tokens are out.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] | None = None
    seed: int = 0
    min_tokens: int = 0
    blocked_before_min: list[int] = []
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None

    @property
    def edits_logits(self) -> bool:
        """True if logits change before sampling, by more than temperature, top-k, top-p and min-p: only then do the
        tokens before a position matter to it. Grammars come on top."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        listed = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(penalties or listed or self.min_tokens)


class NewRequest(msgspec.Struct, frozen=True):
    """A request enters (or, after a preemption, re-enters) the runner's tables at ``row``.

    Attributes:
        row: place in the runner's tables, 0 to ``max_num_seqs - 1``.
        token_ids: every token known: the prompt, and after a preemption also the tokens generated so far. As in
            ``RequestSpec.prompt_token_ids``.
        num_prompt_tokens: how many of ``token_ids`` are prompt.
        sampling: resolved parameters.
        media_runs: ``(position, tokens, height, width)`` of each run of placeholders, ascending: a frame's, or an
            image's, with its height and width in patches. Positions in the decoder follow from them (M-RoPE).
    """

    row: int
    token_ids: array
    num_prompt_tokens: int
    sampling: RowSampling
    media_runs: list[tuple[int, int, int, int]] = []


class Encoding(msgspec.Struct, frozen=True):
    """An image or video to encode; its embeddings fill the rows of the encoder cache from ``row`` on."""

    item: MediaItem
    row: int


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):  # made for every request of every step
    """What one request does in this step.

    Attributes:
        row: its row.
        start: position of the first token to run; equals the tokens already computed.
        num_tokens: tokens to run, drafts included. The others come from the row: from ``NewRequest.token_ids`` while
            those last, after that from the token sampled last, which never has to visit the host.
        new_pages: page ids appended to the row's page table.
        state_slot: working slot of the recurrent state (0 if the model has none).
        samples: True if the step ends at the last known token, so that a new one is sampled.
        checkpoints: ``(position, slot)``: the state after exactly ``position`` tokens is stored into ``slot``.
            ``start < position <= start + num_tokens``, ascending.
        write_start: KV below this position is there already, in pages that belong to others: it is read, and computed
            again for the recurrent states only, but must not be written.
        draft_token_ids: the last tokens of the step, a guess at what will be sampled. A token is sampled after each of
            them too, and they are accepted as far as they are what was sampled.
        follows: the step verifies drafts, and was scheduled before it was known how many drafts the row's last step
            rejected. ``start`` and all positions that follow from it are as if it rejected none; the device subtracts
            the number of rejected drafts. Its tokens (``draft_token_ids`` only says how many) and the slot that it
            reads are what that step left on the device.
        media: ``(position, tokens, row)``: these tokens, from this position on, take their embeddings from the encoder
            cache, from this row on. Ascending, within the step.
    """

    row: int
    start: int
    num_tokens: int
    new_pages: list[int]
    state_slot: int
    samples: bool
    checkpoints: list[tuple[int, int]] = []
    write_start: int = 0
    draft_token_ids: list[int] = []
    media: list[tuple[int, int, int]] = []
    follows: bool = False

    @property
    def num_samples(self) -> int:
        """Tokens that are sampled: one after each draft, and the one before them."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def num_decode_tokens(self) -> int:
        """Tokens that it runs after its prompt: a decode one, with drafts that many more; a prefill none."""
        return self.num_tokens if self.draft_token_ids or self.is_decode else 0

    @property
    def is_decode(self) -> bool:
        """It brings one token to an existing state and stores no checkpoint: no drafts either."""
        return self.num_tokens == 1 and self.start > 0 and not self.checkpoints


class SchedulerOutput(msgspec.Struct, frozen=True):
    """What one step runs. ``requests`` lists decodes first, and longer sequences before shorter ones: attention begins
    with what takes longest.

    ``encodings`` are run first, and may overwrite rows of the encoder cache that earlier steps read.
    ``token_masks[row]``: for each token that the row samples, bits of those that it may be, lowest bit first; a row
    that is not in it may sample any.
    """

    step: int
    requests: list[ScheduledRequest]
    new_requests: list[NewRequest] = []
    finished_rows: list[int] = []
    state_forks: list[tuple[int, int]] = []
    page_copies: list[tuple[int, int]] = []
    token_masks: dict[int, list[bytes]] = {}
    encodings: list[Encoding] = []

    @property
    def num_decodes(self) -> int:
        """How many of ``requests``, the first ones, decode."""
        return bisect_left(self.requests, True, key=lambda r: not r.is_decode)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step runs."""
        return sum(r.num_tokens for r in self.requests)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one position: of the token itself (with its rank, 1 is the likeliest), then of the top N.

    ``token_ids[0]`` is the token that stands (or was sampled) there; the others are the likeliest, in order.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class ModelOutput(msgspec.Struct, frozen=True):
    """One step's results: a token for every request that had ``samples`` set, in batch order; with drafts, those that
    were accepted and the token after them.

    ``rows`` and ``token_ids`` run side by side, a row with several tokens as often as it has tokens; ``logprobs`` and
    ``prompt_logprobs`` hold entries for a row, one per token, only if it asked. ``prompt_logprobs[row]`` covers the
    prompt tokens whose *predecessor* ran in this step. ``failed_rows`` computed NaN: their token, if they sampled one,
    and all that the step stored for them are worthless, and the request must fail alone. ``mode`` says how the step ran
    (NONE, PIECEWISE, FULL), ``num_padding_tokens`` how many padding tokens it computed. ``draft_token_ids``: what
    was drafted on the device to come after the tokens of a row that sampled. ``encoder_seconds``: how long the
    step's images took to encode.
    """

    step: int
    rows: list[int]
    token_ids: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
    failed_rows: list[int] = []
    mode: str = "NONE"
    num_padding_tokens: int = 0
    draft_token_ids: dict[int, list[int]] = {}
    encoder_seconds: float = 0.0
