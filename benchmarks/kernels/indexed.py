"""Indexed attention beside dense attention of the same shape: checked against the reference, then timed.

    python -m benchmarks.kernels.indexed [--contexts N ...] [--batches N ...] [--skip-prefill]

``qsa``: 16 query and 2 key heads of 256, one index head of 128, pools of 4 (Qwen4-Exp). ``glm``: 64 heads over latents
of 512, 32 index heads of 128, pools of 16 (GLM-5.3). Both select 2,048 tokens. Times are medians over replays of a CUDA
graph. Without a GPU it rehearses small shapes under the interpreter. The folder named by OUT gets the JSON.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, error, time_us, write_json
from weft.forward_context import Batch
from weft.ops.attention.latent import latent_attention_triton
from weft.ops.attention.paged import paged_attention_triton
from weft.ops.indexed_attention import indexed_attention, select_pools
from weft.ops.indexed_attention.attend import indexed_attention_triton
from weft.ops.indexed_attention.select import select_pools_triton

PAGE, DTYPE = 16, torch.bfloat16 if ON_GPU else torch.float32
BUDGET = 2048 if ON_GPU else 32
NAME = "kernels-indexed-h200.json"


class Shape(NamedTuple):
    """Heads and sizes. ``kv_heads`` 0: latents, which are keys and values."""

    heads: int
    kv_heads: int
    dim: int
    index_heads: int
    index_dim: int
    pool: int


SHAPES = {"qsa": Shape(16, 2, 256, 1, 128, 4), "glm": Shape(64, 0, 512, 32, 128, 16)}
if not ON_GPU:
    SHAPES = {"qsa": Shape(4, 2, 16, 1, 16, 4), "glm": Shape(4, 0, 32, 3, 16, 16)}


class Case(NamedTuple):
    """A batch with random caches, and the arguments of both operations."""

    batch: Batch
    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor
    weights: Tensor | None
    index_keys: Tensor


def make_case(shape: Shape, query_lens: list[int], seq_lens: list[int]) -> Case:
    """Sequences with scattered pages; the page table has room for the longest."""
    pages_of = [-(-n // PAGE) for n in seq_lens]
    ids = torch.randperm(sum(pages_of)) + 1
    table = torch.zeros(len(seq_lens), max(pages_of), dtype=torch.int32)
    for row, own in zip(table, ids.split(pages_of), strict=True):
        row[: len(own)] = own
    rows, pages = sum(query_lens), len(ids) + 1
    starts = torch.tensor([0, *query_lens]).cumsum(0)
    empty = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    batch = Batch(
        num_tokens=rows, num_seqs=len(seq_lens), num_decodes=len(seq_lens) if max(query_lens) == 1 else 0,
        max_query_len=max(query_lens), max_seq_len=max(seq_lens), positions=empty, slot_mapping=empty,
        cu_seqlens_q=starts.int().to(DEVICE), seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE),
        page_table=table.to(DEVICE), state_slots=empty,
    )  # fmt: skip

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE, dtype=DTYPE)

    k = random(pages, PAGE, shape.kv_heads or 1, shape.dim)
    v = random(*k.shape) if shape.kv_heads else k
    weights = random(rows, shape.index_heads) if shape.index_heads > 1 else None
    index_keys = random(pages, PAGE, shape.index_dim // shape.pool)
    q, index_q = random(rows, shape.heads, shape.dim), random(rows, shape.index_heads, shape.index_dim)
    return Case(batch, q, k, v, index_q, weights, index_keys)


def select(case: Case, shape: Shape) -> Tensor:
    return select_pools_triton(
        case.index_q, case.weights, case.index_keys, case.batch, pool=shape.pool, count=BUDGET // shape.pool
    )


def check(name: str, shape: Shape) -> dict[str, Any]:
    """The share of pools that the reference selects too (others have nearly equal scores), and the error of attention
    over the kernel's selection, with the reference in float32."""
    prompt = 700 if ON_GPU else 40  # as many as share the keys that they read
    case = make_case(shape, [1, 1, prompt], [BUDGET * 3, 5, BUDGET * 2 + 7])
    count = BUDGET // shape.pool
    selected = select(case, shape)
    wide = [x.float() if isinstance(x, Tensor) else x for x in (case.index_q, case.weights, case.index_keys)]
    want = select_pools.reference(*wide, case.batch, pool=shape.pool, count=count)
    same = (selected[:, :, None] == want[:, None, :]).any(-1).float().mean().item()
    attended = indexed_attention_triton(case.q, case.k, case.v, selected, case.batch, pool=shape.pool, scale=0.1)
    exact = indexed_attention.reference(
        case.q.float(), case.k.float(), case.v.float(), selected, case.batch, pool=shape.pool, scale=0.1
    )
    row: dict[str, Any] = {"check": name, "same_pools": same, "error": error(attended, exact)}
    print(row, flush=True)
    assert same > 0.99 and row["error"] < (6e-3 if ON_GPU else 1e-5)
    return row


def time_case(name: str, shape: Shape, query_lens: list[int], seq_lens: list[int]) -> dict[str, Any]:
    case = make_case(shape, query_lens, seq_lens)
    selected = select(case, shape)
    attend = partial(indexed_attention_triton, case.q, case.k, case.v, selected, case.batch, pool=shape.pool, scale=0.1)
    if shape.kv_heads:
        dense = partial(paged_attention_triton, case.q, case.k, case.v, case.batch, scale=0.1)
    else:
        dense = partial(latent_attention_triton, case.q, case.k[:, :, 0], case.batch, rank=shape.dim, scale=0.1)
    row: dict[str, Any] = {"shape": name, "batch": len(seq_lens), "tokens": sum(query_lens), "context": seq_lens[0]}
    row["select_us"] = time_us([partial(select, case, shape)])
    row["attend_us"] = time_us([attend])
    row["indexed_us"] = time_us([lambda: (select(case, shape), attend())])
    row["dense_us"] = time_us([dense])
    entry = case.k[0, 0].numel() * (2 if shape.kv_heads else 1) * case.k.element_size()
    index = shape.index_dim * case.k.element_size() / shape.pool
    row["dense_floor_us"] = sum(seq_lens) * entry / COPY_BYTES_PER_S * 1e6
    row["indexed_floor_us"] = sum(min(n, BUDGET) * entry + n * index for n in seq_lens) / COPY_BYTES_PER_S * 1e6
    print({k: round(v, 1) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="*", default=[2048, 8192, 32768, 131072] if ON_GPU else [48])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32] if ON_GPU else [2])
    parser.add_argument("--skip-prefill", action="store_true")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, shape in SHAPES.items():
        rows.append(check(name, shape))
    for name, shape in SHAPES.items():
        for batch in args.batches:
            for context in args.contexts:
                rows.append(time_case(name, shape, [1] * batch, [context] * batch))
                write_json(NAME, rows)
    if not args.skip_prefill:
        for name, shape in SHAPES.items():
            longest = max(args.contexts) if shape.kv_heads else 8192  # dense attention over latents takes long
            for context in (n for n in args.contexts if n <= longest):
                rows.append(time_case(name, shape, [min(context, BUDGET)], [context]))
                write_json(NAME, rows)


if __name__ == "__main__":
    main()
