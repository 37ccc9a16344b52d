"""Padding overwrites what a larger step left in every array after the real values."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch

from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.runner.batch_builder import CHUNK_COLUMNS, BatchBuilder
from weft.runner.drafting.step_drafts import DraftRules
from weft.runner.rows import RowTable
from weft.runner.step_layout import LayoutRules

OLD, ROWS, CPU = 9, 8, torch.device("cpu")


@pytest.fixture
def builder() -> BatchBuilder:
    """A builder whose arrays are full of old values, and whose first rows have prompts of 40 tokens."""
    table = RowTable(ROWS, 4, CPU)
    for row in range(3):
        table.add(NewRequest(row, array("I", [5] * 40), 40, RowSampling(temperature=1.0, top_p=0.5)))
    rules = LayoutRules(True, DraftRules(2, lambda num_seqs: 2, verifies=True, keeps_states=True))
    sizes: dict[str, Any] = {"page_size": 16, "max_num_tokens": 64, "max_num_seqs": ROWS}
    builder = BatchBuilder(table, rules, **sizes, ends_sparse=False, device=CPU)
    for values in builder._buffers._views[0].values():
        values[:] = OLD
    return builder


def built(builder: BatchBuilder, requests: list[ScheduledRequest], padded: BatchDescriptor) -> dict[str, list[Any]]:
    builder.build(builder.rules.layout(SchedulerOutput(1, requests)), padded)
    return {name: values.tolist() for name, values in builder._host.items()}


def decode(row: int) -> ScheduledRequest:
    return ScheduledRequest(row, 40, 1, [], 4 + row, True)


def test_a_verification_writes_to_slot_0_and_follows_nobody(builder: BatchBuilder) -> None:
    requests = [ScheduledRequest(r, 40, 3, [], 3, True, [(41, 1), (42, 2)], 0, [5, 6], [], True) for r in (0, 1)]
    host = built(builder, requests, BatchDescriptor.verification(4, 3, 64))
    assert host["verify_slots"][:13] == [1, 2, 3] * 2 + [0] * 6 + [OLD]
    assert host["follows"][:5] == [1, 1, 0, 0, OLD] and host["state_slots"][:5] == [3, 3, 0, 0, OLD]
    assert host["seq_lens"][:5] == [43, 43, 3, 3, OLD] and host["cu_seqlens_q"][:6] == [0, 3, 6, 9, 12, OLD]
    for name in ("input_ids", "positions", "slot_mapping"):
        assert host[name][6:13] == [0] * 6 + [OLD]
    for name in ("sample_positions", "temperature", "min_p", "top_k", "seeds"):
        assert host[name][6:13] == [0] * 6 + [OLD]
    assert host["top_p"][5:13] == [0.5] + [1] * 6 + [OLD]
    assert host["rows"][:5] == [0, 1, ROWS, ROWS, OLD] and host["sample_rows"][6:13] == [ROWS] * 6 + [OLD]


def test_a_step_may_have_as_many_sequences_as_tokens() -> None:
    """Padding alone, as while graphs are captured."""
    for size in (1, 2, 3):
        sizes: dict[str, Any] = {"page_size": 16, "max_num_tokens": size, "max_num_seqs": size}
        builder = BatchBuilder(RowTable(size, 4, CPU), LayoutRules(False), **sizes, ends_sparse=False, device=CPU)
        host = built(builder, [], BatchDescriptor.decodes(size, 64))
        assert host["cu_seqlens_q"] == list(range(size + 1))


def test_decodes_in_a_mixture_have_no_chunk(builder: BatchBuilder) -> None:
    """The table of chunks was written by no step, or by one before."""
    padded = builder.mixed_shape(24, 0)
    host = built(builder, [decode(row) for row in range(3)], padded)
    assert padded.num_chunks and host["chunk_first"] == [0] * 9
    for column, value in zip(CHUNK_COLUMNS, (0, 0, 0, -1), strict=True):
        assert host[column][: padded.num_chunks] == [value] * padded.num_chunks


def test_a_mixture_decodes_in_slot_0(builder: BatchBuilder) -> None:
    requests = [decode(0), decode(1), ScheduledRequest(2, 0, 10, [1], 6, True)]
    host = built(builder, requests, builder.mixed_shape(24, 0))
    assert host["decode_slots"] == [4, 5] + [0] * 6 and host["state_slots"] == [4, 5, 6] + [0] * 5
    assert host["slot_mapping"][12:25] == [0] * 12 + [OLD] and host["cu_seqlens_q"] == [0, 1, 2] + [12] * 6
