"""The messages between scheduler and runner: the scheduler output of one step, and its model output.

Job: two frozen, complete, serialisable messages (msgspec), made of plain numbers, never of tensors or references. Owns:
their fields. Does not know: how either side works.

The scheduler names *rows* (a request's index in the runner's tables), *pages* (KV) and *slots* (recurrent states); the
runner executes. The order of a step: ``stores`` and ``encodings`` are queued, ``finished_rows`` are cleared,
``new_requests`` are written to their rows, ``page_copies`` and ``state_forks`` run, then the batch, then sampling.
"""

from array import array
from bisect import bisect_left

import msgspec

from weft.multimodal.items import MediaItem


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of a row with every default resolved (see ``SamplingParams`` for the meanings).

    ``top_k`` 0 means all. ``seed`` is an unsigned 64-bit number. ``bad_words`` are token-id sequences. ``grammar``
    constrains the text (llguidance's format); its masks are part of each scheduler output. ``blocked_before_min`` are
    the EOS and stop ids that must not be sampled before ``min_tokens`` tokens.
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
        """Whether logits change before sampling by more than temperature, top-k, top-p and min-p. Only then does
        sampling depend on earlier tokens. Grammars are not included."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        listed = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(penalties or listed or self.min_tokens)


class NewRequest(msgspec.Struct, frozen=True):
    """A request enters (or, after a preemption, re-enters) the runner's tables at ``row``.

    Attributes:
        row: index in the runner's tables, 0 to ``max_num_seqs - 1``.
        token_ids: all known tokens: the prompt, and after a preemption also the generated tokens. As in
            ``RequestSpec.prompt_token_ids``.
        num_prompt_tokens: number of ``token_ids`` that are prompt.
        sampling: resolved parameters.
        media_runs: ``(position, tokens, height, width)`` of each run of placeholders, ascending. A run belongs to a
            frame or an image of this height and width in patches. Positions in the decoder follow from the runs
            (M-RoPE).
    """

    row: int
    token_ids: array
    num_prompt_tokens: int
    sampling: RowSampling
    media_runs: list[tuple[int, int, int, int]] = []


class Encoding(msgspec.Struct, frozen=True):
    """An image or video to encode. Its embeddings are stored in the encoder cache from ``row`` on."""

    item: MediaItem
    row: int


class Transfer(msgspec.Struct, frozen=True):
    """A copy between the device and the tier in host memory, in one direction.

    Attributes:
        number: its number. Numbers are unique and need not ascend.
        pages: ``(source, target)`` pages.
        states: ``(source, target, page)``. A state's place in host memory also holds the KV of a device page; 0: the
            state has no partial page.
        after: number of the last copy to the host whose results this one reads; 0 if these are done.
    """

    number: int
    pages: list[tuple[int, int]] = []
    states: list[tuple[int, int, int]] = []
    after: int = 0


class FileOrder(msgspec.Struct, frozen=True):
    """A file of the disk tier to write (``save``), read (``load``) or remove (``drop``).

    Attributes:
        number: its number, which tells when the order is done.
        kind: one of the three.
        name: that of the file.
        place: the place in host memory that holds the content.
        is_state: whether the place is one of states.
    """

    number: int
    kind: str
    name: str
    place: int = 0
    is_state: bool = False


class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):  # created for every request of every step
    """One request's part of a step.

    Attributes:
        row: its row.
        start: position of the first token to run, which equals the number of tokens already computed.
        num_tokens: number of tokens to run, drafts included. The tokens other than drafts come from the row: from
            ``NewRequest.token_ids`` first, then from the last sampled token, which need not reach the host.
        new_pages: page ids appended to the row's page table.
        state_slot: working slot of the recurrent state (0 if the model has none).
        samples: whether the step ends at the last known token, so that a new one is sampled.
        checkpoints: ``(position, slot)``: store the state after exactly ``position`` tokens into ``slot``. ``start <
            position <= start + num_tokens``, ascending.
        write_start: KV below this position is stored already, in pages of others. These positions are computed again
            for the recurrent states only. Their KV is read and must not be written.
        draft_token_ids: the last tokens of the step, a guess of the next tokens. A token is sampled after each draft as
            well. Drafts are accepted while they equal the sampled tokens.
        follows: the step verifies drafts, and was scheduled before the number of rejected drafts of the row's last step
            was known. ``start`` and all positions derived from it assume no rejection; the device subtracts the number
            of rejected drafts. Tokens and the slot to read are on the device, from the last step; of
            ``draft_token_ids`` only the length counts.
        media: ``(position, tokens, row)``: these tokens, from this position on, use embeddings of the encoder cache,
            from this row on. Ascending, within the step.
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
        """Number of sampled tokens: one per draft, and one more."""
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def num_decode_tokens(self) -> int:
        """Number of tokens that run after the prompt: one in a decode, more with drafts, none in a prefill."""
        return self.num_tokens if self.draft_token_ids or self.is_decode else 0

    @property
    def is_decode(self) -> bool:
        """Whether the request adds one token to an existing state and stores no checkpoint. A request with drafts is no
        decode."""
        return self.num_tokens == 1 and self.start > 0 and not self.checkpoints


class SchedulerOutput(msgspec.Struct, frozen=True):
    """The work of one step. ``requests`` lists decodes first, and longer sequences before shorter ones, since attention
    starts with the longest.

    ``encodings`` run first, and may overwrite rows of the encoder cache that earlier steps read. ``token_masks[row]``
    has, for each token that the row samples, the bits of the allowed tokens, lowest bit first. Rows without a mask may
    sample any token.

    With a tier in host memory, ``stores`` run before everything else, since the step may overwrite what they read.
    ``restores`` follow and do not hold back the step. The requests of the step may read the results of ``restored``,
    copies of earlier steps. A step without requests only moves copies on.
    """

    step: int
    requests: list[ScheduledRequest]
    new_requests: list[NewRequest] = []
    finished_rows: list[int] = []
    state_forks: list[tuple[int, int]] = []
    page_copies: list[tuple[int, int]] = []
    token_masks: dict[int, list[bytes]] = {}
    encodings: list[Encoding] = []
    stores: list[Transfer] = []
    restores: list[Transfer] = []
    restored: list[int] = []
    files: list[FileOrder] = []

    @property
    def num_decodes(self) -> int:
        """Number of leading ``requests`` that decode."""
        return bisect_left(self.requests, True, key=lambda r: not r.is_decode)

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.requests)


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one position: of the token itself (with its rank; 1 is the most likely), then of the top N.

    ``token_ids[0]`` is the token at the position. The others are the most likely tokens, in order.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class ModelOutput(msgspec.Struct, frozen=True):
    """The results of one step. Every request with ``samples`` set has a token, in batch order. With drafts it has the
    accepted drafts and the token after them.

    ``rows`` and ``token_ids`` are parallel; a row with several tokens occurs several times. ``logprobs`` and
    ``prompt_logprobs`` have entries, one per token, for rows that asked for them. ``prompt_logprobs[row]`` covers the
    prompt tokens whose *predecessor* ran in this step.

    ``failed_rows`` computed NaN. The sampled token of such a row is invalid, and so is everything that the step stored
    for it. Only the request of the row fails.

    ``mode`` is the mode of the step (NONE, PIECEWISE, FULL). ``num_padding_tokens`` counts padding tokens.
    ``draft_token_ids`` are drafts made on the device, to follow the tokens of a row that sampled. ``encoder_seconds``
    is the time for encoding the step's images. ``transfers`` has number and seconds of each copy, of this or an earlier
    step, that is known to be done now. ``files`` has number, bytes and failure of each file order that ended.
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
    transfers: list[tuple[int, float]] = []
    files: list[tuple[int, int, str]] = []
