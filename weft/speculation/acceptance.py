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

    def leading(self, num_requests: int, num_positions: int) -> Acceptance:
        """That of the first requests: a graph pads."""
        return Acceptance(self.first[:num_requests], self.num_accepted[:num_requests], self.counted[:num_positions])


_MASK_31 = 2**31 - 1
_FACTORS = -0x61C8864680B583EB, -0x4B47D0C5A1A6CB97
"""Odd and irregular."""


def _random_31(seeds: Tensor, positions: Tensor) -> Tensor:
    """``[M]`` int64, random numbers below 2**31 by seed and position. What is measured with them must not be their own
    time, so they are mixed in few operations; texts get better ones (``ops/sampling.py``)."""
    mixed = torch.add(seeds, positions, alpha=_FACTORS[0])
    mixed = (mixed ^ mixed >> 29) * _FACTORS[1]
    return (mixed ^ mixed >> 32) & _MASK_31


class Judge:
    """Says of every draft whether it is right.

    Args:
        synthetic_rate: for measurements with meaningless weights: a draft is right with this probability, by the
            random numbers of its position, and stands in the place of the token that was sampled. None: a draft is
            right if it is that token.
        never: ids of drafts that are not accepted: what is sampled in their place is then the last token of its step,
            the same one if it is right. For tokens that end a text: a step that follows without knowing of the end
            (``ScheduledRequest.follows``) begins with it, so that the state after exactly the text is stored.
    """

    def __init__(self, synthetic_rate: float | None = None, never: Tensor | None = None) -> None:
        self._never = never
        self._bound = None if synthetic_rate is None else round(synthetic_rate * _MASK_31)

    def __call__(self, token_ids: Tensor, drafts: Tensor, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The sequences' tokens ``[M]``, and which drafts are right, ``[M]`` bool; device work only.

        Args:
            token_ids: ``[M]`` int64, what was sampled.
            drafts: ``[M]`` int64, the draft that follows each position; ``NO_DRAFT`` where none does.
            seeds, positions: ``[M]`` int64, of the random numbers.
        """
        is_draft = drafts != NO_DRAFT
        if self._never is not None:
            is_draft &= (drafts[:, None] != self._never).all(1)
        if self._bound is None:
            return token_ids, is_draft & (token_ids == drafts)  # NaN logits may sample anything, NO_DRAFT too
        is_right = is_draft & (_random_31(seeds, positions) < self._bound)
        return torch.where(is_right, drafts, token_ids), is_right


def accept(is_right: Tensor, first: Tensor) -> Acceptance:
    """Accept the drafts of each request up to the first wrong one; device work only.

    Args:
        is_right: ``[M]`` bool, of the draft that follows each position; False at the last one of each request, whose
            positions lie side by side.
        first: ``[N]`` int64, index of each request's first position, ascending.
    """
    indices = torch.arange(len(is_right), device=is_right.device)
    differs = torch.where(is_right, len(is_right), indices)
    next_difference = differs.flip(0).cummin(0).values.flip(0)
    num_accepted = next_difference[first] - first
    request = torch.zeros_like(indices).index_fill_(0, first, 1).cumsum_(0) - 1
    counted = indices <= (first + num_accepted)[request]
    return Acceptance(first, num_accepted, counted)


def accept_alike(is_right: Tensor) -> Acceptance:
    """The same where every request has the same number of positions, ``is_right [N, Q]``: fewer, simpler operations."""
    num_requests, query_len = is_right.shape
    num_accepted = is_right[:, :-1].long().cumprod(1).sum(1)
    places = torch.arange(query_len, device=is_right.device)
    first = torch.arange(0, num_requests * query_len, query_len, device=is_right.device)
    return Acceptance(first, num_accepted, (places <= num_accepted[:, None]).flatten())


def drafts_of(input_ids: Tensor, query_len: int) -> Tensor:
    """``[N * Q]``: the draft after each position where every request runs its last token and ``Q - 1`` drafts."""
    drafts = input_ids.roll(-1)
    drafts[query_len - 1 :: query_len] = NO_DRAFT
    return drafts
