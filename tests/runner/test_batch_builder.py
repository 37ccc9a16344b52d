"""Batches hold exactly what the scheduler output says."""

from __future__ import annotations

from array import array

import pytest
import torch
from msgspec.structs import replace

from tests.ops.interpreter import DEVICE  # noqa: F401 (before any kernel)
from weft.config.speculation import SpeculativeConfig
from weft.graph.batch_descriptor import BatchDescriptor
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.ops.backend import Backend
from weft.runner.batch_builder import PER_TOKEN, BatchBuilder
from weft.runner.drafting.drafters import NgramDrafts
from weft.runner.drafting.step_drafts import DraftRules
from weft.runner.rows import RowTable
from weft.runner.step_inputs import StepInputs
from weft.runner.step_layout import LayoutRules, StepLayout, chunk_bounds

PAGE = 16
CPU = torch.device("cpu")


def make(
    rows: int = 8, recurrent: bool = True, num_drafts: int = 4, backend: Backend = Backend.TORCH
) -> tuple[RowTable, BatchBuilder]:
    table = RowTable(rows, 64, CPU)
    drafts = None
    if num_drafts:
        rules = DraftRules(num_drafts, lambda num_seqs: num_drafts, verifies=True, keeps_states=recurrent)
        drafts = NgramDrafts(SpeculativeConfig("ngram", num_drafts, 2, 4), 1024, rules, table, PAGE, backend)
    builder = BatchBuilder(
        table,
        LayoutRules(recurrent, drafts.rules if drafts is not None else None),
        page_size=PAGE,
        max_num_tokens=512,
        max_num_seqs=rows,
        ends_sparse=False,
        device=CPU,
        drafts=drafts,
        backend=backend,
    )
    return table, builder


def build(table: RowTable, builder: BatchBuilder, requests: list[ScheduledRequest]) -> StepInputs:
    layout = lay_out(builder, requests)
    builder.build(layout, layout.shape)
    return builder.materialise(layout.shape)


def lay_out(builder: BatchBuilder, requests: list[ScheduledRequest]) -> StepLayout:
    return builder.rules.layout(SchedulerOutput(1, requests))


def test_chunk_bounds_stand_at_absolute_multiples_and_checkpoints() -> None:
    assert chunk_bounds(0, 64, []) == [0, 64]
    assert chunk_bounds(0, 65, []) == [0, 64, 65]
    assert chunk_bounds(63, 2, []) == [63, 64, 65]
    assert chunk_bounds(10, 200, [100, 210]) == [10, 64, 100, 128, 192, 210]
    assert chunk_bounds(0, 128, [64]) == [0, 64, 128]


def test_chunks_do_not_depend_on_how_a_prefill_is_split() -> None:
    whole = set(chunk_bounds(0, 1000, []))
    split = set(chunk_bounds(0, 210, [])) | set(chunk_bounds(210, 790, []))
    assert split - whole == {210}


def test_what_the_host_knows_of_prefills() -> None:
    """Two figures of sequences that do not decode: all their tokens, and the shortest chunk with a context."""
    table, builder = make(4)
    for row in range(4):
        table.add(NewRequest(row, array("I", [7] * 90), 90, RowSampling()))

    def known(*sequences: tuple[int, int]) -> tuple[int | None, int | None]:
        requests = [
            ScheduledRequest(row, start, count, [row + 1] * 6, row + 1, False)
            for row, (start, count) in enumerate(sequences)
        ]
        batch = build(table, builder, requests).batch
        return batch.num_prefill_keys, batch.least_chunk

    assert known((20, 1), (30, 40), (60, 25), (0, 3)) == (158, 25)
    assert known((20, 1), (0, 40), (0, 3)) == (43, 44), "none continues"
    assert known((20, 1)) == (0, 1)


def test_mixed_batch() -> None:
    table, builder = make()
    table.add(NewRequest(3, array("I", [7] * 20), 20, RowSampling()))
    table.add(NewRequest(5, array("I", list(range(100, 210))), 110, RowSampling()))
    build(table, builder, [ScheduledRequest(3, 0, 20, [9, 4], 2, True)])
    table.set_last_tokens(torch.tensor([3]), torch.tensor([42]))
    requests = [
        ScheduledRequest(3, 20, 1, [], 2, True),
        ScheduledRequest(5, 0, 70, [1, 2, 3, 5, 6], 7, False, [(33, 4)]),
    ]
    step = build(table, builder, requests)
    batch = step.batch
    assert (batch.num_tokens, batch.num_seqs, batch.num_decodes) == (71, 2, 1)
    assert (batch.max_query_len, batch.max_seq_len) == (70, 70)
    assert step.input_ids.tolist() == [42, *range(100, 170)]
    assert batch.positions.tolist() == [20, *range(70)]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 71]
    assert batch.seq_lens.tolist() == [21, 70]
    assert batch.state_slots.tolist() == [2, 7]
    assert batch.slot_mapping[0] == 4 * PAGE + 4
    assert batch.slot_mapping[1 + 50] == 5 * PAGE + 2
    assert batch.page_table.tolist() == [[9, 4, 0, 0, 0], [1, 2, 3, 5, 6]]
    assert step.samples.indices.tolist() == [0] and step.samples.rows.tolist() == [3]
    chunks = batch.chunk_table
    assert chunks.seq.tolist() == [1, 1, 1]
    assert chunks.start.tolist() == [1, 34, 65]
    assert chunks.length.tolist() == [33, 31, 6]
    assert chunks.checkpoint_slot.tolist() == [4, -1, -1]
    assert chunks.first.tolist() == [0, 0, 3] and chunks.max_seqs == 1


def test_decode_batch_has_no_chunks_and_feeds_the_sampled_tokens() -> None:
    table, builder = make()
    for row in (1, 2):
        table.add(NewRequest(row, array("I", [5, 6]), 2, RowSampling()))
        build(table, builder, [ScheduledRequest(row, 0, 2, [row], row, True)])
    table.set_last_tokens(torch.tensor([1, 2]), torch.tensor([11, 22]))
    step = build(table, builder, [ScheduledRequest(r, 2, 1, [], r, True) for r in (2, 1)])
    assert step.input_ids.tolist() == [22, 11]
    assert not step.batch.chunks and step.batch.num_decodes == 2


def test_resumed_request_feeds_the_tokens_it_brought() -> None:
    table, builder = make()
    table.add(NewRequest(0, array("I", [1, 2, 3, 4, 5]), 3, RowSampling()))
    table.set_last_tokens(torch.tensor([0]), torch.tensor([99]))
    step = build(table, builder, [ScheduledRequest(0, 0, 5, [3], 1, True)])
    assert step.input_ids.tolist() == [1, 2, 3, 4, 5]


def test_what_is_stored_already_is_read_and_not_written() -> None:
    """Positions below ``write_start`` are computed again: their KV goes to page 0, whichever chunk they come in."""
    table, builder = make()
    for start, count, written in ((16, 60, 40), (16, 8, 40), (40, 36, 40), (16, 60, 0)):
        table.add(NewRequest(3, array("I", list(range(90))), 90, RowSampling()))
        batch = build(table, builder, [ScheduledRequest(3, start, count, [5, 6, 7, 8, 9], 2, False, [], written)]).batch
        real = [(5 + p // PAGE) * PAGE + p % PAGE for p in range(start, start + count)]
        expected = [0 if p < written else slot for p, slot in zip(range(start, start + count), real, strict=True)]
        assert batch.slot_mapping.tolist() == expected
        pages = -(-(start + count) // PAGE)
        assert batch.page_table[0, :pages].tolist() == [5, 6, 7, 8, 9][:pages], "attention reads the stored pages"


def test_what_is_stored_of_one_request_says_nothing_of_the_next() -> None:
    table, builder = make()
    for row in (3, 4):
        table.add(NewRequest(row, array("I", list(range(90))), 90, RowSampling()))
    requests = [
        ScheduledRequest(3, 16, 8, [5, 6], 2, False, [], 40),
        ScheduledRequest(4, 0, 6, [7], 3, False),
    ]
    batch = build(table, builder, requests).batch
    assert batch.slot_mapping.tolist() == [0] * 8 + [7 * PAGE + p for p in range(6)]


def test_refilled_row_starts_with_an_empty_page_table() -> None:
    table, builder = make()
    table.add(NewRequest(0, array("I", [1] * 40), 40, RowSampling()))
    build(table, builder, [ScheduledRequest(0, 0, 40, [3, 4, 5], 1, True)])
    table.add(NewRequest(0, array("I", [2] * 10), 10, RowSampling()))
    step = build(table, builder, [ScheduledRequest(0, 0, 10, [8], 1, True)])
    assert step.batch.page_table.tolist() == [[8]]


def test_largest_step_fits_the_buffers() -> None:
    """Every sequence in the worst place: each token count that adds the most chunks, all checkpoints taken."""
    table, builder = make(rows=8)
    for row in range(8):
        table.add(NewRequest(row, array("I", [0] * 200), 200, RowSampling()))
    pages = list(range(1, 14))
    requests = [ScheduledRequest(r, 63, 64, pages, r + 1, False, [(p, 9) for p in (70, 80, 90, 100)]) for r in range(8)]
    step = build(table, builder, requests)
    assert int(step.batch.chunk_table.length.sum()) == 512


def test_sampling_parameters_travel_with_the_step() -> None:
    table, builder = make()
    params = RowSampling(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=2**64 - 1)
    table.add(NewRequest(4, array("I", [1, 2, 3]), 3, params))
    samples = build(table, builder, [ScheduledRequest(4, 0, 3, [1], 1, True)]).samples
    assert (
        samples.temperature.tolist() == [0.5] and samples.top_p.tolist() == [0.25] and samples.min_p.tolist() == [0.125]
    )
    assert samples.top_k.tolist() == [7] and samples.seeds.tolist() == [-1] and samples.positions.tolist() == [0]


def test_padding_rows_touch_only_what_is_reserved() -> None:
    """Padding decodes token 0 at position 0 of page 0 with slot 0, whatever an earlier, larger step left behind."""
    table, builder = make()
    for row in range(8):
        table.add(NewRequest(row, array("I", [9] * 40), 40, RowSampling(temperature=1.0, top_p=0.5, seed=5)))
    build(
        table, builder, [ScheduledRequest(r, 0, 40, [3 * r + 1, 3 * r + 2, 3 * r + 3], r + 1, True) for r in range(8)]
    )
    layout = lay_out(builder, [ScheduledRequest(r, 40, 1, [], r + 1, True) for r in (2, 6, 4)])
    padded = BatchDescriptor.decodes(8, 1024)
    builder.build(layout, padded)
    assert (layout.shape.num_tokens, layout.shape.num_seqs) == (3, 3)
    inputs = builder.materialise(padded)
    batch, samples = inputs.batch, inputs.samples
    assert batch.slot_mapping[3:].tolist() == [0] * 5 and batch.state_slots[3:].tolist() == [0] * 5
    assert batch.positions[3:].tolist() == [0] * 5 and batch.seq_lens.tolist() == [41] * 3 + [1] * 5
    assert batch.page_table[3:].count_nonzero() == 0 and batch.page_table[0, :3].tolist() == [7, 8, 9]
    assert batch.cu_seqlens_q.tolist() == list(range(9))
    assert batch.token_count is not None and batch.token_count.tolist() == [3]
    assert samples.rows.tolist() == [2, 6, 4] + [table.padding_row] * 5
    assert samples.temperature[3:].tolist() == [0.0] * 5 and samples.top_p[3:].tolist() == [1.0] * 5
    assert samples.indices[:3].tolist() == [0, 1, 2]


def test_padding_of_a_mixture_claims_no_token_and_no_chunk() -> None:
    """Sequences that fill a step up are empty: no tokens, no slot, no chunk, whatever a larger step left behind."""
    table, builder = make()
    for row in range(8):
        table.add(NewRequest(row, array("I", [9] * 60), 60, RowSampling()))
    pages = [[3 * r + 1, 3 * r + 2, 3 * r + 3, 30 + r] for r in range(8)]
    build(table, builder, [ScheduledRequest(r, 0, 40, pages[r][:3], r + 1, True) for r in range(8)])
    requests = [ScheduledRequest(r, 40, 1, [], r + 1, True) for r in (2, 6)]
    requests.append(ScheduledRequest(4, 40, 20, [34], 5, True))
    padded = BatchDescriptor.mixed(32, 8, 1024, True)
    builder.build(lay_out(builder, requests), padded)
    batch = builder.materialise(padded).batch
    assert batch.mixed is not None and batch.mixed.counts.tolist() == [22, 3, 2]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 22] + [22] * 5
    assert batch.seq_lens.tolist() == [41, 41, 60] + [0] * 5 and batch.state_slots.tolist() == [3, 7, 5] + [0] * 5
    assert batch.mixed.decode_slots.tolist() == [3, 7] + [0] * 6
    assert batch.slot_mapping[22:].tolist() == [0] * 10 and batch.positions[22:].tolist() == [0] * 10
    assert batch.page_table[3:].count_nonzero() == 0
    chunks = batch.chunk_table
    assert chunks.length[0] == 20 and not chunks.length[1:].any() and (chunks.checkpoint_slot[1:] == -1).all()
    assert chunks.first.tolist() == [0, 0, 0] + [1] * 6


def test_equally_many_drafts_are_one_verification() -> None:
    """Every state has its slot, the working slot comes last; anything else in the step makes it a short prefill."""
    table, builder = make(rows=3, num_drafts=2)
    for row in range(3):
        table.add(NewRequest(row, array("I", list(range(40))), 40, RowSampling()))
    alike = [
        ScheduledRequest(0, 40, 3, [1, 2, 3, 4, 5, 6], 7, True, [(41, 8), (42, 9)], 0, [5, 6]),
        ScheduledRequest(2, 41, 3, [11, 12, 13, 14, 15, 16], 3, True, [(42, 4), (43, 5)], 0, [7, 8]),
    ]
    inputs = build(table, builder, alike)
    verification = inputs.batch.verification
    assert verification is not None and verification.query_len == 3
    assert verification.slots.tolist() == [[8, 9, 7], [4, 5, 3]] and not inputs.batch.chunks
    assert inputs.batch.num_decodes == 0 and inputs.batch.cu_seqlens_q.tolist() == [0, 3, 6]
    assert inputs.input_ids.tolist()[1:3] == [5, 6] and inputs.batch.positions.tolist() == [40, 41, 42, 41, 42, 43]
    assert inputs.samples.indices.tolist() == list(range(6)) and inputs.samples.positions.tolist() == [1, 2, 3, 2, 3, 4]
    decode = ScheduledRequest(1, 40, 1, [21, 22, 23], 2, True)
    snapshot = replace(alike[1], checkpoints=[*alike[1].checkpoints, (44, 6)])
    fewer = [replace(r, num_tokens=2, checkpoints=r.checkpoints[:1], draft_token_ids=[5]) for r in alike]
    for others in ([decode, *alike], [alike[0], snapshot], fewer):
        assert lay_out(builder, others).shape.query_len == 0


@pytest.mark.parametrize("drafts", [0, 2])
def test_what_a_padded_step_sends(drafts: int) -> None:
    """All that a graph of the padded size reads, to a device with memory of its own."""
    table, builder = make(recurrent=False, num_drafts=drafts, backend=Backend.TRITON)
    buffers = builder._buffers
    for values in buffers._views[0].values():
        values[:] = 7  # what steps before have left there
    for row in (0, 1):
        table.add(NewRequest(row, array("I", [5] * 40), 40, RowSampling()))
    buffers._words = torch.full_like(buffers._words, -7)
    buffers._device = buffers._words.view(torch.uint8)
    ends = [(24, 40), (23, 39)]
    requests = [ScheduledRequest(r, a, b - a, [r + 1], 0, True) for r, (a, b) in enumerate(ends)]
    builder.build(lay_out(builder, requests), builder.mixed_shape(40, 0))
    for name in PER_TOKEN:
        sent = buffers.device(name, 41).tolist()
        assert sent[:40] == builder._host[name][:40].tolist() and sent[40] == -7, name
    assert buffers.device("input_ids", 40).tolist() == [5] * 32 + [0] * 8
    decodes = [ScheduledRequest(r, 40, 1 + drafts, [r + 3], 0, True, [], 0, [6] * drafts) for r in (0, 1)]
    uniform = BatchDescriptor.verification(4, 1 + drafts, 64) if drafts else BatchDescriptor.decodes(4, 64)
    builder.build(lay_out(builder, decodes), uniform)
    count = 4 * (1 + drafts)
    assert buffers.device("positions", count).tolist() == [*range(40, 41 + drafts)] * 2 + [0] * (count // 2)
    assert buffers.device("counts", 3).tolist()[:2] == [2 + 2 * drafts, 2]
    assert table.device_page_table[:2, :2].tolist() == [[1, 3], [2, 4]]


def test_page_updates_beside_what_earlier_steps_left_in_the_buffers() -> None:
    table, builder = make()
    ids = array("I", [1] * 128)

    def give(row: int, start: int, pages: list[int]) -> None:
        build(table, builder, [ScheduledRequest(row, start, 16 * len(pages), pages, 1, True)])

    for row in (0, 1):
        table.add(NewRequest(row, ids, 128, RowSampling()))
    give(0, 0, list(range(10, 18)))
    table.add(NewRequest(0, ids, 128, RowSampling()))
    give(0, 0, [40, 41, 42, 43])
    give(0, 64, [50, 51, 52, 53])
    give(1, 0, [60, 61, 62, 63, 64])
    assert table.device_page_table[0, :8].tolist() == [40, 41, 42, 43, 50, 51, 52, 53]
    assert table.device_page_table[1, :6].tolist() == [60, 61, 62, 63, 64, 0]


def test_a_row_forgets_its_last_request() -> None:
    table, _ = make()
    for sampling, wanted in ((RowSampling(prompt_logprobs=2), {3: 2}), (RowSampling(), {})):
        table.add(NewRequest(3, array("I", [5, 6]), 2, sampling))
        assert table.prompt_logprobs == wanted
    table.add(NewRequest(3, array("I", [5] * 9), 9, RowSampling(), [(1, 6, 2, 3)]))
    assert list(table.rope_positions) == [3] and table.rope_delta[3] == -3
    table.add(NewRequest(3, array("I", [5, 6]), 2, RowSampling()))
    assert not table.rope_positions and not table.rope_delta.any()
