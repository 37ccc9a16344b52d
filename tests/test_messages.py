"""A step reaches the other ranks, and a request the engine, as it was."""

from __future__ import annotations

from array import array

import pytest

from weft.engine.wire import decode_to_engine, encode_to_engine
from weft.executor.worker import decode_step, encode_step
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.request import RequestSpec

IDS = array("I", [0, 7, 2**31, 2**32 - 1])


def test_a_step_crosses_to_another_rank() -> None:
    new = NewRequest(3, IDS, 3, RowSampling(bad_words=[[1, 2]]), [(0, 2, 2, 4)])
    step = SchedulerOutput(5, [ScheduledRequest(3, 0, 4, [9, 8], 1, True, [(2, 6)])], [new], token_masks={3: [b"\x05"]})
    arrived = decode_step(encode_step(step))
    assert arrived == step and arrived.new_requests[0].token_ids.typecode == "I"


def test_a_request_crosses_to_the_engine() -> None:
    spec = RequestSpec("r", IDS, RowSampling(seed=2**63), 4, checkpoint_positions=[2])
    (arrived,) = decode_to_engine(encode_to_engine([spec]))
    assert arrived == spec and isinstance(arrived, RequestSpec) and arrived.prompt_token_ids.typecode == "I"


def test_what_is_no_number_is_no_part_of_a_step() -> None:
    with pytest.raises(NotImplementedError, match="object cannot be sent to another process"):
        encode_step(SchedulerOutput(1, [], token_masks={0: [object()]}))  # type: ignore[list-item]
