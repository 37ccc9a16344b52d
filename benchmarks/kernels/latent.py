"""Latent attention of prompts, absorbed and expanded: checked against each other, then timed.

    python -m benchmarks.kernels.latent [--tokens N ...] [--heads H] [--keys N] [--json FILE]

One layer of Kimi-Linear: keys of 128 + 64, values of 128, rank 512. From projected queries and latents to each head's
values: products with the expansion's weights and attention, without the projections, the norm and the store.
``kernel_us`` is the absorbed form's attention alone. Rows with a context have so many tokens in the cache before them.
Times are medians over replays of a CUDA graph. ``--keys`` overrides the keys of a tile of the absorbed form's kernel.
Without a GPU it rehearses small shapes under the interpreter, the absorbed form alone.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.measure import DEVICE, MATRIX_FLOP_PER_S, ON_GPU, error, time_us
from weft.bench import report
from weft.forward_context import Batch
from weft.ops.attention import expands_latents, latent, store_latents
from weft.ops.attention.latent import latent_attention_triton
from weft.ops.backend import Backend
from weft.ops.triton.gluon import GLUON_IS_KNOWN

PAGE, DTYPE = 16, torch.bfloat16 if ON_GPU else torch.float32
KEY, SHARED, VALUE, RANK = (128, 64, 128, 512) if ON_GPU else (24, 8, 24, 40)
SCALE = (KEY + SHARED) ** -0.5


class Case(NamedTuple):
    """One sequence: this step's queries and entries, all entries in pages, and the expansion's weights."""

    batch: Batch
    own: Tensor
    of_shared: Tensor
    entries: Tensor
    cache: Tensor
    k: Tensor
    v: Tensor


def make_case(tokens: int, context: int, heads: int) -> Case:
    length = tokens + context
    pages = -(-length // PAGE)
    table = torch.randperm(pages, device=DEVICE) + 1
    places = torch.arange(length, device=DEVICE)
    slots = table[places // PAGE] * PAGE + places % PAGE
    batch = Batch(
        num_tokens=tokens, num_seqs=1, num_decodes=0, max_query_len=tokens, max_seq_len=length,
        positions=places[context:], slot_mapping=slots[context:],
        cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([length], dtype=torch.int32, device=DEVICE), page_table=table.int()[None],
        state_slots=places[:1], num_begun=int(context == 0),
    )  # fmt: skip

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE, dtype=DTYPE)

    q = random(tokens, heads * (KEY + SHARED) + RANK + SHARED)[:, : heads * (KEY + SHARED)]
    own, of_shared = q.unflatten(-1, (heads, KEY + SHARED)).split([KEY, SHARED], dim=-1)
    entries, cache = random(length, RANK + SHARED), torch.zeros(pages + 1, PAGE, RANK + SHARED, device=DEVICE)
    cache = cache.to(DTYPE)
    store_latents(entries, cache, slots)
    k, v = (random(heads, dim, RANK) * RANK**-0.5 for dim in (KEY, VALUE))
    return Case(batch, own, of_shared, entries[context:], cache, k, v)


def absorb(case: Case) -> Tensor:
    q = case.own.new_empty(*case.own.shape[:2], RANK + SHARED)
    torch.bmm(case.own.transpose(0, 1), case.k, out=q[..., :RANK].transpose(0, 1))
    q[..., RANK:] = case.of_shared
    return q


def absorbed(case: Case) -> Tensor:
    attended = latent_attention_triton(absorb(case), case.cache, case.batch, rank=RANK, scale=SCALE)
    return torch.bmm(attended.transpose(0, 1), case.v.transpose(1, 2)).transpose(0, 1).flatten(1)


def expanded(case: Case) -> Tensor:
    from weft.ops.attention.expanded_latent_hopper import expanded_latent_attention_triton

    given = case.own, case.of_shared, case.entries, case.k, case.v, case.batch
    return expanded_latent_attention_triton(*given, scale=SCALE).flatten(1)


def time_case(tokens: int, context: int, heads: int) -> dict[str, Any]:
    case = make_case(tokens, context, heads)
    row: dict[str, Any] = {"tokens": tokens, "context": context, "heads": heads}
    row["absorbed_us"] = time_us([partial(absorbed, case)])
    q = absorb(case)
    row["kernel_us"] = time_us([partial(latent_attention_triton, q, case.cache, case.batch, rank=RANK, scale=SCALE)])
    pairs = tokens * context + tokens * (tokens + 1) / 2
    row["kernel_tflops"] = 2e-6 * heads * pairs * (2 * RANK + SHARED) / row["kernel_us"] if ON_GPU else 0.0
    expands = partial(expands_latents, case.own, SHARED, VALUE, case.batch, backend=Backend.TRITON)
    row["chosen"] = "expanded" if expands() else "absorbed"
    if context == 0 and ON_GPU and GLUON_IS_KNOWN and torch.cuda.get_device_capability()[0] == 9:
        row["error"] = error(expanded(case), absorbed(case))
        row["expanded_us"] = time_us([partial(expanded, case)])
        flop = 2 * heads * (pairs * (KEY + SHARED + VALUE) + tokens * RANK * (KEY + VALUE))
        row["expanded_floor_us"] = flop / MATRIX_FLOP_PER_S * 1e6
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    assert row.get("error", 0.0) < 2e-2, row
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=[512, 1024, 2048, 4096, 8192] if ON_GPU else [20])
    parser.add_argument("--heads", type=int, default=32 if ON_GPU else 2)
    parser.add_argument("--keys", type=int, help="keys of a tile of the absorbed form's kernel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.keys:
        launch = latent.Fixed
        latent.Fixed = lambda *sizes: launch(*sizes)._replace(keys=args.keys)  # type: ignore[assignment, misc]
    later = (512, 8000) if ON_GPU else (5, 30)
    rows = [time_case(tokens, context, args.heads) for tokens, context in (*((n, 0) for n in args.tokens), later)]
    if args.json:
        args.json.write_text(json.dumps(report.provenance(DEVICE) | {"keys": args.keys, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
