"""Latent attention of prefills, absorbed and expanded: checked against each other, then timed.

    python -m benchmarks.kernels.latent [--tokens N ...] [--heads H ...] [--later N:C[:S] ...] [--keys N]
        [--json FILE]

One layer of Kimi-Linear (32 heads; DeepSeek-V3 has 128 of the same sizes): keys of 128 + 64, values of 128, rank 512.
From projected queries and latents to each head's values: products with the expansion's weights and attention, without
the projections, the norm and the store. ``--later``: S sequences with N tokens each behind a context of C. Times are
medians over replays of a CUDA graph.

- ``absorbed_us`` is the absorbed form, and ``kernel_us`` its attention alone.
- ``expanded_us`` is the expanded form of all sequences, as in an eager step. ``expansion_us`` leaves attention out.
- ``mixture_us``: choice, expansion and attention as in a graph that serves any sequences, without the absorbed form of
  what is not chosen. Where nothing is, this is what the choice costs.

``--keys`` overrides the keys of a tile of the absorbed form's kernel.
Without a GPU it rehearses small shapes under the interpreter, expanded keys and values without attention over them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.measure import DEVICE, MATRIX_FLOP_PER_S, ON_GPU, error, graph_ms
from weft.bench import report
from weft.forward_context import Batch, MixedBatch
from weft.ops.attention import expanded_latent_hopper, latent, store_latents
from weft.ops.attention.latent import latent_attention_triton
from weft.ops.triton.gluon import GLUON_IS_KNOWN

PAGE, DTYPE = 16, torch.bfloat16
KEY, SHARED, VALUE, RANK = (128, 64, 128, 512) if ON_GPU else (24, 8, 24, 40)
SCALE = (KEY + SHARED) ** -0.5


FRESH = [128, 256, 512, 1024, 2048, 4096, 8192]
LATER = [
    "128:8000", "200:8000", "300:8000", "512:8000", "2048:8000", "4096:16000", "8192:24000", "64:8000:8", "512:8000:4",
]  # fmt: skip


class Case(NamedTuple):
    """Sequences of one length: this step's queries, all latents in pages, and the expansion's weights."""

    batch: Batch
    own: Tensor
    of_shared: Tensor
    cache: Tensor
    k: Tensor
    v: Tensor


def make_case(tokens: int, context: int, count: int, heads: int) -> Case:
    length, rows = tokens + context, tokens * count
    pages = -(-length // PAGE)
    table = (torch.randperm(pages * count, device=DEVICE) + 1).view(count, pages)
    places = torch.arange(length, device=DEVICE)
    slots = table[:, places // PAGE] * PAGE + places % PAGE
    numbers = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    batch = Batch(
        num_tokens=rows, num_seqs=count, num_decodes=0, max_query_len=tokens, max_seq_len=length,
        positions=places[context:].repeat(count), slot_mapping=slots[:, context:].flatten(),
        cu_seqlens_q=numbers * tokens, seq_lens=torch.full_like(numbers[1:], length), page_table=table.int(),
        state_slots=numbers[1:], num_prefill_keys=length * count, least_chunk=tokens if context else rows,
    )  # fmt: skip

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=DEVICE, dtype=DTYPE)

    q = random(rows, heads * (KEY + SHARED) + RANK + SHARED)[:, : heads * (KEY + SHARED)]
    own, of_shared = q.unflatten(-1, (heads, KEY + SHARED)).split([KEY, SHARED], dim=-1)
    cache = torch.zeros(pages * count + 1, PAGE, RANK + SHARED, device=DEVICE, dtype=DTYPE)
    store_latents(random(length * count, RANK + SHARED), cache, slots.flatten())
    k, v = (random(heads, dim, RANK) * RANK**-0.5 for dim in (KEY, VALUE))
    return Case(batch, own, of_shared, cache, k, v)


def as_mixture(case: Case) -> Case:
    """The same step for a graph of any sequences up to 128K tokens."""
    batch = case.batch
    counts = torch.tensor([batch.num_tokens, batch.num_seqs, 0], dtype=torch.int32, device=DEVICE)
    mixed = MixedBatch(counts, batch.state_slots, max_prefills=16)
    return case._replace(batch=replace(batch, max_seq_len=1 << 17, mixed=mixed))


def absorb(case: Case) -> Tensor:
    q = case.own.new_empty(*case.own.shape[:2], RANK + SHARED)
    torch.bmm(case.own.transpose(0, 1), case.k, out=q[..., :RANK].transpose(0, 1))
    q[..., RANK:] = case.of_shared
    return q


def absorbed(case: Case) -> Tensor:
    attended = latent_attention_triton(absorb(case), case.cache, case.batch, rank=RANK, scale=SCALE)
    return torch.bmm(attended.transpose(0, 1), case.v.transpose(1, 2)).transpose(0, 1).flatten(1)


def expanded(case: Case, out: Tensor) -> Tensor:
    expansion = expanded_latent_hopper.plan_on_hopper(case.own, SHARED, VALUE, case.batch)
    assert expansion is not None
    given = case.own, case.of_shared, case.cache, case.k, case.v, case.batch, expansion
    return expanded_latent_hopper.expanded_latent_attention_triton(*given, scale=SCALE, out=out)


def without_attention(case: Case, out: Tensor) -> Tensor:
    attend = expanded_latent_hopper.launch_prefill_hopper
    expanded_latent_hopper.launch_prefill_hopper = lambda *_, **__: None
    try:
        return expanded(case, out)
    finally:
        expanded_latent_hopper.launch_prefill_hopper = attend


def time_us(pairs: float, call: Callable[[], Any]) -> float:
    """Microseconds per call, by fewer calls for many pairs of tokens."""
    return graph_ms([call], *((5, 4) if pairs > 1e9 else ())) * 1e3


def time_case(tokens: int, context: int, count: int, heads: int) -> dict[str, Any]:
    case = make_case(tokens, context, count, heads)
    row: dict[str, Any] = {"tokens": tokens, "context": context, "sequences": count, "heads": heads}
    pairs = heads * count * (tokens * context + tokens * (tokens + 1) / 2)
    row["absorbed_us"] = time_us(pairs, partial(absorbed, case))
    attend = partial(latent_attention_triton, absorb(case), case.cache, case.batch, rank=RANK, scale=SCALE)
    row["kernel_us"] = time_us(pairs, attend)
    row["kernel_tflops"] = 2e-6 * pairs * (2 * RANK + SHARED) / row["kernel_us"] if ON_GPU else 0.0
    if not ON_GPU or (GLUON_IS_KNOWN and torch.cuda.get_device_capability()[0] == 9):
        time_expanded(case, row, pairs)
    print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    assert row.get("error", 0.0) < 2e-2, row
    return row


def time_expanded(case: Case, row: dict[str, Any], pairs: float) -> None:
    module, out = expanded_latent_hopper, case.own.new_zeros(*case.own.shape[:2], VALUE)
    rules = module._LEAST_CHUNK, module._ROWS_EACH
    module._LEAST_CHUNK = module._ROWS_EACH = 1  # whether it pays is the question
    if ON_GPU:
        row["error"] = error(expanded(case, out).flatten(1), absorbed(case))
        row["expanded_us"] = time_us(pairs, partial(expanded, case, out))
    row["expansion_us"] = time_us(pairs, partial(without_attention, case, out))
    module._LEAST_CHUNK, module._ROWS_EACH = rules
    row["mixture_us"] = time_us(pairs, partial(expanded if ON_GPU else without_attention, as_mixture(case), out))
    heads, keys = case.own.shape[1], int(case.batch.seq_lens.sum())
    flop = 2 * (pairs * (KEY + SHARED + VALUE) + heads * keys * RANK * (KEY + VALUE))
    row["expanded_floor_us"] = flop / MATRIX_FLOP_PER_S * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="*", default=FRESH if ON_GPU else [300])
    parser.add_argument("--later", nargs="*", default=LATER if ON_GPU else ["140:150", "20:30:2"])
    parser.add_argument("--heads", type=int, nargs="*", default=[32] if ON_GPU else [2])
    parser.add_argument("--keys", type=int, help="keys of a tile of the absorbed form's kernel")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.keys:
        launch = latent.Fixed
        latent.Fixed = lambda *sizes: launch(*sizes)._replace(keys=args.keys)  # type: ignore[assignment, misc]
    expanded_latent_hopper.runs_gluon = lambda device: True  # type: ignore[assignment]  # its caller decides here
    cases = [(n, 0, 1) for n in args.tokens]
    for text in args.later:
        tokens, context, *count = map(int, text.split(":"))
        cases.append((tokens, context, count[0] if count else 1))
    rows = [time_case(*case, heads) for heads, case in product(args.heads, cases)]  # type: ignore[call-arg]
    if args.json:
        args.json.write_text(json.dumps(report.provenance(DEVICE) | {"keys": args.keys, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
