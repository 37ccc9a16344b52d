"""Bugs to plant in the kernel for experts with many pairs, and in the choice of kernels for experts and routers."""

from __future__ import annotations

from tests.mutation.mutant import mutant

KERNEL, TESTS = "weft/ops/moe/fp8_experts_hopper.py", "tests/ops/moe/test_gluon_fp8_experts.py"
CHOICE, ROUTERS = "weft/ops/moe/fp8_experts.py", "tests/ops/linear/test_triton_linear.py"
EXPERTS_IN_BLOCKS = (
    mutant(
        "experts-scale-of-the-other-half", "each half of a tile has its own scale", KERNEL,
        "one = one + sums * (of_rows * of_one)", "one = one + sums * (of_rows * of_two)", TESTS,
    ),
    mutant(
        "experts-scales-a-step-late", "scales by block are those of their step", KERNEL,
        "next_step = gl.minimum(step + 1, STEPS - 1)", "next_step = gl.minimum(step + 2, STEPS - 1)", TESTS,
    ),
    mutant(
        "experts-scales-beyond-the-last-step", "no scale is read beyond a matrix", KERNEL,
        "next_step = gl.minimum(step + 1, STEPS - 1)", "next_step = step + 1", TESTS,
    ),
    mutant(
        "experts-up-scale-of-the-next-block", "up rows lie behind all gate rows", KERNEL,
        "BEHIND: gl.constexpr = FIXED.width // 128 if FIXED.gated else 1", "BEHIND: gl.constexpr = 1", TESTS,
    ),
    mutant(
        "experts-scale-of-the-first-input", "each input has scales of its own", KERNEL,
        "(step * stride_group + rows)", "(step * stride_group + rows * 0)", TESTS,
    ),
    mutant(
        "experts-first-half-twice", "the second half has its own outputs", KERNEL,
        "store_inside(out, out_rows, two, out_inside, column + 128, 128, WIDTH)",
        "store_inside(out, out_rows, two, out_inside, column, 128, WIDTH)", TESTS,
    ),
    mutant(
        "experts-up-scales-of-gate-rows", "up rows have their own scales", KERNEL,
        "gl.where(lanes < 64, weight_row, weight_row + (FIXED.width - 64))", "weight_row", TESTS,
    ),
    mutant(
        "experts-never-free-a-stage", "a consumer without pairs lets stages pass", KERNEL,
        "mbarrier.arrive(empty.index(_wait_for(ready, n + step, STAGES)), count=1)",
        "_wait_for(ready, n + step, STAGES)", TESTS,
    ),
    mutant(
        "experts-of-few-pairs-by-block", "few pairs go through tiles", CHOICE,
        "_MANY_BY_BLOCK if down.shape[2] > 512 else _MANY_NARROW_BY_BLOCK", "_MANY_BY_BLOCK", TESTS,
    ),
    mutant(
        "experts-of-512-by-block", "experts of 512 stay in tiles up to 48 pairs", CHOICE,
        "_MANY_BY_BLOCK if down.shape[2] > 512", "_MANY_BY_BLOCK if down.shape[2] > 384", TESTS,
    ),
    mutant(
        "experts-of-broken-tiles-by-block", "tiles are whole", KERNEL, "down.shape[1] % columns_of(block, gated=False)",
        "down.shape[1] % 128", TESTS,
    ),
    mutant(
        "tables-on-an-h20", "tables are for cards like the one on which they were measured",
        "weft/ops/triton/tile_table.py",
        "is_hopper(device) and torch.cuda.get_device_properties(device).multi_processor_count == MULTIPROCESSORS",
        "is_hopper(device)", "tests/ops/triton/test_sizes.py",
    ),
    mutant(
        "rules-for-an-h200-alone", "a Hopper GPU without tables takes the rules for Hopper",
        "weft/ops/linear/skinny_choice.py", "pipelines=is_hopper(x.device)", "pipelines=has_table(x.device)", ROUTERS,
    ),
    mutant(
        "routers-left-to-the-library", "routers of 8 to 64 rows are pipelined", "weft/ops/linear/skinny_choice.py",
        "4 < tokens <= 64 and element_size == 2 and rows <= _NARROW", "4 < tokens <= 8 and rows <= _NARROW", ROUTERS,
    ),
)  # fmt: skip
