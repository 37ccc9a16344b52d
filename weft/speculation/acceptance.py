"""Which drafts are accepted: those that are what was sampled.

At every position of a step that verifies drafts a token is sampled as without drafts: from the same distribution, with
the random numbers of that position. A draft is accepted if it is that token and all drafts before it are accepted; the
first token that differs from its draft takes its place. For a draft that is one token, not a distribution, this is
rejection sampling (arXiv 2211.17192): it is accepted with its probability p(draft), and otherwise the token comes from
p without it, renormalised. More than the distribution stays: the tokens are those of decoding without drafts, seed for
seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.messages import ScheduledRequest

NO_DRAFT = -1
"""Stands where no draft follows a position."""


def sampled_positions(requests: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
    """The requests that sample; one with drafts once for each position, as if it had only the drafts before it."""
    positions: list[ScheduledRequest] = []
    for request in requests:
        drafts = request.draft_token_ids
        if not drafts:
            positions += [request] * request.samples
            continue
        before = request.num_tokens - len(drafts)
        positions += [
            replace(request, num_tokens=before + count, draft_token_ids=drafts[:count])
            for count in range(len(drafts) + 1)
        ]
    return positions


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of the drafts of a step that samples at M positions of N requests, on the device.

    Attributes:
        first: ``[N]`` int64, index of each request's first position.
        num_accepted: ``[N]`` int64, its accepted drafts.
        counted: ``[M]`` bool, whether the token sampled there is the sequence's.
    """

    first: Tensor
    num_accepted: Tensor
    counted: Tensor

    @property
    def last(self) -> Tensor:
        """``[N]`` int64, index of the position whose token comes last."""
        return self.first + self.num_accepted


def accept(token_ids: Tensor, drafts: Tensor, first: Tensor) -> Acceptance:
    """Accept drafts; device work only.

    Args:
        token_ids: ``[M]`` int64, what was sampled, all positions of a request side by side.
        drafts: ``[M]`` int64, the draft that follows each position; ``NO_DRAFT`` at the last one of each request.
        first: ``[N]`` int64, index of each request's first position, ascending.
    """
    indices = torch.arange(len(token_ids), device=token_ids.device)
    is_right = (token_ids == drafts) & (drafts != NO_DRAFT)  # NaN logits may sample anything, NO_DRAFT too
    differs = torch.where(is_right, len(token_ids), indices)
    next_difference = differs.flip(0).cummin(0).values.flip(0)
    num_accepted = next_difference[first] - first
    request = torch.zeros_like(indices).index_fill_(0, first, 1).cumsum_(0) - 1
    counted = indices <= (first + num_accepted)[request]
    return Acceptance(first, num_accepted, counted)
