"""Measure decoding with the order of sums of a prompt (``docs/determinism.md``), against decoding as it is.

    python -m benchmarks.kernels.chunk_order --json FILE

A recurrent layer of B would compute the tokens since the last multiple of 64 again, 32 in the mean, as a chunk.
Attention of A and B would add all keys in one program, by the kernel for prompts. Microseconds of one layer; medians
over replays of a CUDA graph that rotates through more states than the L2 cache holds. Without a GPU it rehearses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.attention import MODELS, make_case
from benchmarks.kernels.gdn import CONV_DIM, HK, HV, K, V, W, make_batch
from benchmarks.kernels.measure import DEVICE, L2_BYTES, ON_GPU, time_us
from weft.bench import report
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.ops.attention import paged_attention
from weft.ops.backend import Backend
from weft.ops.convolution import causal_conv1d
from weft.ops.delta_rule import DeltaWeights, chunk_gated_delta_rule, gdn_decode, gdn_gates
from weft.ops.norm import gated_rms_norm

FIXED = Backend.INVARIANT_TRITON
SEQUENCES = (1, 8, 32, 128) if ON_GPU else (1, 2)
CONTEXTS = (1024, 8192) if ON_GPU else (80,)
MEAN_TOKENS = 32
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def recurrence(num_seqs: int) -> dict[str, float]:
    """One Gated DeltaNet layer between its projections."""
    rounds = max(1, 2 * L2_BYTES // (num_seqs * HV * K * V * 4)) if ON_GPU else 1
    slots = 1 + num_seqs * rounds
    state = torch.randn(slots, HV, K, V, device=DEVICE)
    conv = torch.randn(slots, CONV_DIM, W - 1, device=DEVICE).to(DTYPE)
    a_log, dt_bias, norm = torch.rand(HV, device=DEVICE), torch.rand(HV, device=DEVICE), torch.rand(V, device=DEVICE)
    weights = DeltaWeights(torch.randn(CONV_DIM, W, device=DEVICE).to(DTYPE), a_log, dt_bias, norm.to(DTYPE), 1e-6)
    geometry = GatedDeltaNetConfig(HK, HV, K, V, W)
    rows = torch.randn(num_seqs, CONV_DIM + HV * V + 2 * HV, device=DEVICE).to(DTYPE)
    tokens = torch.randn(num_seqs * MEAN_TOKENS, rows.shape[1], device=DEVICE).to(DTYPE)
    batch = make_batch([MEAN_TOKENS] * num_seqs)
    batch = replace(batch, seq_lens=batch.seq_lens + 64)  # they continue a state

    def decode(of: Tensor) -> Callable[[], Any]:
        return lambda: gdn_decode(rows, weights, conv, state, of, geometry, backend=FIXED)

    def chunk(of: Tensor) -> Callable[[], Any]:
        moved = replace(batch, state_slots=of)

        def run() -> None:
            qkv, z, b, a = tokens.split([CONV_DIM, HV * V, HV, HV], dim=-1)
            g, beta = gdn_gates(a, b, a_log, dt_bias, backend=FIXED)
            qkv = causal_conv1d(qkv, weights.conv_weight, None, conv, moved, backend=FIXED)
            q, k, v = qkv.split([HK * K, HK * K, HV * V], dim=-1)
            q, k, v = (x.unflatten(-1, (-1, d)) for x, d in ((q, K), (k, K), (v, V)))
            o = chunk_gated_delta_rule(q, k, v, g, beta, state, moved, backend=FIXED)
            gated_rms_norm(o, z.unflatten(-1, (HV, V)), weights.norm_weight, 1e-6, backend=FIXED)

        return run

    each = torch.arange(1, slots, dtype=torch.int32, device=DEVICE).view(rounds, num_seqs).contiguous()
    return {"as_it_is": time_us([decode(of) for of in each]), "as_a_prompt": time_us([chunk(of) for of in each])}


def attention(model: str, num_seqs: int, context: int) -> dict[str, float]:
    """One attention layer: splits over the keys, or all keys in the kernel for prompts."""
    q, k, v, batch = make_case(model, [1] * num_seqs, [context] * num_seqs, context)
    splits = replace(batch, num_decodes=num_seqs)
    # A sequence of two query tokens is a prompt's. The second row is not worth much time.
    q2, _, _, two = make_case(model, [2] * num_seqs, [context] * num_seqs, context)
    scale = MODELS[model][2] ** -0.5
    return {
        "as_it_is": time_us([lambda: paged_attention(q, k, v, splits, scale=scale, backend=FIXED)]),
        "as_a_prompt": time_us([lambda: paged_attention(q2, k, v, two, scale=scale, backend=FIXED)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    target, rows = report.open_json(args.json), list[dict[str, Any]]()
    for num_seqs in SEQUENCES:
        rows.append({"layer": "Gated DeltaNet of B", "sequences": num_seqs} | recurrence(num_seqs))
        for model in MODELS:
            for context in CONTEXTS:
                row = {"layer": f"attention of {model}", "sequences": num_seqs, "context": context}
                rows.append(row | attention(model, num_seqs, context))
        for row in rows[-1 - len(MODELS) * len(CONTEXTS) :]:
            print(row, flush=True)
        report.write_json(target, {"benchmark": "chunk_order", **report.provenance(DEVICE), "rows": rows})


if __name__ == "__main__":
    main()
