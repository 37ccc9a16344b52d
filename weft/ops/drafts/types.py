"""Types and constants of the operations of draft verification (``ops/drafts``), for references and kernels."""

from typing import NamedTuple, Self

from torch import Tensor

FROM_LAST_TOKEN = -1
"""Stands in ``input_ids`` where the token is the one sampled last, known to the device only."""

NO_DRAFT = -1
"""Stands where no draft follows a position."""

MASK_31 = 2**31 - 1
FACTORS = -0x61C8864680B583EB, -0x4B47D0C5A1A6CB97
"""Odd and irregular."""


class RowState(NamedTuple):
    """Device state of the rows of running requests. R rows.

    Attributes:
        last_token: ``[R]`` int64, the token sampled last.
        drafts: ``[R, D]`` int64, made for the next step; D is 0 where drafts do not stay on the device.
        num_rejected: ``[R]`` int64, drafts that the row's last verification rejected.
    """

    last_token: Tensor
    drafts: Tensor
    num_rejected: Tensor


class PageTable(NamedTuple):
    """The pages of sequences or rows.

    Attributes:
        pages: ``[N, P]`` int32, page ids.
        page_size: tokens of a page.
    """

    pages: Tensor
    page_size: int


class FollowedStep(NamedTuple):
    """``input_ids``, ``positions``, ``sample_positions``, ``slot_mapping``: ``[T]`` int64; ``seq_lens``,
    ``state_slots``: ``[S]`` int32."""

    input_ids: Tensor
    positions: Tensor
    sample_positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
    state_slots: Tensor


class AcceptanceRule(NamedTuple):
    """When a draft is right.

    Attributes:
        never: ``[E]`` int64, ids of drafts that are never accepted; None: there are none.
        bound: a draft is right if a random number below 2**31 is below it, and then stands in the place of the token
            that was sampled; None: if it is that token.
    """

    never: Tensor | None = None
    bound: int | None = None

    @classmethod
    def of(cls, synthetic_rate: float | None, never: Tensor | None) -> Self:
        """Return the rule with a probability of being right in place of a bound."""
        bound = None if synthetic_rate is None else round(synthetic_rate * MASK_31)
        return cls(never if never is not None and len(never) else None, bound)


class AcceptedDrafts(NamedTuple):
    """The result of ``accept_drafts``.

    Attributes:
        token_ids: ``[T]`` int64, the token sampled at every position.
        counted: ``[T]`` bool, whether the token is part of the sequence.
        num_accepted: ``[S]`` int64, number of accepted drafts.
        last: ``[S]`` int64, index of the sequence's last counted token.
    """

    token_ids: Tensor
    counted: Tensor
    num_accepted: Tensor
    last: Tensor


class PlacesAhead(NamedTuple):
    """The result of ``places_ahead``.

    Attributes:
        positions, slot_mapping: ``[A, N]`` int64.
        seq_lens: ``[A, N]`` int32.
    """

    positions: Tensor
    slot_mapping: Tensor
    seq_lens: Tensor
