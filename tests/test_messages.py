"""A scheduler output reaches the other ranks as it was."""

from __future__ import annotations

from array import array

import pytest

from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput, decode_step, encode_step


def test_a_step_crosses_to_another_rank() -> None:
    new = NewRequest(3, array("I", [0, 7, 2**31, 2**32 - 1]), 3, RowSampling(bad_words=[[1, 2]]), [(0, 2, 2, 4)])
    step = SchedulerOutput(5, [ScheduledRequest(3, 0, 4, [9, 8], 1, True, [(2, 6)])], [new], token_masks={3: [b"\x05"]})
    arrived = decode_step(encode_step(step))
    assert arrived == step and arrived.new_requests[0].token_ids.typecode == "I"


def test_what_is_no_number_is_no_part_of_a_step() -> None:
    with pytest.raises(NotImplementedError, match="object cannot be part of a step"):
        encode_step(SchedulerOutput(1, [], token_masks={0: [object()]}))  # type: ignore[list-item]
