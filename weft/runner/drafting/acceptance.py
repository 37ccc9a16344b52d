"""Acceptance: a draft is kept if the model sampled the same token.

At every position of a step that verifies drafts, a token is sampled as without drafts: from the same distribution, with
the random numbers of the position. A draft is accepted if it equals the sampled token and all earlier drafts are
accepted. The first sampled token that differs replaces its draft. For a draft that is one token, not a distribution,
this is rejection sampling (arXiv 2211.17192). The draft is accepted with probability p(draft). Otherwise the token
comes from p without the draft, renormalised. The tokens even equal those of decoding without drafts, seed for seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from msgspec.structs import replace
from torch import Tensor

from weft.messages import ScheduledRequest


def sampled_positions(requests: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
    """Return a request for every position that samples. At each position, a request has only the earlier drafts."""
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
    """The acceptance of the drafts of a step that samples at M positions of N requests, on the device.

    Attributes:
        num_accepted: ``[N]`` int64, each request's accepted drafts.
        last: ``[N]`` int64, index of the position whose token comes last.
        counted: ``[M]`` bool, whether the token sampled there is the sequence's.
    """

    num_accepted: Tensor
    last: Tensor
    counted: Tensor

    def leading(self, num_requests: int, num_positions: int) -> Acceptance:
        """Return the acceptance of the first requests, without a graph's padding."""
        return Acceptance(self.num_accepted[:num_requests], self.last[:num_requests], self.counted[:num_positions])


def accept(is_right: Tensor, first: Tensor) -> Acceptance:
    """Accept the drafts of each request up to the first wrong one; device work only.

    Args:
        is_right: ``[M]`` bool, whether the draft after each position is right; False at each request's last position.
            The positions of a request are consecutive.
        first: ``[N]`` int64, index of each request's first position, ascending.
    """
    indices = torch.arange(len(is_right), device=is_right.device)
    differs = torch.where(is_right, len(is_right), indices)
    next_difference = differs.flip(0).cummin(0).values.flip(0)
    last = next_difference[first]
    request = torch.zeros_like(indices).index_fill_(0, first, 1).cumsum_(0) - 1
    return Acceptance(last - first, last, indices <= last[request])
