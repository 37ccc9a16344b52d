"""The n-gram drafter: drafts by prompt lookup, on the device.

Job: keep the tokens of every row on the device, those of a step as soon as they are sampled, and draft from them. Owns:
these tokens. Does not know: how a match is found (``ops/ngram.py``), which requests get drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from weft.config.speculation import SpeculativeConfig
from weft.messages import NewRequest, ScheduledRequest
from weft.ops.backend import Backend
from weft.ops.ngram import ngram_drafts
from weft.runner.batch_builder import BatchBuilder
from weft.runner.buffers import to_device
from weft.runner.rows import RowTable
from weft.runner.step_shape import StepInputs, StepShape
from weft.speculation.acceptance import Acceptance


class NgramDrafter:
    """See ``Drafter``.

    Args:
        config: what to look up.
        max_model_len: most tokens of a sequence.

    Attributes:
        history: ``[num_rows + 1, L]`` int32, the tokens of every row from the start of its prompt.
    """

    def __init__(
        self, config: SpeculativeConfig, builder: BatchBuilder, rows: RowTable, max_model_len: int, backend: Backend
    ) -> None:
        self._config, self._builder, self._rows, self._backend = config, builder, rows, backend
        # A step may sample so many tokens behind the longest sequence, which are written and do not count.
        width = max_model_len + 1 + config.num_speculative_tokens
        device = rows.last_token.device
        self.history = torch.zeros(rows.padding_row + 1, width, dtype=torch.int32, device=device)

    def fill(self, new: NewRequest) -> None:
        """The request's tokens, which the table of rows has by now, stand in its row."""
        tokens = torch.from_numpy(self._rows.known_tokens(new.row, 0, len(new.token_ids)))
        self.history[new.row, : len(tokens)].copy_(to_device(tokens, self.history.device))

    def __call__(
        self,
        requests: Sequence[ScheduledRequest],
        shape: StepShape,
        hidden_states: Tensor,
        token_ids: Tensor | None,
        acceptance: Acceptance | None,
    ) -> Tensor:
        """See ``Drafter``. Requests with fewer drafts than others have places behind their tokens filled up."""
        sampling = [request for request in requests if request.samples]
        if token_ids is None:
            return self._rows.last_token.new_empty(0, 0)
        counts = [request.num_samples for request in sampling]
        starts, query_len = accumulate(counts[:-1], initial=0), max(counts)
        places = [[start + min(i, n - 1) for i in range(query_len)] for start, n in zip(starts, counts, strict=True)]
        lengths = [r.start + r.num_tokens - len(r.draft_token_ids) + query_len - 1 for r in sampling]
        seq_lens = self._ints(lengths).to(torch.int32)
        num_accepted = acceptance.num_accepted if acceptance is not None else None
        padded = token_ids.index_select(0, self._ints([place for row in places for place in row]))
        return self._draft(padded, num_accepted, self._ints([r.row for r in sampling]), seq_lens)

    def after_full_step(
        self, inputs: StepInputs, hidden_states: Tensor, token_ids: Tensor, acceptance: Acceptance | None
    ) -> Tensor:
        """See ``Drafter``."""
        num_accepted = acceptance.num_accepted if acceptance is not None else None
        return self._draft(token_ids, num_accepted, inputs.rows, inputs.batch.seq_lens)

    def _draft(self, token_ids: Tensor, num_accepted: Tensor | None, rows: Tensor, seq_lens: Tensor) -> Tensor:
        config = self._config
        return ngram_drafts(
            token_ids,
            num_accepted,
            rows,
            seq_lens,
            self.history,
            self._rows.state,
            self._builder.num_drafts_at(len(rows)),
            config.prompt_lookup_min,
            config.prompt_lookup_max,
            config.synthetic_acceptance_rate is not None,
            backend=self._backend,
        )

    def _ints(self, values: list[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64), self.history.device)
