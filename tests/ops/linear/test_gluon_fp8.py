"""FP8 products of very few rows for Hopper, on such a GPU or emulated, against float64 of the dequantised operands."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernels are for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from tests.ops.linear.test_triton_fp8 import assert_near, block_of, fp8_matrix, inputs, product, quantised
from tests.ops.moe.test_triton_fp8_moe import check_moe
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.linear import fp8 as fp8_linear_module
from weft.ops.linear import fp8_linear
from weft.ops.linear.fp8 import fp8_product_triton
from weft.ops.linear.fp8_few_rows import FewRows, HopperRows
from weft.ops.linear.fp8_few_rows_hopper import hopper_config
from weft.ops.moe import fp8_pairs_hopper as fp8_moe_pairs_hopper
from weft.ops.moe.fp8_experts import SINGLE
from weft.ops.triton.launch import launches_handled

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
if torch.cuda.is_available() and not ON_HOPPER:
    pytest.skip("the kernels are for Hopper", allow_module_level=True)

CASES = [  # tokens, weight rows, inner size, kernel, scheme
    (1, 256, 1024, HopperRows(16, 4, None), "block"),
    (3, 200, 512, HopperRows(32, 4, None), "token"),
    (6, 128, 512, HopperRows(16, 4, None), "static"),
    (8, 256, 512, HopperRows(32, 2, None), "block"),
    *(
        pytest.param(tokens, rows, inner, HopperRows(*config), scheme, marks=pytest.mark.gpu)
        for tokens in (1, 2, 4, 5, 8)
        for scheme in ("block", "token", "static")
        for rows, inner, config in (
            (12288, 2048, (16, 8, 80)),
            (2048, 4096, (16, 16, None)),
            (200, 1024, (32, 4, None)),
        )
    ),
]


@pytest.fixture(autouse=True)
def emulated() -> Iterator[list[str]]:
    """Kernels that were launched, and run unless there is a GPU."""
    launched: list[str] = []
    emulator = Emulator()

    def handle(kernel: Any, grid: Any, args: Any, options: Any) -> None:
        launched.append(kernel.fn.__name__)
        emulator.handle(kernel, grid, args, options)
        assert len(emulator.waited) == math.prod(grid), "a program that does not wait"

    if ON_HOPPER:
        yield launched
    else:
        with launches_handled(handle):
            yield launched


@pytest.mark.parametrize(("tokens", "rows", "inner", "config", "scheme"), CASES, ids=str)
def test_against_float64(tokens: int, rows: int, inner: int, config: HopperRows, scheme: str) -> None:
    """Into a slice of a poisoned output; and as a gated product."""
    block, dtype = block_of(scheme), torch.bfloat16 if ON_HOPPER else torch.float32
    x, static = inputs(tokens, inner, dtype, scheme)
    weight, scale = fp8_matrix(rows, inner, block)
    bias, wide = torch.randn(rows, device=DEVICE).to(dtype), torch.full((tokens, rows + 8), torch.nan, device=DEVICE)
    wide = wide.to(dtype)
    fp8_product_triton(x, Fp8Matrix(weight, scale, static, block), bias, wide[:, :rows], config=config)
    want = product(*quantised(x, static, block), weight, scale, block)
    assert_near(wide[:, :rows], want + bias.double())
    assert wide[:, rows:].isnan().all()
    gated = torch.empty(tokens, rows // 2, dtype=dtype, device=DEVICE)
    fp8_product_triton(x, Fp8Matrix(weight, scale, static, block), None, gated, silu_mul=True, config=config)
    gate, up = want.chunk(2, dim=-1)
    assert_near(gated, torch.nn.functional.silu(gate) * up)


@pytest.mark.parametrize("tokens", [1, 5])
def test_plain_rows_are_of_the_same_launch(tokens: int, emulated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_linear_module, "choose_config", lambda *args: HopperRows(32, 4, None))
    x = inputs(tokens, 512, torch.bfloat16, "block")[0]
    weight, scale = fp8_matrix(256, 512, 128)
    plain, bias = torch.randn(24, 512, device=DEVICE).bfloat16() / 16, torch.randn(280, device=DEVICE).bfloat16()
    got = fp8_linear(x, weight, scale, bias, None, plain, block=128, backend=Backend.TRITON)
    want = product(*quantised(x, None, 128), weight, scale, 128)
    assert_near(got, torch.cat([want, x.double() @ plain.double().T], dim=1) + bias.double())
    assert ON_HOPPER or emulated == ["_fp8_few_rows_hopper_kernel"]


@pytest.mark.parametrize(
    ("num_tokens", "scheme"),
    [(2, "block"), pytest.param(2, "static", marks=pytest.mark.gpu), pytest.param(2, "token", marks=pytest.mark.gpu)],
)
def test_experts(num_tokens: int, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_moe_pairs_hopper, "runs_gluon", lambda device: True)
    check_moe((num_tokens, 3, 2, 1024, 512), scheme, torch.bfloat16 if ON_HOPPER else torch.float32, 1)


def test_given_tiles_are_heard_where_the_kernel_for_hopper_would_be_chosen(emulated: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8_moe_pairs_hopper, "runs_gluon", lambda device: True)
        check_moe((1, 2, 1, 1024, 512), "block", torch.float32, 0, SINGLE)
        assert not emulated, "SINGLE is for the kernel in Triton"


@pytest.mark.parametrize("inner", [128, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 28672])
def test_the_rule_keeps_to_what_the_kernel_can(inner: int) -> None:
    """Warps share the inner dimension evenly, and hold their weights in half of the registers."""
    found = {tokens: hopper_config(2048, inner, tokens) for tokens in (1, 4, 8, 16)}
    assert (found[1] is not None) == (512 <= inner <= 8192)
    assert found[16] is None and (found[8] is None) == (inner > 4096 or inner == 128), "too many inputs to quantise"
    for config in filter(None, found.values()):
        assert inner % (128 * config.warps) == 0 and config.rows * inner <= 8192 * config.warps


@pytest.mark.parametrize(("hidden", "width", "taken"), [(2048, 512, True), (6144, 1536, False), (2048, 9216, False),
                                                        (8192, 512, False), (2048, 256, False)])  # fmt: skip
def test_experts_are_taken_pair_by_pair_where_registers_hold_their_weights(
    hidden: int, width: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_moe_pairs_hopper, "runs_gluon", lambda device: True)
    down = torch.empty(1, hidden, width, dtype=E4M3, device="meta")
    assert fp8_moe_pairs_hopper.takes_pairs(down) == taken


def test_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of five rows takes what one of eight does, as the start compiles sizes by powers of two."""
    weight = torch.empty(6144, 2048, dtype=E4M3, device="meta")
    monkeypatch.setattr(fp8_linear_module, "has_table", lambda device: False)
    monkeypatch.setattr(fp8_linear_module, "runs_gluon", lambda device: True)
    chosen = [type(fp8_linear_module.choose_config(weight, tokens, False, 128)) for tokens in (1, 4, 5, 8)]
    assert chosen == [HopperRows, HopperRows, FewRows, FewRows]
    monkeypatch.setattr(fp8_linear_module, "runs_gluon", lambda device: False)
    assert isinstance(fp8_linear_module.choose_config(weight, 1, False, 128), FewRows)
