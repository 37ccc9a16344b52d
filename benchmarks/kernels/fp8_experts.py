"""Experts with FP8 weights: checked against float64, timed beside the floor; the part of ``fp8.py`` for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.fp8_weights import DTYPE, FP8_FLOP_PER_S, fp8_weight, listed, poisoned
from benchmarks.kernels.measure import COPY_BYTES_PER_S, DEVICE, ON_GPU, error, graph_ms
from weft.layers.moe import MOST_ROUTED_ROWS
from weft.ops.activation import silu_and_mul
from weft.ops.fp8 import Fp8Matrix, dequantize_inputs, dequantize_weight, quantize_inputs_reference
from weft.ops.moe.blocks import Tile, Tiles
from weft.ops.moe.fp8_experts import SINGLE, Hopper, choose_config, fp8_fused_moe_triton, fp8_moe_tiles

MOE_LIMIT = 2e-2
"""Error limit of experts. Hidden values are rounded and quantised between the products, and may fall to either side."""
EXPERTS = (512, 10, 2048, 512)
"""The geometry of Qwen3-Next: experts, experts per token, hidden size, width."""
EXPERT_TOKENS = [1, 2, 4, 8, 16, 32, 128, 512, 1024, 2048, 8192]
if not ON_GPU:
    EXPERTS, EXPERT_TOKENS = (4, 2, 128, 128), [1, 4]


def expert_candidates(tokens: int) -> list[Tiles | Hopper]:
    num_experts, top_k, *_ = EXPERTS
    found: list[Tiles | Hopper] = [fp8_moe_tiles(tokens * top_k, num_experts, 512, 128)]
    if not ON_GPU:
        return [*found, SINGLE]
    if tokens <= 16:
        found.append(Hopper.PAIRS)
    single = [  # pairs are not grouped
        ((1, 8, 128, 1, 8), (1, 16, 128, 1, 4)),
        ((1, 8, 128, 2, 8), (1, 16, 128, 2, 4)),
        ((1, 8, 128, 2, 16), (1, 16, 128, 2, 4)),
        ((1, 16, 128, 2, 8), (1, 32, 128, 2, 4)),
        ((1, 16, 128, 2, 16), (1, 16, 128, 2, 4)),
        ((1, 16, 128, 1, 8), (1, 32, 128, 1, 4)),
        ((1, 32, 128, 4, 4), (1, 64, 128, 4, 4)),
        ((1, 32, 128, 2, 6), (1, 64, 128, 2, 4)),
    ]
    shapes: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
        16: [
            *single,
            ((16, 64, 128, 4, 4), (16, 128, 128, 4, 3)),
            ((16, 32, 128, 4, 6), (16, 32, 128, 4, 4)),
        ],
        128: [
            ((16, 32, 128, 4, 3), (16, 64, 128, 4, 3)),
            ((16, 64, 128, 4, 4), (16, 128, 128, 4, 3)),
            ((16, 32, 128, 4, 6), (16, 32, 128, 4, 4)),
            ((16, 32, 128, 2, 4), (16, 64, 128, 2, 4)),
        ],
        1024: [
            ((16, 64, 128, 4, 4), (16, 128, 128, 4, 4)),
            ((16, 128, 128, 4, 4), (16, 128, 128, 4, 4)),
            ((16, 128, 128, 4, 4), (16, 128, 128, 4, 4, 4)),
            ((32, 128, 128, 4, 3), (32, 128, 128, 4, 4)),
            ((32, 128, 128, 4, 3), (32, 128, 128, 4, 4, 8)),
            ((64, 64, 128, 4, 4), (64, 128, 128, 4, 4)),
            ((64, 128, 128, 8, 3), (64, 128, 128, 4, 4)),
        ],
        8192: [
            ((64, 128, 128, 8, 3), (64, 128, 128, 4, 4)),
            ((64, 128, 128, 8, 3), (64, 128, 128, 4, 4, 8)),
            ((128, 128, 128, 8, 4), (128, 128, 128, 4, 3)),
            ((128, 64, 128, 4, 4), (128, 128, 128, 8, 4)),
            ((64, 128, 128, 4, 3), (64, 128, 128, 8, 4)),
            ((64, 64, 128, 4, 4), (64, 128, 128, 4, 3)),
            ((64, 128, 128, 8, 4), (64, 64, 128, 4, 5)),
            ((128, 64, 128, 8, 4), (128, 128, 128, 8, 3)),
            ((128, 64, 128, 8, 3), (128, 64, 128, 4, 4)),
        ],
    }
    limit = min(limit for limit in shapes if limit >= tokens)
    return [*found, *(Tiles(Tile(*up), Tile(*down)) for up, down in shapes[limit])]


class Experts:
    """The experts of one layer, and several routings, so that few tokens meet different experts on every call. Up to
    256 tokens a shared expert is one of each token's."""

    def __init__(self, device: str = DEVICE, count: int = EXPERTS[0]) -> None:
        """``count`` experts; fewer than there are will do for compiling."""
        _, self.top_k, hidden, width = EXPERTS
        self.num_experts = count
        self.gate_up = fp8_weight(2 * width, hidden, 128, count + 1, device=device)
        self.down = fp8_weight(hidden, width, 128, count + 1, device=device)

    def inputs(self, tokens: int, device: str = DEVICE) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = torch.randn(tokens, EXPERTS[2], device=device).to(DTYPE)
        routings = []
        for _ in range(8):
            ids = torch.rand(tokens, self.num_experts, device=device).topk(self.top_k, dim=1).indices.int()
            if tokens <= MOST_ROUTED_ROWS:
                ids = torch.cat([ids, torch.full_like(ids[:, :1], self.num_experts)], dim=1)
            routings.append((torch.rand(ids.shape, device=device), ids))
        return x, routings

    def matrices(self, tokens: int) -> tuple[Fp8Matrix, Fp8Matrix]:
        """Gate and up; down."""
        count = self.num_experts + (tokens <= MOST_ROUTED_ROWS)
        (gate_up, gate_up_scale), (down, down_scale) = self.gate_up, self.down
        return (
            Fp8Matrix(gate_up[:count], gate_up_scale[:count], None, 128),
            Fp8Matrix(down[:count], down_scale[:count], None, 128),
        )

    def run(self, x: Tensor, routing: tuple[Tensor, Tensor], config: Tiles | Hopper | None) -> Tensor:
        return fp8_fused_moe_triton(x, *self.matrices(x.shape[0]), *routing, config=config)

    def want(self, x: Tensor, routing: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the output for the tokens of ``x`` in float64."""
        weights, ids = routing
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(x.shape[0]):
            for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
                hidden = silu_and_mul.reference(self._product(x[token : token + 1], self.gate_up, expert))
                out[token] += weight.double() * self._product(hidden.to(x.dtype), self.down, expert)[0]
        return out

    def _product(self, x: Tensor, matrix: tuple[Tensor, Tensor], expert: int) -> Tensor:
        inputs = dequantize_inputs(*quantize_inputs_reference(x, None, block=128), block=128)
        weight = dequantize_weight(matrix[0][expert], matrix[1][expert], block=128)
        return inputs.double() @ weight.double().T

    def microseconds(self, x: Tensor, routings: list[tuple[Tensor, Tensor]], config: Tiles | Hopper | None) -> float:
        calls = [lambda r=r: self.run(x, r, config) for r in (routings * 2 if x.shape[0] <= 1024 else routings[:2])]
        return graph_ms(calls, repeats=5) * 1e3

    def floor_us(self, tokens: int) -> float:
        num_experts, top_k, hidden, width = EXPERTS
        hit = num_experts * (1 - (1 - top_k / num_experts) ** tokens)
        if tokens <= MOST_ROUTED_ROWS:
            hit, top_k = hit + 1, top_k + 1
        return (
            max(hit * 3 * hidden * width / COPY_BYTES_PER_S, 6 * tokens * top_k * hidden * width / FP8_FLOP_PER_S) * 1e6
        )


def measure_experts(tune: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, table, experts = [], [], Experts()
    _num_experts, _top_k, hidden, width = EXPERTS
    for tokens in EXPERT_TOKENS:
        x, routings = experts.inputs(tokens)
        down, few = experts.matrices(tokens)[1].weight, min(tokens, 4)
        want = experts.want(x[:few], (routings[0][0][:few], routings[0][1][:few]))
        chosen = choose_config(down, tokens, routings[0][1].shape[1], 128, torch.bfloat16)
        tried = []
        for config in dict.fromkeys([chosen, *(expert_candidates(tokens) if tune else ())]):
            try:
                with poisoned():
                    wrong = error(experts.run(x, routings[0], config)[:few], want)
                us = experts.microseconds(x, routings, config) if wrong < MOE_LIMIT else float("inf")
                tried.append((us, wrong, config))
            except Exception as problem:
                print(f"experts {tokens} {config}: {type(problem).__name__} {str(problem)[:100]}", flush=True)
        if not tried:
            continue
        us, wrong, config = min(tried, key=lambda entry: entry[0])
        row = {"experts": down.shape[0], "hidden": hidden, "width": width, "block": 128, "tokens": tokens}
        floor = round(experts.floor_us(tokens), 2)
        rows.append(row | {"us": round(us, 2), "floor_us": floor, "error": wrong, "tried": listed(tried)})
        if config is not Hopper.BLOCKS:
            tiles = SINGLE if config is Hopper.PAIRS else config  # which that kernel takes over
            table.append(row | {"up": list(tiles.up), "down": list(tiles.down)})
        print(f"experts {tokens:5} {us:8.2f} us floor {floor:8.2f} error {wrong:.1e} {config}", flush=True)
        for other, wrong, config in sorted(tried, key=lambda entry: entry[0])[1:]:
            print(f"    {other:8.2f} error {wrong:.1e} {config}", flush=True)
    return rows, table
