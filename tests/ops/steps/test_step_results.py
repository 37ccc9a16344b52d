"""The kernel that writes a step's results into the host's memory, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.steps import NUM_RESULTS, store_step_results


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 0, 0, 0), (0, 0, 0, 3, 0), (300, 300, 300, 0, 256), (7, 7, 7, 257, 0), (256, 256, 0, 1, 600)],
)
def test_each_row_begins_with_its_results(sizes: tuple[int, ...]) -> None:
    gen = torch.Generator().manual_seed(sum(sizes))
    ids, failed, counted, prefill_failed, drafts = (
        torch.randint(-(2**62), 2**62, (size,), generator=gen) if i in (0, 4) else torch.rand(size, generator=gen) < 0.5
        for i, size in enumerate(sizes)
    )
    results = [r.to(DEVICE) for r in (ids, failed, counted, prefill_failed, drafts.view(-1, 2))]
    hosts = [torch.full((NUM_RESULTS, 700), -7, pin_memory=DEVICE == "cuda") for _ in range(2)]
    store_step_results(hosts[0], *results, backend=Backend.TRITON)
    store_step_results.reference(hosts[1], *results)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for row, values in zip(hosts[1], (ids, failed, counted, prefill_failed, drafts), strict=True):
        assert torch.equal(row[: len(values)], values.long()) and (row[len(values) :] == -7).all()
    assert torch.equal(hosts[0], hosts[1])
