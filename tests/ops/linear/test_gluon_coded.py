"""INT4 products of very few rows for Hopper, on such a GPU or emulated, against float64 of the dequantised weights."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.whole import unless_long
from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernels are for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.gluon_emulator import Emulator
from tests.ops.interpreter import DEVICE
from tests.ops.linear.test_triton_coded import FORMS, check, close, coded_matrix, inputs
from tests.ops.moe.test_triton_coded_moe import check_moe
from weft.ops.codes import CodedMatrix, dequantize_codes
from weft.ops.linear import coded
from weft.ops.linear.coded import coded_linear_parts_triton, coded_linear_silu_mul_triton, coded_linear_triton
from weft.ops.linear.coded_few_rows_hopper import few_rows_hopper_product
from weft.ops.linear.few_rows import CodedRows
from weft.ops.moe import NO_EXTRAS, ExpertExtras, coded_experts, coded_pairs_hopper
from weft.ops.triton.launch import launches_handled

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
if torch.cuda.is_available() and not ON_HOPPER:
    pytest.skip("the kernels are for Hopper", allow_module_level=True)

BF16 = torch.bfloat16
CASES = [  # tokens, weight rows, inner size, kernel
    (1, 40, 512, CodedRows(16, 2, 1)),
    (3, 72, 640, CodedRows(32, 4, 1)),
    (8, 40, 1408, CodedRows(16, 4, 2)),
    (1, 40, 1024, CodedRows(32, 2, 3)),
    *(
        pytest.param(tokens, rows, inner, CodedRows(*config), marks=pytest.mark.gpu)
        for tokens in (1, 2, 5, 8)
        for rows, inner, config in (
            (12352, 2048, (32, 4, 3)),
            (9216, 2048, (16, 4, 4)),
            (2048, 4096, (16, 8, 4)),
            (200, 5120, (32, 2, 4)),
            (1000, 17408, (32, 4, 4)),
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


def given(tokens: int, rows: int, inner: int) -> tuple[CodedMatrix, Tensor, Tensor, Tensor]:
    """A matrix, inputs beside NaN, the weights, and the product."""
    matrix, x = coded_matrix("int4 g128", rows, inner, scale_dtype=BF16), inputs(tokens, inner, BF16)
    weight = dequantize_codes(matrix)
    return matrix, x, weight, x.double() @ weight.double().t()


@pytest.mark.parametrize(("tokens", "rows", "inner", "config"), CASES, ids=str)
def test_against_float64(tokens: int, rows: int, inner: int, config: CodedRows) -> None:
    """Into a slice of a poisoned output; as a gated product; and in parts."""
    matrix, x, weight, want = given(tokens, rows, inner)
    bias = torch.randn(rows, device=DEVICE).to(BF16)
    wide = torch.full((tokens, rows + 8), torch.nan, device=DEVICE, dtype=BF16)
    few_rows_hopper_product(x, matrix, bias, wide[:, :rows], config)
    check(wide[:, :rows], x, weight, want + bias.double())
    assert wide[:, rows:].isnan().all()
    gated = coded_linear_silu_mul_triton(x, matrix, config=config)
    gate, up = want.chunk(2, dim=-1)
    error = (gated.double() - torch.nn.functional.silu(gate) * up).norm() / (torch.nn.functional.silu(gate) * up).norm()
    assert error < 6e-3
    parts = torch.full((3, tokens, rows), torch.nan, device=DEVICE)
    few_rows_hopper_product(x, matrix, None, parts, config._replace(splits=3))
    assert close(parts.sum(0).double(), want)


@pytest.mark.parametrize("tokens", [1, 5])
def test_plain_rows_are_of_the_same_launch(tokens: int, emulated: list[str]) -> None:
    matrix, x, weight, want = given(tokens, 64, 640)
    plain, bias = torch.randn(24, 640, device=DEVICE).bfloat16() / 16, torch.randn(88, device=DEVICE).bfloat16()
    got = coded_linear_triton(x, matrix, bias, plain, config=CodedRows(32, 4, 2))
    want = torch.cat([want, x.double() @ plain.double().t()], dim=1) + bias.double()
    check(got, x, torch.cat([weight, plain.float()]), want)
    assert ON_HOPPER or emulated == ["_coded_few_rows_hopper_kernel"]


@pytest.mark.parametrize("group", [256, 0])
def test_chunks_that_share_a_scale(group: int) -> None:
    """In groups of two chunks, and in rows of eight."""
    matrix, x, _weight, _want = given(3, 72, 1024)
    step = (group or 1024) // 128
    matrix = matrix._replace(scales=matrix.scales[::step].contiguous(), group=group)
    weight, out = dequantize_codes(matrix), torch.full((3, 72), torch.nan, device=DEVICE, dtype=BF16)
    few_rows_hopper_product(x, matrix, None, out, CodedRows(16, 4, 1))
    check(out, x, weight, x.double() @ weight.double().t())


def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coded, "runs_gluon", lambda device: True)
    monkeypatch.setattr(coded_pairs_hopper, "runs_gluon", lambda device: True)


def test_dispatch(monkeypatch: pytest.MonkeyPatch, emulated: list[str]) -> None:
    """Symmetric INT4 in groups of whole chunks, up to 8 rows; partial sums are parts."""
    on_hopper(monkeypatch)
    for tokens in (1, 8, 9):
        matrix, x, _weight, want = given(tokens, 64, 3072)
        if tokens <= 8:
            assert close(coded_linear_parts_triton(x, matrix).sum(0).double(), want)
        assert isinstance(coded.choose_config(matrix, tokens, False), CodedRows) == (tokens <= 8)
    for form in ("int4 g64 zeros", "int4 g32", "int8 rows", "mxfp4", "mxfp8", "nvfp4", "int4 rows zeros"):
        matrix = coded_matrix(form, 64, 512, scale_dtype=BF16)
        assert not isinstance(coded.choose_config(matrix, 1, False), CodedRows)
    matrix = coded_matrix("int4 g128", 64, 512, scale_dtype=torch.float16)
    assert not isinstance(coded.choose_config(matrix, 1, False), CodedRows), "the kernel multiplies in bfloat16"


@pytest.mark.parametrize(
    ("shape", "group"),
    [((1, 6, 3, 256, 128), 128), ((2, 6, 3, 512, 256), 256), *unless_long([], [((4, 6, 3, 2048, 512), 128)])],
)
def test_experts(shape: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch, emulated: list[str]) -> None:
    """Pair by pair, up to 4 tokens; a token without experts is zero."""
    on_hopper(monkeypatch)
    monkeypatch.setitem(FORMS, "int4", (4, False, group, False))
    check_moe(shape, "int4", BF16, min(2, shape[0] - 1))
    assert ON_HOPPER or emulated.count("_coded_pairs_hopper_kernel") == 2


def test_other_activations_take_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for Hopper knows SwiGLU alone."""
    on_hopper(monkeypatch)
    gate_up, down = (coded_matrix("int4 g128", *size, 4, scale_dtype=BF16) for size in ((512, 128), (128, 256)))
    x, bias = torch.randn(1, 128, device=DEVICE).to(BF16), torch.zeros(4, 512, device=DEVICE)
    others = ExpertExtras(limit=0.7), ExpertExtras(gate_cap=2.0, up_cap=1.0), ExpertExtras(gate_up_bias=bias)
    assert coded_experts.takes_pairs(x, gate_up, down, NO_EXTRAS)
    assert not any(coded_experts.takes_pairs(x, gate_up, down, extras) for extras in others)
