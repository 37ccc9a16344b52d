"""Where the time of a prefill goes on a GPU: the captured forward pass of one prompt, its kernels, a measured floor.

    python benchmarks/prefill_profile.py --model qwen3-0.6b --lengths 128 1024 8192 --json FILE

A length without a graph (``--settings``) runs operation by operation, and its time includes the sampling. With
``--batches`` decode steps too, as ``decode_profile.py``, in the same process; ``--share`` as there. The time printed
for a kernel is without its wait for earlier kernels. The floor of a prefill has two parts. The model's matrix products
at that length, without experts, are measured in one replayed graph. Attention, the gated delta rule and experts are
computed from bytes and FLOPs at the device's ceilings.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from benchmarks.decode_profile import graph_ms, kernels_us, profile_decode, share_of
from weft.bench import report
from weft.bench.roofline import Work, ceilings_of
from weft.config import resolve
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.ops.fp8 import E4M3
from weft.runner.model_runner import ModelRunner


def prefill_orders(runner: ModelRunner, length: int) -> SchedulerOutput:
    """A step that computes one prompt and samples a token."""
    pages = list(range(1, 1 + runner.spec.pages_for(length)))
    rng = random.Random(length)  # equal tokens would all choose the same experts
    prompt = [rng.randrange(runner.config.model_config.vocab_size) for _ in range(length)]
    new = NewRequest(0, array("I", prompt), length, RowSampling(temperature=0.0))
    return SchedulerOutput(1, [ScheduledRequest(0, 0, length, pages, 1, True)], [new])


def products_ms(runner: ModelRunner, length: int) -> float:
    """Milliseconds of all dense matrix products of the model at that length, in one graph; in FP8 without scales."""
    weights = [
        p for name, p in runner.model.named_parameters()
        if p.dim() == 2 and not any(other in name for other in ("embed", "lm_head", "conv1d", "scale"))
    ]  # fmt: skip
    one = torch.ones((), device="cuda")
    inputs = {
        (width, dtype): torch.randn(length, width, dtype=torch.bfloat16, device="cuda").to(dtype)
        for width, dtype in {(w.shape[1], w.dtype) for w in weights}
    }

    def run() -> None:
        for weight in weights:
            x = inputs[weight.shape[1], weight.dtype]
            if weight.dtype is E4M3:
                torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
            else:
                F.linear(x, weight)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph_ms(graph.replay)


def rest_ms(runner: ModelRunner, length: int) -> dict[str, float]:
    """Floors in milliseconds of what is no dense product."""
    model, spec = runner.config.model_config, runner.spec
    ceilings = ceilings_of("cuda")
    assert ceilings is not None
    floors = {
        "attention": Work(length * spec.kv_bytes_per_token, spec.flops_per_pair * length * (length + 1) / 2).floor_s(
            ceilings
        )
    }
    linear = model.mixers.get("linear_attention", {}).get("linear_attn")
    if isinstance(linear, GatedDeltaNetConfig):
        layers = model.layer_types.count("linear_attention")
        # Chunked form, 64 tokens a chunk: products with the state (3 of K x V) and inside the chunk.
        per_token = linear.num_v_heads * (
            6 * linear.head_k_dim * linear.head_v_dim + 64 * (4 * linear.head_k_dim + 2 * linear.head_v_dim)
        )
        moved = length * (linear.conv_dim + 2 * linear.value_dim) * 2
        floors["gated delta rule"] = layers * Work(moved, length * per_token).floor_s(ceilings)
    if model.moe is not None:
        moe = model.moe
        weights = 3 * model.hidden_size * moe.intermediate_size
        hit = moe.num_experts * (1 - (1 - moe.num_experts_per_tok / moe.num_experts) ** length)
        flops = 2.0 * weights * length * moe.num_experts_per_tok
        bytes_each = 2 if model.quantization is None else 1
        work = Work(hit * weights * bytes_each, flops * bytes_each / 2)  # FP8 products take half as long
        floors["experts"] = len(moe.sparse_layers) * work.floor_s(ceilings)
    return {name: seconds * 1e3 for name, seconds in floors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--batches", type=int, nargs="*", default=[])
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--share", type=int, default=1, metavar="RANKS")
    parser.add_argument("--json", required=True)
    parser.add_argument("--top", type=int, default=16, help="kernels to print")
    args = parser.parse_args()
    base = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 16384, "max_num_seqs": 256,
        "device": "cuda", "cuda_graph_mode": "FULL", "piecewise_cuda_graph_tokens": args.lengths,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = share_of(args.model, args.share, Path(folder))
        runner = ModelRunner(resolve(model=str(model), **(base | json.loads(args.settings))))
    assert runner.graphs.forward is not None
    result: dict[str, Any] = {
        "benchmark": "prefill_profile",
        **report.provenance("cuda"),
        "model": args.model,
        "share_of_ranks": args.share,
        "lengths": {},
        "batches": profile_decode(runner, args.model, args.batches, [1088], args.top),
    }
    for length in args.lengths:
        orders = prefill_orders(runner, length)
        runner.run(orders)
        replay: Callable[[], Any] = partial(runner.graphs.forward.replay, length, length)
        if length not in runner.graphs.forward.sizes:
            replay = partial(runner.run, orders)
        total, kernels = graph_ms(replay), kernels_us(replay)
        floors = {"products": products_ms(runner, length), **rest_ms(runner, length)}
        floor = sum(floors.values())
        result["lengths"][length] = {"replay_ms": total, "floor_ms": floor, "floors": floors, "kernels": kernels}
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in floors.items())
        print(f"{args.model} {length} tokens: {total:.3f} ms, floor {floor:.3f} ({total / floor:.2f}x): {parts}")
        for row in kernels[: args.top]:
            print(f"   {row['adds']:9.1f} us {row['launches']:6.1f}  {row['kernel']}")
    Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
