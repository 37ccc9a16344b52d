"""Recurrent layers of published models on the GPU, beside the floor: ``python -m benchmarks.kernels.recurrent_shapes``.

Job: the time of everything between a layer's two projections, as an engine runs it. Layers are Weft's own, with random
weights. A Mamba layer's small projections and an RG-LRU's gates are part of it, sums over ranks are not. Owns: the
geometries, which are those of published configs. Each is timed on one rank of several sizes of a group. Layers and
states rotate, so that more data is read than the L2 cache holds.

``graph`` cases are batches as in a captured graph, whose real sizes only the device knows: 256 rows that may decode,
and 16 sequences that may prefill. ``--compile I N`` runs part I of N of the layers once, so that several processes fill
the cache of kernels before one of them measures. Without a GPU tiny layers are rehearsed under the interpreter. A case
that fails is a row with its error.

The floor is the largest of three times. Bytes: inputs, output, weights, and states, which decodes and continued
prefills read and write, and new sequences write. FLOPs of prefills on the matrix units: chunks of 64 with whole 64 x 64
products, scores once for each key head or group, and no inversion of triangular matrices. Exponentials of Mamba: one
for each token, channel and number of the state. At small sizes the launches are the cost.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.measure import (
    COPY_BYTES_PER_S,
    DEVICE,
    L2_BYTES,
    LEAST_CALLS,
    MATRIX_FLOP_PER_S,
    ON_GPU,
    graph_ms,
)  # fmt: skip
from tests.ops.oracles import make_batch
from weft.bench import report
from weft.config.chunks import CHUNK_SIZE
from weft.config.gated_delta_net import GatedDeltaNetConfig as Gdn
from weft.config.kimi import KimiDeltaConfig as Kda
from weft.config.layer_spec import CacheDtypes
from weft.config.lightning_attention import LightningAttentionConfig as Lightning
from weft.config.mamba import HeadedMambaConfig, MambaConfig
from weft.config.mamba2 import Mamba2Config as Mamba2
from weft.config.recurrent_gemma import RgLruConfig as RgLru
from weft.config.short_conv import ShortConvConfig
from weft.errors import ConfigError
from weft.forward_context import Batch, ForwardContext, MixedBatch, forward_context, get_forward_context
from weft.graph.batch_descriptor import MAX_PREFILLS, chunk_capacity
from weft.layers.context import ModelContext
from weft.layers.linear import LinearBase
from weft.layers.short_conv import convolve_rows
from weft.layers.table import LayerTable
from weft.layers.weight import WeightLayout, WeightModule, empty_parameter
from weft.models.decoder import MIXERS
from weft.ops.backend import Backend
from weft.parallel.tensor_parallel import SingleRank
from weft.quantization.unquantized import UnquantizedLinear

EXP_PER_S = 132 * 16 * 1.98e9
"""Exponentials of an H200: 16 for each multiprocessor and cycle, at its highest clock."""
PROJECTIONS = ("in_proj", "out_proj", "f_b_proj", "g_b_proj")
"""Around what is timed. They have no weights."""


@dataclasses.dataclass(frozen=True)
class Convolution(ShortConvConfig):
    """A convolution with SiLU alone, as the layers above run it in prefills."""


def mamba(channels: int, dt_rank: int, norms: bool | None = True) -> MambaConfig:
    return MambaConfig(channels, 16, dt_rank, 4, conv_bias=True, bias=False, norm_weights=norms, norm_eps=1e-6)


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "qwen3.5-0.8b": (Gdn(16, 16, 128, 128, 4), (1, 2, 4, 8)),
    "qwen3-next-80b-a3b, qwen3.5-4b, 9b, 35b-a3b": (Gdn(16, 32, 128, 128, 4), (1, 2, 4, 8)),
    "qwen3.5-27b": (Gdn(16, 48, 128, 128, 4), (1, 2, 4, 8)),
    "qwen3.5-122b-a10b, 397b-a17b": (Gdn(16, 64, 128, 128, 4), (1, 2, 4, 8)),
    "olmo-hybrid-7b": (Gdn(30, 30, 96, 192, 4, negative_eigenvalues=True), (1, 2)),
    "kimi-linear-48b-a3b": (Kda(32, 128, 4), (1, 4)),
    "ling-3.0-flash": (Kda(32, 128, 4, gate_floor=-5.0, low_rank=False), (1, 4)),
    "glm-5.3-flash": (Kda(64, 128, 4, gate_floor=-5.0, flat_decay=True), (1, 8)),
    "nemotron-h-8b, codestral-mamba-7b": (Mamba2(128, 64, 128, 8, 4), (1, 8)),
    "nemotron-h-47b": (Mamba2(256, 64, 256, 8, 4), (1, 8)),
    "nemotron-3-nano-30b-a3b": (Mamba2(64, 64, 128, 8, 4), (1, 8)),
    "granite-4-small": (Mamba2(128, 64, 128, 1, 4), (1, 2)),
    "granite-4-tiny": (Mamba2(48, 64, 128, 1, 4), (1,)),
    "falcon-h1-34b": (Mamba2(32, 128, 256, 2, 4, norm=False), (1, 2)),
    "zamba2-7b": (Mamba2(112, 64, 64, 2, 4), (1, 2)),
    "mamba2-2.7b": (Mamba2(80, 64, 128, 1, 4), (1,)),
    "jamba-mini": (mamba(8192, 256), (1, 2)),
    "jamba-large": (mamba(16384, 512), (1, 8)),
    "falcon-mamba-7b": (mamba(8192, 256, norms=False), (1,)),
    "zamba-7b": (HeadedMambaConfig(2, mamba(7424, 232, norms=None)), (1, 2)),
    "recurrentgemma-2b": (RgLru(2560, 10, 4), (1, 2)),
    "recurrentgemma-9b": (RgLru(4096, 16, 4), (1, 8)),
    "minimax-text-01": (Lightning(64, 128, 80), (1, 8)),
    "ling-flash-linear": (Lightning(32, 128, 32), (1, 4)),
    "lfm2-1.2b, 8b-a1b": (ShortConvConfig(2048, 3, False), (1, 2)),
    "convolution of qwen3.5-4b": (Convolution(8192, 4, False), (1, 8)),
    "convolution of kimi-linear, qwen3.5-122b": (Convolution(12288, 4, False), (1,)),
    "convolution of nemotron-h-47b": (Convolution(20480, 4, False), (1,)),
}  # fmt: skip
"""Geometries of whole models, and sizes of a tensor-parallel group. A size that does not divide is a row with the
reason."""


class Case(NamedTuple):
    """A batch. Other sequences than those of ``decodes`` have ``new`` tokens behind a ``context``."""

    decodes: int
    new: tuple[int, ...] = ()
    context: int = 0
    graph: bool = False


CASES = [Case(rows) for rows in (1, 4, 8, 32, 128, 256)]
CASES += [Case(0, new) for new in ((256,), (512,), (2048,), (8192,), (256,) * 16, (64,) * 32)]
CASES += [Case(0, (512,), 8000), *(Case(rows, (512,), graph=True) for rows in (0, 32, 200))]
GRAPH_SEQS, DTYPE, HALF = 256, torch.bfloat16, "bfloat16"
if not ON_GPU:
    MODELS = {
        "tiny gated delta net": (Gdn(2, 4, 16, 16, 4), (1, 2)), "tiny kda": (Kda(2, 16, 4), (1, 2)),
        "tiny kda without ranks": (Kda(2, 16, 4, gate_floor=-5.0, low_rank=False), (1,)),
        "tiny mamba2": (Mamba2(4, 16, 16, 1, 4), (1, 2)),
        "tiny mamba2 without norm": (Mamba2(4, 16, 16, 2, 4, norm=False), (2,)),
        "tiny mamba": (mamba(32, 4), (1, 2)), "tiny zamba": (HeadedMambaConfig(2, mamba(32, 4, None)), (1,)),
        "tiny rg-lru": (RgLru(32, 2, 4), (1, 2)), "tiny lightning": (Lightning(2, 16, 3), (1, 2)),
        "tiny short conv": (ShortConvConfig(32, 3, False), (1,)), "tiny conv": (Convolution(32, 4, False), (1,)),
    }  # fmt: skip
    CASES = [Case(3), Case(0, (70, 3)), Case(0, (5,), 128), Case(0, (70,), graph=True), Case(2, (70,), graph=True)]
    GRAPH_SEQS, DTYPE, HALF = 5, torch.float16, "float16"


class OneRank(SingleRank):
    """One rank of a group, in which sums return their argument."""

    def __init__(self, size: int) -> None:
        self.size = size


class ConvolutionLayer(WeightModule):
    """A layer that is a ``Convolution`` alone."""

    def __init__(self, geometry: Convolution, config: Any, context: ModelContext, name: str) -> None:
        super().__init__()
        self.width, self.name = geometry.num_channels // context.tp.size, name
        self.weight = empty_parameter(self.width, geometry.kernel, dtype=context.dtype, device=context.device)

    def mix(self, x: Tensor) -> Tensor:
        state = get_forward_context().caches[self.name]["conv"]
        return convolve_rows(x, self.weight, None, state, silu=True, backend=Backend.TRITON)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ()


def matrix_flops(geometry: Any) -> float:
    """FLOPs of a token in the chunked form, in the whole model; see the module's docstring."""
    match geometry:
        case Gdn(hk, hv, k, v):
            return hk * 4 * 64 * k + hv * (6 * k * v + 4 * 64 * v)
        case Kda(heads, k):
            return heads * (4 * 64 * k + 6 * k * k + 4 * 64 * k)
        case Mamba2(heads, p, n, groups):
            return groups * 2 * 64 * n + heads * (4 * n * p + 2 * 64 * p)
        case Lightning(heads, d):
            return heads * (4 * 64 * d + 4 * d * d)
        case MambaConfig(channels, n, rank):
            return channels * (2 * (rank + 2 * n) + 2 * rank)
        case HeadedMambaConfig(_, inner):
            return matrix_flops(inner)
        case RgLru():
            return 4 * geometry.num_channels * geometry.block_width
    return 0.0


class Layer(NamedTuple):
    """A geometry on one rank."""

    name: str
    geometry: Any
    tp: int
    state: str

    @property
    def family(self) -> str:
        return type(self.geometry).__name__.removesuffix("Config")

    def build(self) -> Any:
        """One layer, with random weights."""
        context = ModelContext(DTYPE, torch.device(DEVICE), OneRank(self.tp), Backend.TRITON, LayerTable(), 16)
        config: Any = SimpleNamespace(hidden_size=16, rms_norm_eps=1e-6)
        kind = ConvolutionLayer if type(self.geometry) is Convolution else MIXERS[type(self.geometry)]
        layer: Any = kind(self.geometry, config, context, "model.layers.1.mixer")
        for name, module in layer.named_modules():
            if isinstance(module, LinearBase) and name not in PROJECTIONS:
                module.quant_method = UnquantizedLinear(context)
                module.quant_method.create(module)
            for name, parameter in module.named_parameters(recurse=False):
                parameter.data.uniform_(*module.initial_range(name))
        return layer

    def inputs(self, layer: Any, rows: int) -> list[Tensor]:
        """The arguments of ``mix``."""
        columns = layer.width if isinstance(layer, ConvolutionLayer) else layer.in_proj.shard.rows
        projected = torch.randn(rows, columns, device=DEVICE).to(DTYPE)
        if isinstance(self.geometry, Kda):
            width = layer.local.width
            gates = (torch.randn(rows, width, device=DEVICE).to(DTYPE) for _ in range(2))
            return [projected[:, : 3 * width + layer.local.num_heads], *gates]
        return [projected.chunk(2, dim=-1)[1]] if isinstance(self.geometry, RgLru) else [projected]

    def states(self, slots: int) -> dict[str, Tensor]:
        found = {}
        for tensor in self.geometry.layer_spec(16, CacheDtypes(str(DTYPE)[6:], state=self.state)).states:
            shape = [n // self.tp if i == tensor.sharded_dim else n for i, n in enumerate(tensor.shape)]
            empty = torch.empty(slots, *shape, device=DEVICE, dtype=getattr(torch, tensor.dtype))
            found[tensor.name] = empty.normal_()
        return found


def batch_of(case: Case, slots: Tensor) -> Batch:
    """``slots``: of the states of the case's sequences."""
    new, old = [1] * case.decodes + list(case.new), [64] * case.decodes + [case.context] * len(case.new)
    if not case.graph:
        return dataclasses.replace(on_device(make_batch(new, old, num_decodes=case.decodes)), state_slots=slots)
    rows, used = sum(new), sum(-(-n // CHUNK_SIZE) for n in case.new)
    pad_seqs, pad_chunks = GRAPH_SEQS - len(new), chunk_capacity(rows) - used
    batch = on_device(make_batch(new, old, num_decodes=case.decodes, pad_seqs=pad_seqs, pad_chunks=pad_chunks))
    of_all = torch.zeros(2, GRAPH_SEQS, dtype=torch.int32, device=DEVICE)
    of_all[0, : len(new)], of_all[1, : case.decodes] = slots, slots[: case.decodes]
    counts = torch.tensor([rows, len(new), case.decodes], dtype=torch.int32, device=DEVICE)
    chunks = dataclasses.replace(batch.chunk_table, max_seqs=MAX_PREFILLS)
    mixed = MixedBatch(counts, of_all[1], MAX_PREFILLS)
    return dataclasses.replace(
        batch, num_seqs=GRAPH_SEQS, num_decodes=0, state_slots=of_all[0], chunks=chunks, mixed=mixed
    )


def on_device(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to(DEVICE)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.replace(x, **{f.name: on_device(getattr(x, f.name)) for f in dataclasses.fields(x)})
    return x


def run(layer: Any, context: ForwardContext, inputs: list[Tensor]) -> Tensor:
    with forward_context(context):
        return layer.mix(*inputs)


def measure(of: Layer, case: Case, *, compile_only: bool) -> dict[str, Any]:
    """Time one batch, or run it once."""
    rows, count = case.decodes + sum(case.new), case.decodes + len(case.new)
    first = of.build()
    x, state = of.inputs(first, rows), sum(tensor.nbytes for tensor in of.states(1).values())
    moved = sum(p.nbytes for name, p in first.named_parameters() if not name.startswith(PROJECTIONS))
    moved += sum(part.numel() for part in x) * DTYPE.itemsize + state * (2 * count if case.context else count)
    moved += state * case.decodes
    sets = 1 if compile_only or not ON_GPU else max(2, min(64, -(-4 * L2_BYTES // moved)))
    caches, order = of.states(count * sets + 1), torch.randperm(count * sets, device=DEVICE).int() + 1
    calls: list[Callable[[], Tensor]] = []
    for slots in order.split(count):
        layer = of.build() if calls else first
        context = ForwardContext(batch_of(case, slots.contiguous()), {layer.name: caches}, {layer.name: layer})
        calls.append(partial(run, layer, context, of.inputs(layer, rows) if calls else x))
    moved += calls[0]().numel() * DTYPE.itemsize
    flops = matrix_flops(of.geometry) / of.tp * rows if case.new else 0.0
    inner = of.geometry.mamba if isinstance(of.geometry, HeadedMambaConfig) else of.geometry
    exps = inner.num_channels * inner.state_size / of.tp * rows if isinstance(inner, MambaConfig) else 0.0
    floor = max(moved / COPY_BYTES_PER_S, flops / MATRIX_FLOP_PER_S, exps / EXP_PER_S) * 1e6
    if compile_only:
        return {}
    us = graph_ms(calls, repeats=5, least=max(2, min(LEAST_CALLS, int(3000 / floor)))) * 1e3
    return {"us": round(us, 2), "floor_us": round(floor, 2)}


def suite(words: list[str], families: list[str]) -> Iterator[tuple[Layer, list[Case]]]:
    """Layers with their cases. States in half precision are timed in decodes alone: a prefill writes them once."""
    for name, (geometry, sizes) in MODELS.items():
        has_state = any(tensor.name == "recurrent" for tensor in geometry.layer_spec(16, CacheDtypes()).states)
        for tp, state in itertools.product(sizes, ("float32", HALF) if has_state else ("float32",)):
            layer = Layer(name, geometry, tp, state)
            if (not words or any(w in name for w in words)) and (not families or layer.family in families):
                yield layer, [case for case in CASES if state == "float32" or not case.new]


def write(target: Any, rows: list[dict[str, Any]], left: int) -> None:
    """One row to a line."""
    if target is not None:
        head = json.dumps(report.provenance(DEVICE) | {"left_out": left}, indent=1).removesuffix("\n}")
        target.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n")


def main() -> None:
    families = sorted({Layer("", geometry, 1, "").family for geometry, _ in MODELS.values()})
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="*", default=[], choices=families)
    parser.add_argument("--names", nargs="*", default=[], help="words of the models' names; all without")
    parser.add_argument("--compile", nargs=2, type=int, metavar=("I", "N"), help="only run part I of N of the layers")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin no measurement after this time")
    parser.add_argument("--graph", action="store_true", help="only prefills of 512 tokens, eager and as in a graph")
    parser.add_argument("--json")
    args = parser.parse_args()
    target, end, left = report.open_json(args.json), time.monotonic() + args.seconds, 0
    rows: list[dict[str, Any]] = []
    part, parts = args.compile or (0, 1)
    for layer, cases in itertools.islice(suite(args.names, args.families), part, None, parts):
        for case in cases:
            if args.graph and not case.graph and case != Case(0, (512,)):
                continue
            if time.monotonic() > end:
                left += 1
                continue
            row: dict[str, Any] = {"family": layer.family, "model": layer.name, "tp": layer.tp, "state": layer.state}
            row |= {"decodes": case.decodes, "new": case.new[0] if case.new else 0, "sequences": len(case.new)}
            row |= {"context": case.context, "graph": case.graph, "us": 0.0, "floor_us": 0.0}
            try:
                rows.append(row | measure(layer, case, compile_only=args.compile is not None))
            except Exception as failure:  # one case must not cost the others
                rows.append(row | {"error": f"{type(failure).__name__}: {str(failure)[:200]}"})
                print(rows[-1], flush=True)
                if isinstance(failure, ConfigError):  # as every case of this layer
                    break
        if ON_GPU:
            torch.cuda.empty_cache()
        if not args.compile:
            write(target, rows, left)
    if args.compile:
        return
    rows.sort(key=lambda row: row["floor_us"] / row["us"] if row["us"] else 0.0)
    columns = ("family", "model", "TP", "state", "decodes", "prefills", "context", "graph", "us", "floor", "share")
    cells = [
        [row["family"], row["model"], str(row["tp"]), row["state"], str(row["decodes"] or ""),
         f"{row['sequences']} x {row['new']}" if row["new"] else "", str(row["context"] or ""),
         "yes" if row["graph"] else "", f"{row['us']:.1f}", f"{row['floor_us']:.1f}",
         row.get("error", f"{row['floor_us'] / row['us']:.0%}" if row["us"] else "")]
        for row in rows[:60]
    ]  # fmt: skip
    report.table(f"{len(rows)} cases, {left} left out for time; the worst:", columns, cells)


if __name__ == "__main__":
    main()
