"""The kernel that brings a step's inputs to the device, against the reference."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.steps import load_step_inputs

ARRAYS, STRIDE = 3, 1200


@pytest.mark.parametrize("num_tokens", [1, 512, 513, 1200])
@pytest.mark.parametrize(("num_others", "num_updates"), [(2, 0), (512, 1), (700, 600)])
def test_what_a_step_has_is_there(num_tokens: int, num_others: int, num_updates: int) -> None:
    gen = torch.Generator().manual_seed(num_tokens + num_others)
    size = ARRAYS * STRIDE + num_others
    host = torch.randint(-(2**62), 2**62, (size + 2 * 600,), generator=gen)
    updates = host[size:].view(-1, 2)
    updates[:, 0] = torch.randperm(800, generator=gen)[:600]
    updates[:, 1] = torch.randint(1, 2**31 - 1, (600,), generator=gen)
    if DEVICE == "cuda":
        host = host.pin_memory()
    block, table = (torch.full(n, -7, device=DEVICE) for n in ((size,), (2, 400)))
    tables = [table.to(torch.int32), table.to(torch.int32)]
    load_step_inputs(host, block, tables[0], ARRAYS, STRIDE, num_tokens, num_updates, backend=Backend.TRITON)
    whole = torch.empty_like(block)
    load_step_inputs.reference(host, whole, tables[1], ARRAYS, STRIDE, num_tokens, num_updates)
    assert torch.equal(whole.cpu(), host[:size]) and torch.equal(tables[0], tables[1])
    assert (tables[0] != -7).sum() == num_updates
    found, expected = ((b[: ARRAYS * STRIDE].view(ARRAYS, STRIDE), b[ARRAYS * STRIDE :]) for b in (block, whole))
    assert torch.equal(found[1], expected[1]) and torch.equal(found[0][:, :num_tokens], expected[0][:, :num_tokens])
    assert (found[0][:, num_tokens:] == -7).all(), "more is copied than the step has"


def test_host_and_device_may_be_the_same_memory() -> None:
    host, table = torch.arange(12), torch.zeros(4, dtype=torch.int32)
    host[8:] = torch.tensor([3, 30, 1, 10])
    load_step_inputs.reference(host, host[:8], table, 2, 3, 2, 2)
    assert host[:8].tolist() == list(range(8)) and table.tolist() == [0, 10, 0, 30]
