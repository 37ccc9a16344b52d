"""Compiles the kernels for Hopper without one, in threads as at start, and says what it needs of a GPU.

    python -m tests.ops.compile_gluon

A program of its own, because kernels are interpreted in the tests' process. It prints JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

from tests.runner.compile_only import AbsentGpu
from weft.forward_context import Batch, ChunkTable, MixedBatch
from weft.ops.attention import AttentionCall, expanded_latent_hopper
from weft.ops.attention import decode as attention_decode
from weft.ops.attention import decode_hopper as attention_decode_hopper
from weft.ops.attention.prefill_hopper import launch_prefill_hopper
from weft.ops.codes import CodedMatrix, Packing
from weft.ops.delta_rule import kda_prepare_hopper
from weft.ops.delta_rule.decode_gluon import launch_decode_states
from weft.ops.delta_rule.kda_prefill import prepare_channels
from weft.ops.delta_rule.scan_hopper import launch_delta_scan
from weft.ops.delta_rule.vectors import PreparedChunks, vectors_of
from weft.ops.delta_rule.verify_gluon import launch_verify_states
from weft.ops.fp8 import E4M3, Fp8Matrix
from weft.ops.linear.coded import few_rows_by_rule
from weft.ops.linear.coded_few_rows_hopper import few_rows_hopper_product as int4_product
from weft.ops.linear.fp8_few_rows import HopperRows
from weft.ops.linear.fp8_few_rows_hopper import few_rows_hopper_product
from weft.ops.mamba import ScanWeights
from weft.ops.mamba.scan_gluon import launch_selective_scan
from weft.ops.moe import coded_pairs_hopper
from weft.ops.moe import fp8_experts as fp8_moe
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.fp8_pairs_hopper import pairs_hopper_product
from weft.ops.triton import early_launch
from weft.ops.triton.launch import launches_handled


def launch(
    num_heads: int, num_kv_heads: int, head_dim: int, *, num_rows: int = 600, is_mixture: bool = False,
    has_sinks: bool = False, dtype: torch.dtype = torch.bfloat16,
) -> None:  # fmt: skip
    q = torch.zeros(num_rows, num_heads, head_dim, dtype=torch.bfloat16)
    cache = torch.zeros(3, 16, num_kv_heads, head_dim, dtype=dtype)
    numbers = torch.zeros(4, dtype=torch.int32)
    batch = Batch(
        num_tokens=600, num_seqs=3, num_decodes=1, max_query_len=300, max_seq_len=300, positions=numbers,
        slot_mapping=numbers, cu_seqlens_q=numbers, seq_lens=numbers[1:], page_table=numbers[:3, None],
        state_slots=numbers[1:], mixed=MixedBatch(numbers[1:], numbers[1:], 2) if is_mixture else None,
    )  # fmt: skip
    sinks = torch.zeros(num_heads, dtype=torch.bfloat16) if has_sinks else None
    v_scale = torch.ones(1) if dtype == E4M3 else None
    call = AttentionCall(q, cache, cache, batch, 0.1, torch.zeros_like(q), sinks, v_scale)
    launch_prefill_hopper(call, skip_decodes=True)


def launch_expanded() -> None:
    """A prefill of Kimi-Linear behind a context: the plan, the expansion and attention over it."""
    numbers = torch.zeros(17, dtype=torch.int32)
    batch = Batch(
        num_tokens=600, num_seqs=1, num_decodes=0, max_query_len=600, max_seq_len=9000, positions=numbers,
        slot_mapping=numbers, cu_seqlens_q=numbers[:2], seq_lens=numbers[:1], page_table=numbers[None],
        state_slots=numbers[:1],
    )  # fmt: skip
    q, cache = torch.zeros(600, 32, 192).bfloat16(), torch.zeros(3, 16, 576).bfloat16()
    own, of_shared = q.split([128, 64], dim=-1)
    expansion = expanded_latent_hopper.plan_on_hopper(own, 64, 128, batch)
    assert expansion is not None
    weight = torch.zeros(32, 128, 512).bfloat16()
    out = torch.zeros(600, 32, 128).bfloat16()
    expanded_latent_hopper.expanded_latent_attention_triton(
        own, of_shared, cache, weight, weight, batch, expansion, scale=0.1, out=out
    )


def launch_decodes(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    """Over an FP8 cache."""
    q, numbers = torch.zeros(64, num_heads, head_dim, dtype=torch.bfloat16), torch.zeros(65, dtype=torch.int32)
    cache = torch.zeros(3, 16, num_kv_heads, head_dim, dtype=torch.bfloat16).to(E4M3)
    batch = Batch(
        num_tokens=64, num_seqs=64, num_decodes=64, max_query_len=1, max_seq_len=16, positions=numbers,
        slot_mapping=numbers, cu_seqlens_q=numbers, seq_lens=numbers[1:], page_table=numbers[1:, None],
        state_slots=numbers[1:],
    )  # fmt: skip
    call = AttentionCall(q, cache, cache, batch, 0.1, torch.zeros_like(q))
    choice = attention_decode.DecodeChoice(attention_decode_hopper.TILE, on_hopper=True)
    attention_decode.launch_decode(call, choice)


def chunked_batch(num_seqs: int) -> Batch:
    numbers = torch.zeros(9, dtype=torch.int32)
    chunks = ChunkTable(numbers, numbers, numbers, numbers, numbers, max_seqs=num_seqs)
    return Batch(
        num_tokens=64, num_seqs=num_seqs, num_decodes=0, max_query_len=64, max_seq_len=64, positions=numbers,
        slot_mapping=numbers, cu_seqlens_q=numbers, seq_lens=numbers, page_table=numbers[:, None], state_slots=numbers,
        chunks=chunks,
    )  # fmt: skip


def launch_selective(channels: int, *heads: int) -> None:
    """One sequence through the recurrence of Jamba or of Zamba."""
    x, dt = torch.zeros(64, 2 * channels).bfloat16(), torch.zeros(64, channels).bfloat16()
    b, state, numbers = torch.zeros(64, *heads, 16).bfloat16(), torch.zeros(1, 16, channels), torch.zeros(channels)
    launch_selective_scan(
        *x.chunk(2, dim=-1), dt, b, b, ScanWeights(numbers, state[0], numbers), state, torch.zeros_like(dt),
        chunked_batch(1),
    )  # fmt: skip


def launch_scan(num_seqs: int, *, per_channel: bool = False) -> None:
    """The recurrent rule of Qwen3-Next or of Kimi-Linear."""
    v, square = torch.zeros(64, 32, 128, dtype=torch.bfloat16), torch.zeros(9, 32, 64, 64, dtype=torch.bfloat16)
    q, keys = v if per_channel else v[:, :16], torch.zeros(9, 32, 3, 64, 128, dtype=torch.bfloat16)
    vectors = torch.zeros(9, 32, 4 if per_channel else 8, 64)
    prepared = PreparedChunks(square, square, vectors, keys if per_channel else None)
    launch_delta_scan(q, q, v, v, torch.zeros(9, 32, 128, 128), prepared, chunked_batch(num_seqs))


def launch_prepare() -> None:
    """The chunks of Kimi-Linear, and their inverses."""
    q, g = torch.zeros(64, 32, 128).bfloat16(), torch.zeros(64, 32, 128)
    prepare_channels(q, q, g, g[..., 0].contiguous(), chunked_batch(1).chunk_table)


def launch_verify() -> None:
    """Three tokens of one sequence of Qwen3-Next."""
    places, slots = vectors_of(2, 128, 128), torch.zeros(1, 3, dtype=torch.int32)
    vectors, out = torch.zeros(1, 16, 3, places.size), torch.zeros(3, 4096, dtype=torch.bfloat16)
    launch_verify_states(vectors, torch.zeros(2, 32, 128, 128).bfloat16(), slots[:, 0], slots, out, 1e-6, places)


def launch_decode(*, per_channel: bool = False) -> None:
    """One token of each of 64 sequences of Qwen3-Next or of Kimi-Linear."""
    places = vectors_of(1, 128, 128, channels=128) if per_channel else vectors_of(2, 128, 128)
    slots, out = torch.zeros(64, 1, dtype=torch.int32), torch.zeros(64, 4096, dtype=torch.bfloat16)
    vectors = torch.zeros(64, 32 if per_channel else 16, 1, places.size)
    launch_decode_states(vectors, torch.zeros(2, 32, 128, 128).bfloat16(), slots[:, 0], slots, out, 1e-6, places)


def launch_fp8_rows() -> None:
    """The input projection of Gated DeltaNet of Qwen3-Next, plain rows included."""
    x, weight = torch.zeros(1, 2048).bfloat16(), torch.zeros(12288, 2048, dtype=E4M3)
    out, plain = torch.zeros(1, 12352).bfloat16(), torch.zeros(64, 2048).bfloat16()
    few_rows_hopper_product(
        x, Fp8Matrix(weight, torch.zeros(96, 16), None, 128), None, out, HopperRows(16, 8, 80), plain_weight=plain
    )  # fmt: skip


def launch_fp8_pairs() -> None:
    """The up product of two experts of Qwen3-Next."""
    weight, ids = torch.zeros(2, 1024, 2048, dtype=E4M3), torch.zeros(1, 11, dtype=torch.int32)
    inputs, out = torch.zeros(1, 2048).bfloat16(), torch.zeros(11, 512).bfloat16()
    pairs_hopper_product(inputs, Fp8Matrix(weight, torch.zeros(2, 8, 16), None, 128), out, ids)


def int4_matrix(rows: int, columns: int, *lead: int) -> CodedMatrix:
    words = torch.zeros(*lead, *Packing.of(4, 128).words_shape(rows, columns), dtype=torch.int32)
    scales = torch.zeros(*lead, columns // 128, rows).bfloat16()
    return CodedMatrix(words, scales, None, None, 4, False, 128, columns)


def launch_int4() -> None:
    """The products of Gated DeltaNet and of experts of Qwen3-Next."""
    x, ids = torch.zeros(1, 2048).bfloat16(), torch.zeros(1, 11, dtype=torch.int32)
    matrix = int4_matrix(12352, 2048)
    config = few_rows_by_rule(12352, 2048)
    assert config is not None
    int4_product(x, matrix, None, torch.zeros(1, 12352).bfloat16(), config)
    up, down = int4_matrix(1024, 2048, 2), int4_matrix(2048, 512, 2)
    hidden, out = torch.zeros(11, 512).bfloat16(), torch.zeros(11, 2048).bfloat16()
    coded_pairs_hopper.pairs_hopper_product(x, up, hidden, ids, coded_pairs_hopper.UP)
    coded_pairs_hopper.pairs_hopper_product(hidden, down, out, ids, coded_pairs_hopper.DOWN)


GROUPING = {"_quantize_kernel", "_few_kernel", "_rank_kernel", "_block_kernel", "_place_kernel"}
"""Kernels that run before products of experts."""


def launch_fp8_experts() -> None:
    """Both products of the experts of 512 tokens of Qwen3-Next."""
    up = Fp8Matrix(torch.zeros(4, 1024, 2048, dtype=E4M3), torch.zeros(4, 8, 16), None, 128)
    down = Fp8Matrix(torch.zeros(4, 2048, 512, dtype=E4M3), torch.zeros(4, 16, 4), None, 128)
    tiles = Tiles(Tile(16, 128, 128, 4, 4), Tile(16, 128, 128, 4, 4, span=4))
    x, ids = torch.zeros(512, 2048).bfloat16(), torch.zeros(512, 10, dtype=torch.int32)
    fp8_moe.pair_outputs(x, ids, up, down, config=tiles)


def launch_fp8_blocks(block: int) -> None:
    """Both products of many pairs of the experts of Qwen3-30B-A3B, with scales by block or for each row."""
    scales = ((4, 12, 16), (4, 16, 6)) if block else ((4, 1536), (4, 2048))
    up = Fp8Matrix(torch.zeros(4, 1536, 2048, dtype=E4M3), torch.zeros(scales[0]), None, block)
    down = Fp8Matrix(torch.zeros(4, 2048, 768, dtype=E4M3), torch.zeros(scales[1]), None, block)
    x, ids = torch.zeros(512, 2048).bfloat16(), torch.zeros(512, 8, dtype=torch.int32)
    fp8_moe.pair_outputs(x, ids, up, down, config=fp8_moe.Hopper.BLOCKS)


def overwritten_barriers(ptx: str) -> list[int]:
    """Where barriers stand in shared memory to which plain stores go too. The compiler gives the memory of a barrier
    that is made and not used again to what the parts' warps are told."""
    places = {"global_smem": 0} | dict.fromkeys(re.findall(r"mov\.b32\s+(%r\d+), global_smem;", ptx), 0)
    for name, base, offset in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (\d+);", ptx):
        if places.get(base) == 0:
            places[name] = int(offset)
    barriers = {places[name] for name in re.findall(r"mbarrier\.init\S* \[(\w+|%r\d+)\]", ptx)}
    stored = set()
    for count, bits, offset in re.findall(r"st\.shared(?:\.v(\d))?\.[bfsu](\d+)\s+\[global_smem\+?(\d*)\]", ptx):
        first = int(offset or 0)
        stored |= set(range(first, first + int(count or 1) * int(bits) // 8))
    assert not barriers or stored, "a kernel of several parts tells their warps where they are"
    return sorted(place for place in barriers if stored & set(range(place, place + 8)))


def usage(kernel: Any) -> dict[str, Any]:
    """Registers and stack per thread, shared memory per program, asynchronous copies of 16 bytes in the code, and
    barriers that other stores write to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    numbers = {name: int(found) for name, found in re.findall(r"(REG|STACK):(\d+)", done.stdout + done.stderr)}
    return {
        "registers": numbers["REG"], "stack_bytes": numbers["STACK"], "shared_bytes": kernel.metadata.shared,
        "async_copies": len(re.findall(r"cp\.async\.c[ag]\.shared\.global.*, 0x10,", kernel.asm["ptx"])),
        "overwritten_barriers": overwritten_barriers(kernel.asm["ptx"]),
    }  # fmt: skip


def main() -> None:
    driver.set_active(AbsentGpu())
    early_launch._can_launch_early = lambda device: True  # type: ignore[assignment]
    for module in (expanded_latent_hopper, kda_prepare_hopper):
        module.runs_gluon = lambda device: True  # type: ignore[attr-defined]
    compiled: list[Any] = []

    def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if kernel.__name__ in GROUPING:
            return
        compiled.append(kernel.run(*args, grid=grid, warmup=True, **options))

    with ThreadPoolExecutor(2) as threads, triton.AsyncCompileMode(threads), launches_handled(compile_only):
        launch(16, 8, 128, is_mixture=True)
        launch(16, 8, 128, num_rows=2048, is_mixture=True)
        launch(16, 2, 256)
        launch(64, 8, 64, has_sinks=True)
        launch_expanded()
        launch(16, 8, 128, dtype=E4M3)
        launch(16, 8, 128, num_rows=2048, dtype=E4M3)
        launch(16, 2, 256, dtype=E4M3)
        launch_decodes(16, 8, 128)
        launch_scan(1)
        launch_scan(4)
        launch_scan(4, per_channel=True)
        launch_prepare()
        launch_selective(8192)
        launch_selective(2048, 2)
        launch_verify()
        launch_decode()
        launch_decode(per_channel=True)
        launch_fp8_rows()
        launch_fp8_pairs()
        launch_int4()
        launch_fp8_blocks(0)
        launch_fp8_blocks(128)
        launch_fp8_experts()
    print(json.dumps([usage(kernel.result()) for kernel in compiled]))


if __name__ == "__main__":
    main()
