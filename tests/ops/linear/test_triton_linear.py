"""The kernel for few rows against float64, and who decides when it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ops.interpreter import DEVICE
from tests.whole import covering
from weft.ops.backend import Backend
from weft.ops.linear import linear, linear_parts, linear_silu_mul, skinny_choice
from weft.ops.linear import skinny as skinny_linear
from weft.ops.linear.skinny import skinny_linear_triton
from weft.ops.linear.skinny_choice import MAX_TOKENS, Config, choose_config, heuristic_config, load_table
from weft.ops.norm import rms_norm

ON_GPU = DEVICE == "cuda"
# Relative error of a whole product: one rounding to the dtype, float32 sums before it.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 3e-3}
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * ON_GPU

CONFIGS = [
    Config("sum", 8, 64, 4),
    Config("sum", 16, 128, 2, splits=3),
    Config("held", 16, 64, 4),
    Config("held", 32, 32, 2, splits=2, tokens=16),
    Config("warps", 16, 64, 2, splits=2, tokens=4),
    Config("dot", 16, 64, 4, stages=2),
    Config("dot", 32, 32, 2, stages=3, splits=2, tokens=16),
]
# tokens, weight rows, inner size
SHAPES = [(1, 64, 128), (3, 66, 210), (6, 70, 96)]
DOT_SHAPES = [(16, 48, 64), (63, 66, 130)]


def want(x: Tensor, weight: Tensor, bias: Tensor | None, silu_mul: bool) -> Tensor:
    y = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not silu_mul:
        return y
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def inputs(tokens: int, rows: int, inner: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.randn(tokens, inner + 16, device=DEVICE).to(dtype)  # rows of x are a slice of something wider
    weight = (torch.randn(rows, inner, device=DEVICE) * inner**-0.5).to(dtype)
    return wide[:, :inner], weight, torch.randn(rows, device=DEVICE).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[actual.dtype], f"relative error {error:.2e}"


CASES = [
    (shape, config, silu_mul)
    for i, shape in enumerate(SHAPES + DOT_SHAPES)
    for j, config in enumerate(CONFIGS)
    for silu_mul in (False, True)
    if (config.method != "sum" or shape in SHAPES) and (ON_GPU or silu_mul == bool((i + j) % 2))
]
"""Under the interpreter a half: each shape and each configuration with and without the activation."""


@pytest.mark.parametrize(("case", "dtype"), covering(CASES, DTYPES, of=1), ids=str)
def test_against_float64(case: tuple[tuple[int, int, int], Config, bool], dtype: torch.dtype) -> None:
    shape, config, silu_mul = case
    x, weight, bias = inputs(*shape, dtype)
    given = bias if dtype == torch.float32 else None
    assert_near(skinny_linear_triton(x, weight, given, config, silu_mul=silu_mul), want(x, weight, given, silu_mul))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_row_does_not_depend_on_the_others(config: Config) -> None:
    x, weight, _ = inputs(5, 66, 210, torch.float32)
    alone = skinny_linear_triton(x, weight, None, config)
    padded = x.clone()
    padded[3:] = float("nan")
    assert torch.equal(skinny_linear_triton(padded, weight, None, config)[:3], alone[:3])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_launch_gives_the_same_bits(config: Config) -> None:
    x, weight, _ = inputs(3, 70, 210, torch.float32)
    first = skinny_linear_triton(x, weight, None, config)
    for _ in range(20 if ON_GPU else 2):
        assert torch.equal(skinny_linear_triton(x, weight, None, config), first)


def assert_a_norm_adds_the_parts(tokens: int, rows: int, inner: int, dtype: torch.dtype, config: Config) -> None:
    """Check that the norm adds the parts to the same bits as the product. The sum of squares may differ, since the
    norms may have different warps."""
    x, weight, scale = inputs(tokens, rows, inner, dtype)
    residual = torch.randn(tokens, rows, device=DEVICE).to(dtype)
    parts = torch.empty(config.splits, tokens, rows, device=DEVICE).fill_(float("nan"))
    skinny_linear_triton(x, weight, None, config, out=parts)
    whole = skinny_linear_triton(x, weight, None, config)
    for zero_centered in (False, True):
        options = {"zero_centered": zero_centered, "residual": residual, "backend": Backend.TRITON}
        y, total = rms_norm(parts, scale, 1e-6, **options)
        expected, expected_total = rms_norm(whole, scale, 1e-6, **options)
        assert total.dtype == y.dtype == dtype and torch.equal(total, expected_total)
        torch.testing.assert_close(y, expected, rtol=8e-3 if dtype == torch.bfloat16 else 1e-3, atol=1e-6)


@pytest.mark.parametrize("config", [config for config in CONFIGS if config.splits > 1], ids=str)
def test_a_norm_adds_the_parts(config: Config) -> None:
    tokens = 3 if config.method == "sum" else config.tokens + 3
    assert_a_norm_adds_the_parts(tokens, 66, 210, torch.float16, config)


@pytest.mark.parametrize("splits", [1, 2])
def test_which_products_come_out_in_parts(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only products of a few rows that are split return parts."""
    tokens = 9
    x, weight, _ = inputs(tokens, 48, 64, torch.float32)
    monkeypatch.setattr(skinny_linear, "choose_config", lambda *_, **__: Config("dot", 16, 32, 2, splits=splits))
    y = linear_parts(x, weight, backend=Backend.TRITON)
    assert y.shape == ((splits, tokens, 48) if splits > 1 else (tokens, 48))
    assert_near(y.sum(0) if splits > 1 else y, want(x, weight, None, False))
    monkeypatch.setattr(skinny_linear, "choose_config", lambda *_, **__: None)
    assert linear_parts(x, weight, backend=Backend.TRITON).shape == (tokens, 48)
    assert linear_parts(x, weight, backend=Backend.TORCH).shape == (tokens, 48)


@pytest.mark.parametrize("tokens", [0, 1, 2, 64, 65])
def test_dispatch(tokens: int) -> None:
    """Whatever the number of rows, the operations agree with their references."""
    wide, weight, bias = inputs(max(tokens, 1), 66, 130, torch.float32)
    x = wide[:tokens]
    for op in (linear, linear_silu_mul):
        y = op(x, weight, bias, backend=Backend.TRITON)
        torch.testing.assert_close(y, op(x, weight, bias, backend=Backend.TORCH), rtol=1e-4, atol=1e-5)


def test_leading_dimensions_are_kept() -> None:
    x, weight = torch.randn(1, 2, 64, device=DEVICE), torch.randn(16, 64, device=DEVICE)
    assert linear(x, weight, backend=Backend.TRITON).shape == (1, 2, 16)
    assert linear_silu_mul(x, weight, backend=Backend.TRITON).shape == (1, 2, 8)


def test_many_rows_and_tiny_weights_are_left_to_the_matrix_library() -> None:
    weight = torch.randn(64, 64, device=DEVICE)
    assert choose_config(torch.randn(1, 64, device=DEVICE), weight, False) is not None
    assert choose_config(torch.randn(MAX_TOKENS + 1, 64, device=DEVICE), weight, False) is None
    assert choose_config(torch.randn(1, 64, device=DEVICE), weight[:4], False) is None
    assert heuristic_config(1024, 1024, 64, 2, pipelines=True) is None


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("inner", [64, 210, 4096, 5120, 14336, 28672])
@pytest.mark.parametrize("rows", [512, 8192, 128256])
def test_weights_that_a_program_holds_fit_in_registers(rows: int, inner: int, element_size: int) -> None:
    config = heuristic_config(rows, inner, 1, element_size, pipelines=True)
    if config is None:  # the shortest program's share is too large
        assert inner * element_size > 32768
        return
    assert config.splits == 1
    share = -(-inner // config.inner) * config.inner
    assert config.rows * share * element_size <= 65536 * config.warps // 4


@pytest.mark.parametrize("kind", ["", "narrow-", "routers-"])
def test_weights_that_no_table_has_take_close_to_the_best_time_measured(kind: str) -> None:
    """The rule's configuration against all that were measured, also for weights that it was not learnt from."""
    file = Path(__file__).parents[3] / f"benchmarks/results/linear-rules-{kind}h200.json"
    for row in json.loads(file.read_text())["rows"]:
        config = heuristic_config(row["out"], row["inner"], row["tokens"], 2, pipelines=True)
        times = {name: us for us, name in row["found"]}
        taken = row["library_us"] if config is None else times[str(list(config))]
        best = min(row["library_us"], *times.values())
        assert taken <= max(1.16 * best, best + 2.0), (row["weight"], row["tokens"], config, taken, best)
        assert taken <= 1.04 * row["library_us"], (row["weight"], row["tokens"], config, taken)


def test_sums_are_for_small_weights_of_two_bytes() -> None:
    """A router's, and one twice as large; four tokens need registers for each."""
    for size, tokens, element_size, method in (
        ((256, 7168), 4, 2, "sum"), ((256, 7168), 4, 4, None), ((1024, 7168), 4, 2, "dot"), ((256, 7168), 8, 2, "dot"),
    ):  # fmt: skip
        config = heuristic_config(*size, tokens, element_size, pipelines=True)
        assert (config and config.method) == method, (size, tokens, element_size)


def test_pipelines_are_for_devices_with_the_shared_memory_of_an_h200() -> None:
    chosen = heuristic_config(4096, 4096, 8, 2, pipelines=True)
    assert chosen is not None and chosen.method == "dot"
    assert heuristic_config(4096, 4096, 8, 2, pipelines=False) is None
    assert heuristic_config(4096, 4096, 8, 4, pipelines=True) is None, "float32 would take twice the memory"


def test_the_table_is_well_formed() -> None:
    for (rows, inner, silu_mul, tokens), config in [*load_table().items(), *load_table(leaves_sums=True).items()]:
        assert rows > 0 and inner > 0 and tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256), (rows, inner, silu_mul, tokens)
        if config is not None:
            assert config.method in ("dot", "held", "warps") or (config.method == "sum" and tokens <= 8)


def test_splits_that_a_norm_adds_are_not_those_of_plain_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """For some sizes the matrix library is faster than a kernel that has to add the sums itself."""
    monkeypatch.setattr(skinny_choice, "has_table", lambda device: True)
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (64, 2048))
    assert choose_config(x, weight, False) is None
    chosen = choose_config(x, weight, False, leaves_sums=True)
    assert chosen is not None and chosen.splits == 4
    assert choose_config(x[:32], weight, False) == choose_config(x[:32], weight, False, leaves_sums=True)


def test_a_hopper_gpu_without_a_table_takes_rules_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down of A with 8 rows: the table has it, and the rule for GPUs without Hopper's shared memory differs."""
    monkeypatch.setattr(skinny_choice, "has_table", lambda device: False)
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (8, 2048))
    without = choose_config(x, weight, False)
    monkeypatch.setattr(skinny_choice, "is_hopper", lambda device: True)
    chosen = choose_config(x, weight, False)
    assert chosen is not None and chosen != without
    assert chosen == heuristic_config(2048, 4096, 8, 2, pipelines=True) != load_table()[2048, 4096, False, 8]


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_every_configuration_of_the_table() -> None:
    for (rows, inner, silu_mul, tokens), config in load_table(leaves_sums=True).items():
        if config is None:
            continue
        weight = torch.randn(rows, inner, device=DEVICE, dtype=torch.bfloat16) * inner**-0.5
        for count in sorted({tokens, tokens // 2 + 1}):
            x = torch.randn(count, inner, device=DEVICE, dtype=torch.bfloat16)
            y = skinny_linear_triton(x, weight, None, config, silu_mul=silu_mul)
            picked = torch.arange(0, y.shape[1], max(1, y.shape[1] // 4096), device=DEVICE)
            part = torch.cat([weight[picked], weight[y.shape[1] :][picked]]) if silu_mul else weight[picked]
            assert_near(y[:, picked], want(x, part, None, silu_mul))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
def test_a_norm_adds_the_parts_of_every_split_product_of_the_table() -> None:
    for (rows, inner, silu_mul, tokens), config in load_table(leaves_sums=True).items():
        if config is not None and config.splits > 1 and not silu_mul:
            for count in sorted({tokens, tokens // 2 + 1}):
                assert_a_norm_adds_the_parts(count, rows, inner, torch.bfloat16, config)
