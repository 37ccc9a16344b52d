"""Sampling, norms and gates on the GPU: checked against the references, then timed beside the floor.

Usage: ``python -m benchmarks.kernels.sampling``; without a GPU it rehearses on tiny shapes under the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, error, graph_ms, write_json
from weft.ops.activation.kernels import sigmoid_mul_triton, silu_and_mul_triton
from weft.ops.attention.pages import PageCopier
from weft.ops.norm import rms_norm_reference
from weft.ops.norm.kernels import rms_norm_triton
from weft.ops.rotary import CacheSlots, HeadNorms, QkvHeads
from weft.ops.rotary.kernels import qk_norm_rope_triton
from weft.ops.sampling import SamplingFlags, sample
from weft.ops.sampling.kernels import sample_triton

VOCAB = 151936 if ON_GPU else 1500
DTYPE = torch.bfloat16 if ON_GPU else torch.float32

MIXTURES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.6, 0, 1.0, 0.0),
    "min-p": (0.6, 0, 1.0, 0.05),
    "top-k 20": (0.6, 20, 1.0, 0.0),
    "top-p 0.95": (0.6, 0, 0.95, 0.0),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
}


def sampling_rows(num_rows: int, spread: float) -> list[dict[str, Any]]:
    """``spread``: standard deviation of the logits; 1 is nearly flat, 4 is like a language model's."""
    logits = torch.randn(num_rows, VOCAB, device=DEVICE) * spread
    rows = []
    for name, (temperature, top_k, top_p, min_p) in MIXTURES.items():
        given: dict[str, Any] = {
            "temperature": torch.full((num_rows,), temperature),
            "top_k": torch.full((num_rows,), top_k),
            "top_p": torch.full((num_rows,), top_p),
            "min_p": torch.full((num_rows,), min_p),
            "seeds": torch.randint(0, 2**62, (num_rows,)),
            "positions": torch.arange(num_rows),
        }
        given = {key: value.to(DEVICE) for key, value in given.items()}
        flags = SamplingFlags(temperature == 0.0, VOCAB if top_k or top_p < 1 else 0, min_p > 0)
        call = partial(sample_triton, logits, **given, flags=flags)
        want, _ = sample.reference(logits, **given, flags=flags)
        differ = (call()[0] != want).float().mean().item()
        ms = graph_ms([call] * 3, repeats=9)
        floor = logits.numel() * 4 / COPY_BYTES_PER_S * 1e6
        rows.append({"op": f"{name} b{num_rows} std{spread:g}", "us": ms * 1e3, "floor_us": floor, "error": differ})
    return rows


def small_rows(num_tokens: int) -> list[dict[str, Any]]:
    """The small kernels of one layer, model A then B."""
    rows = []
    for model, hidden, hq, hkv, dim, rotary, gated in (("A", 1024, 16, 8, 128, 128, 0), ("B", 2048, 16, 2, 256, 64, 1)):
        x, residual = (torch.randn(num_tokens, hidden, device=DEVICE, dtype=DTYPE) for _ in range(2))
        weight = torch.randn(hidden, device=DEVICE, dtype=DTYPE)
        want = rms_norm_reference(x, weight, 1e-6, residual=residual)[0]
        found = rms_norm_triton(x, weight, 1e-6, residual=residual)[0]
        wide = torch.randn(num_tokens, 6144, device=DEVICE, dtype=DTYPE)
        qkv = torch.randn(num_tokens, (hq * (1 + gated) + 2 * hkv) * dim, device=DEVICE, dtype=DTYPE)
        caches = [torch.zeros(num_tokens // 16 + 2, 16, hkv, dim, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        cos_sin = torch.randn(4096, rotary, device=DEVICE)
        positions = torch.arange(num_tokens, device=DEVICE) % 4096
        slots = torch.arange(num_tokens, device=DEVICE) + 16
        weights = [torch.randn(dim, device=DEVICE, dtype=DTYPE) for _ in range(2)]
        attended = torch.randn(num_tokens, hq * dim, device=DEVICE, dtype=DTYPE)

        heads, norms = QkvHeads(hq, hkv, dim, bool(gated)), HeadNorms(weights[0], weights[1], 1e-6, bool(gated))
        cache = CacheSlots(caches[0], caches[1], slots)
        rope = partial(qk_norm_rope_triton, qkv, heads, norms, cos_sin, positions, cache)
        calls: dict[str, tuple[Callable[[], Any], int]] = {
            "residual + norm": (partial(rms_norm_triton, x, weight, 1e-6, residual=residual), 8 * hidden),
            "silu and mul": (partial(silu_and_mul_triton, wide), 3 * 6144),
            "qk norm rope": (rope, 2 * qkv.shape[1] * 2),
            "sigmoid gate": (partial(sigmoid_mul_triton, attended, attended), 6 * hq * dim),
        }
        for name, (call, row_bytes) in calls.items():
            ms = graph_ms([call] * 10)
            rows.append(
                {"op": f"{name} {model} {num_tokens}", "us": ms * 1e3,
                 "floor_us": num_tokens * row_bytes / COPY_BYTES_PER_S * 1e6,
                 "error": error(found, want) * 0.01 if name == "residual + norm" else 0.0}
            )  # fmt: skip
    return rows


def copy_rows() -> list[dict[str, Any]]:
    caches = [torch.zeros(64, 16, 8, 128, device=DEVICE, dtype=DTYPE) for _ in range(56 if ON_GPU else 2)]
    copier = PageCopier(caches)
    src, dst = (torch.arange(start, start + 16, device=DEVICE) for start in (1, 32))
    size = 2 * 16 * len(caches) * caches[0][0].numel() * DTYPE.itemsize
    ms = graph_ms([lambda: copier(src, dst)] * 3)
    return [{"op": "copy 16 pages", "us": ms * 1e3, "floor_us": size / COPY_BYTES_PER_S * 1e6, "error": 0.0}]


def main() -> None:
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    rows: list[dict[str, Any]] = []
    for num_rows, spread in ((1, 4.0), (32, 4.0), (128, 4.0), (128, 1.0), (256, 4.0)) if ON_GPU else ((2, 3.0),):
        rows += sampling_rows(num_rows, spread)
    for num_tokens in (1, 128, 4096) if ON_GPU else (3,):
        rows += small_rows(num_tokens)
    rows += copy_rows()
    print(f"{'operation':36} {'us':>9} {'floor us':>9} {'differ':>8}")
    for row in rows:
        verdict = "" if row["error"] <= 0.005 else "  WRONG"
        print(f"{row['op']:36} {row['us']:9.2f} {row['floor_us']:9.2f} {row['error']:8.1e}{verdict}")
    write_json("sampling.json", rows)


if __name__ == "__main__":
    main()
