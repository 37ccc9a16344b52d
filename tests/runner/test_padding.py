"""Padding overwrites what a larger step left in every array behind the real rows."""

from __future__ import annotations

import numpy as np

from weft.graph.batch_descriptor import BatchDescriptor
from weft.runner.padding import CHUNK_COLUMNS, Padding

OLD, ROW, SIZE = 9, 7, 24
COLUMNS = (
    "input_ids positions slot_mapping token_rows rows state_slots seq_lens cu_seqlens_q decode_slots verify_slots "
    "follows sample_indices sample_positions sample_rows temperature min_p top_k top_p seeds"
).split()


def arrays() -> dict[str, np.ndarray]:
    return {name: np.full(SIZE + 1, OLD) for name in COLUMNS}


def test_a_verification_writes_to_slot_0_and_follows_nobody() -> None:
    host, query_len = arrays(), 3
    Padding(ROW).uniform(host, BatchDescriptor(6, 2, 0, query_len, 50, 0, 6, query_len=query_len), 4)
    assert host["verify_slots"].tolist()[:13] == [OLD] * 6 + [0] * 6 + [OLD]
    assert host["follows"].tolist()[:5] == [OLD] * 2 + [0] * 2 + [OLD]
    assert host["state_slots"].tolist()[:5] == [OLD] * 2 + [0] * 2 + [OLD]
    assert host["seq_lens"].tolist()[:5] == [OLD] * 2 + [query_len] * 2 + [OLD]
    assert host["cu_seqlens_q"].tolist()[2:6] == [OLD, 9, 12, OLD]
    assert host["sample_indices"].tolist()[5:13] == [OLD, *range(6, 12), OLD]
    for name in ("input_ids", "positions", "slot_mapping"):
        assert host[name].tolist()[5:13] == [OLD] + [0] * 6 + [OLD]
    assert host["top_p"].tolist()[5:13] == [OLD] + [1] * 6 + [OLD]
    assert host["rows"].tolist()[2:4] == host["sample_rows"].tolist()[6:8] == [ROW] * 2


def test_decodes_in_a_mixture_have_no_chunk() -> None:
    """The table of chunks was written by no step, or by one before."""
    host = arrays() | {name: np.full(SIZE + 1, OLD) for name in (*CHUNK_COLUMNS, "chunk_first")}
    padded = BatchDescriptor.mixed(SIZE, 8, 50, True)
    Padding(ROW).mixed(host, BatchDescriptor(3, 3, 3, 1, 50, 0, 3), padded)
    assert padded.num_chunks and host["chunk_first"].tolist() == [0] * 9 + [OLD] * (SIZE - 8)
    for column, value in zip(CHUNK_COLUMNS, (0, 0, 0, -1), strict=True):
        assert host[column].tolist()[: padded.num_chunks] == [value] * min(padded.num_chunks, SIZE + 1)


def test_a_mixture_decodes_in_slot_0() -> None:
    host = arrays()
    host["state_slots"][:3] = [4, 5, 6]
    Padding(ROW).mixed(host, BatchDescriptor(12, 3, 2, 10, 50, 0, 3), BatchDescriptor.mixed(SIZE, 8, 50, False))
    assert host["decode_slots"].tolist()[:9] == [4, 5] + [0] * 6 + [OLD]
    assert host["state_slots"].tolist()[:9] == [4, 5, 6] + [0] * 5 + [OLD]
    assert host["slot_mapping"].tolist()[12:SIZE] == [0] * 12 and host["cu_seqlens_q"].tolist()[4:9] == [12] * 5
