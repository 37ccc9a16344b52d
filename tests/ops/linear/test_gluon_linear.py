"""The gated product of many rows for Hopper, on such a GPU or emulated: values and barriers."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernels are for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from weft.ops.backend import Backend
from weft.ops.linear import gated_hopper as gated_linear_hopper
from weft.ops.linear import linear_silu_mul
from weft.ops.linear.gated_hopper import takes_gated
from weft.ops.triton.launch import launches_handled

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


SIZES = [300, *(pytest.param(size, marks=pytest.mark.gpu) for size in (256, 1000, 4096))]


def run(call: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Run on the GPU, or emulate with fewer programs than tiles. Memory that nobody writes is NaN (``conftest.py``)."""
    if ON_HOPPER:
        return call()
    monkeypatch.setattr(gated_linear_hopper, "MULTIPROCESSORS", 2)
    with launches_handled(Emulator().handle):
        return call()


def pretend_hopper(monkeypatch: pytest.MonkeyPatch, least_filled: float, multiprocessors: int = 132) -> None:
    monkeypatch.setattr(gated_linear_hopper, "runs_gluon", lambda device: True)
    monkeypatch.setattr(gated_linear_hopper, "LEAST_FILLED", least_filled)
    monkeypatch.setattr(gated_linear_hopper, "MULTIPROCESSORS", multiprocessors)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("num_rows", SIZES)
def test_equals_float64(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden_size, width = (1024, 3072) if ON_HOPPER else (320, 160)
    x = torch.randn(num_rows, hidden_size, device=DEVICE).bfloat16()
    weight = torch.randn(2 * width, hidden_size, device=DEVICE).mul(hidden_size**-0.5).bfloat16()
    out = run(lambda: gated_linear_hopper.gated_linear_hopper(x, weight), monkeypatch)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    assert error(out, want) < 4e-3
    assert max(map(error, out, want)) < 1e-2


@pytest.mark.parametrize("num_rows", SIZES)
def test_without_a_gate(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tile has 64 of its 192 outputs."""
    hidden_size, width = (1024, 4096) if ON_HOPPER else (320, 256)
    x = torch.randn(num_rows, hidden_size, device=DEVICE).bfloat16()
    weight = torch.randn(width, hidden_size, device=DEVICE).mul(hidden_size**-0.5).bfloat16()
    out = run(lambda: gated_linear_hopper.gated_linear_hopper(x, weight, gated=False), monkeypatch)
    want = x.double() @ weight.double().T
    assert error(out, want) < 4e-3
    assert max(map(error, out, want)) < 1e-2


@pytest.mark.skipif(ON_HOPPER, reason="which kernels are chosen is asked without launching any")
def test_only_what_pays_goes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hopper(monkeypatch, 0.75, multiprocessors=6)
    bf16 = torch.bfloat16

    def gated(rows: int, width: int = 160, dtype: torch.dtype = bf16) -> bool:
        return takes_gated(torch.zeros(rows, 256, dtype=dtype), torch.zeros(2 * width, 256, dtype=dtype))

    assert gated(692) and not gated(691), "six tiles of 256 rows by 96 outputs in a wave: 692 rows of 160 fill 75%"
    assert not gated(769), "a second wave begins"
    assert gated(1384), "and is filled"
    assert not gated(692, dtype=torch.float32) and not gated(692, width=168)
    odd, weight = torch.zeros(692 * 256 + 4, dtype=bf16)[4:].view(692, 256), torch.zeros(320, 256, dtype=bf16)
    assert not takes_gated(odd, weight), "not aligned to 16 bytes"
    assert not takes_gated(torch.zeros(692, 192, dtype=bf16), weight[:, :192].contiguous()), "a ring is not filled"


@pytest.mark.skipif(ON_HOPPER, reason="which kernels are chosen is asked without launching any")
def test_a_bias_is_no_business_of_its(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hopper(monkeypatch, 0)
    x, weight, names = torch.zeros(5, 256).bfloat16(), torch.zeros(64, 256).bfloat16(), []
    with launches_handled(lambda kernel, *launch: names.append(kernel.fn.__name__)):
        linear_silu_mul(x, weight, None, backend=Backend.TRITON)
        assert names == ["_gated_hopper_kernel"]
        linear_silu_mul(x, weight, weight[:, 0].clone(), backend=Backend.TRITON)
        assert len(names) == 1
