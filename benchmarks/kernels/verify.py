"""Times of kernels that verify drafts, beside the decode kernels.

    python -m benchmarks.kernels.verify [--json FILE] [--seqs 1 8 32 128] [--drafts 1 2 3] [--rules gdn kda]

Geometry of Qwen3-Next and of Kimi-Linear. For so many sequences and so many drafts: one layer of Gated DeltaNet and one
of Kimi Delta Attention (states after every token kept), one attention layer over a context. Each is shown as a multiple
of its decode step, and beside what the memory traffic allows.
Times are medians over replays of a CUDA graph that goes through more data than the L2 cache holds. Without a GPU it
rehearses a small size under the interpreter; times are 0 then.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.kernels import attention, gdn, kda
from benchmarks.kernels.measure import COPY_BYTES_PER_S, ON_GPU, error, time_us
from weft.bench import report
from weft.config.gated_delta_net import GatedDeltaNetConfig
from weft.forward_context import Verification
from weft.ops.attention.paged import paged_attention_triton
from weft.ops.delta_rule import gdn_verify, kda_verify
from weft.ops.delta_rule.few_tokens import as_delta_net, gdn_decode_triton, kda_decode_triton
from weft.ops.delta_rule.verify import Inputs, launch_verify

MODEL = "B"
CONTEXT, MAX_LEN = (1024, 2048) if ON_GPU else (48, 64)

WARPS = (4, 8, 16)
"""Tried with two drafts."""


def slots_of(first: int, num_seqs: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Working slots, and the slots of each sequence's tokens."""
    table = torch.arange(first, first + num_seqs * num_tokens, dtype=torch.int32, device=gdn.DEVICE)
    table = table.view(num_seqs, num_tokens)
    return table[:, -1].contiguous(), table


class Rule(NamedTuple):
    """A recurrent rule: its inputs, and its operations for one token and for a few."""

    arguments: Callable[[int, int], dict[str, Any]]
    geometry: Any
    kernel_geometry: GatedDeltaNetConfig
    decode: Callable[..., torch.Tensor]
    reference: Callable[..., torch.Tensor]


RULES = {
    "gdn": Rule(
        partial(gdn.decode_arguments, state_dtype=torch.float32, dtype=torch.bfloat16),
        gdn.GEOMETRY, gdn.GEOMETRY, gdn_decode_triton, gdn_verify.reference,
    ),
    "kda": Rule(
        partial(kda.decode_arguments, dtype=torch.bfloat16),
        kda.GEOMETRY, as_delta_net(kda.GEOMETRY), kda_decode_triton, kda_verify.reference,
    ),
}  # fmt: skip


def verification(
    arguments: dict[str, Any], places: tuple[torch.Tensor, torch.Tensor], rule: Rule
) -> partial[torch.Tensor]:
    rest = dict(arguments)
    inputs = Inputs(rest.pop("projected"), rest.pop("f", None), rest.pop("gate", None))
    return partial(launch_verify, inputs, **rest, state_slots=places[0], slots=places[1], geometry=rule.kernel_geometry)


def rule_row(name: str, num_seqs: int, num_drafts: int, sets: int) -> dict[str, Any]:
    """Times of one layer, and the kernel's error against the reference in float32."""
    tokens, rule = num_drafts + 1, RULES[name]
    arguments = rule.arguments(num_seqs * tokens, 1 + sets * num_seqs * tokens)
    before = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}
    places = [slots_of(1 + i * num_seqs * tokens, num_seqs, tokens) for i in range(sets)]
    working, table = places[0]
    verify = [verification(arguments, place, rule) for place in places]
    out = verify[0]()
    wide = gdn.wide(before)
    want = rule.reference(**wide, state_slots=working, slots=table, geometry=rule.geometry)
    errors = {
        "out": error(out, want),
        "state": error(arguments["state"][table.flatten().long()], wide["state"][table.flatten().long()].double()),
    }
    one = {name: x[:num_seqs] if name in ("projected", "f", "gate") else x for name, x in arguments.items()}
    decode = [partial(rule.decode, **one, state_slots=place[0], geometry=rule.geometry) for place in places]
    times = {"verify_us": time_us(verify), "decode_us": time_us(decode)}
    trials = {
        str(warps): time_us([partial(call, num_warps=warps) for call in verify])
        for warps in (WARPS if num_drafts == 2 else ())
    }
    floor = (tokens + 1) * num_seqs * arguments["state"][0].nbytes / COPY_BYTES_PER_S * 1e6
    return {
        "op": name,
        "seqs": num_seqs,
        "drafts": num_drafts,
        **times,
        "floor_us": floor,
        "errors": errors,
        "trials_us": trials,
    }


def attention_row(num_seqs: int, num_drafts: int) -> dict[str, Any]:
    """Times of one layer over ``CONTEXT`` tokens, and the worst error against float64."""
    tokens = num_drafts + 1
    _, hkv, dim = attention.MODELS[MODEL]
    kv_bytes = num_seqs * CONTEXT * hkv * dim * 2 * 2
    count = max(1, min(12, (200 << 20) // kv_bytes))

    def timed(query_len: int) -> tuple[float, float]:
        cases = [
            attention.make_case(MODEL, [query_len] * num_seqs, [CONTEXT] * num_seqs, MAX_LEN) for _ in range(count)
        ]
        slots = torch.zeros(num_seqs, query_len, dtype=torch.int32, device=gdn.DEVICE)
        verification = Verification(query_len, slots) if query_len > 1 else None
        cases = [(q, k, v, replace(batch, verification=verification)) for q, k, v, batch in cases]
        outs = [torch.full_like(case[0], torch.nan) for case in cases]
        calls = [
            lambda c=case, o=out: paged_attention_triton(*c, scale=dim**-0.5, out=o)
            for case, out in zip(cases, outs, strict=True)
        ]
        us = attention.graph_ms(calls * (4 if num_seqs < 8 else 1)) * 1e3
        return us, attention.worst_error(outs[-1], *cases[-1], sorted({0, num_seqs - 1}))

    (verify, error), (decode, _) = timed(tokens), timed(1)
    floor = kv_bytes / COPY_BYTES_PER_S * 1e6
    return {"op": "attention", "seqs": num_seqs, "drafts": num_drafts, "verify_us": verify, "decode_us": decode,
            "floor_us": floor, "errors": {"out": error}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 32, 128] if ON_GPU else [2])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 3] if ON_GPU else [2])
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for num_seqs in args.seqs:
        for num_drafts in args.drafts:
            rules = (rule_row(name, num_seqs, num_drafts, max(1, 64 // num_seqs)) for name in args.rules)
            for row in (*rules, attention_row(num_seqs, num_drafts)):
                row["times_decode"] = row["verify_us"] / row["decode_us"] if row["decode_us"] else None
                print({key: round(x, 2) if isinstance(x, float) else x for key, x in row.items()}, flush=True)
                rows.append(row)
    report.write_json(args.json, {**report.provenance(gdn.DEVICE), "context": CONTEXT, "rows": rows})


if __name__ == "__main__":
    main()
