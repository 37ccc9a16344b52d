"""Tunes tables of kernels in whole decode steps: candidates of every product, in turn with what is in use.

    python -m benchmarks.step_tuner --model qwen3-0.6b --rows 8 [--seconds 50] [--share 2] --json FILE
    python -m benchmarks.step_tuner --install FILE [FILE ...]

The fastest kernel after a norm is not always the fastest in a step, where kernels start before the previous ones end.
The products are found by running a step: linear layers in bf16 and FP8, and experts. All candidates are compiled first,
in parallel. Then the candidates of each product are captured and replayed, and the best are replayed again in turn with
the step in use. The fastest is taken if it gains more than ``LEAST_GAIN``. A second pass does the same with the other
products' new choices.

``--install`` writes the choices of such files into the tables beside the kernels (experts in bf16 have tiles by rule
instead), on any machine. Without a GPU the model, a small one, is given by its folder, and all takes the same time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from benchmarks.decode_profile import decode_orders, fill_caches, share_of
from benchmarks.kernels import fp8, linear
from benchmarks.kernels.fp8_experts import expert_candidates
from benchmarks.kernels.measure import DEVICE, ON_GPU
from weft.bench import report
from weft.config import resolve
from weft.graph.graph import make_pool
from weft.graph.graph_set import CaptureOptions, FunctionRecorder, GraphSet
from weft.ops.linear import fp8 as fp8_linear
from weft.ops.linear import skinny as skinny_linear
from weft.ops.linear import skinny_choice
from weft.ops.moe import experts as moe
from weft.ops.moe import fp8_experts as fp8_moe
from weft.ops.moe.blocks import Tile, Tiles
from weft.runner.model_runner import ModelRunner
from weft.runner.warmup import compiled_meanwhile, one_layer_of_each_kind

Key = tuple[Any, ...]
"""The key of a product: its kind, then its shape and options."""
Choice = Any
"""A kernel's configuration; None is the matrix library."""

LEAST_GAIN = 0.004
"""A choice is kept if a step takes so much less; the medians of one step differ by half of it."""
CONTEXT = 1088


@dataclass
class Choices:
    """Choices for a step's products. ``in_use`` holds the code's choices, and ``forced`` replaces them where given."""

    in_use: dict[Key, Choice] = field(default_factory=dict)
    forced: dict[Key, Choice] = field(default_factory=dict)

    def wrap(self, choose: Callable[..., Choice], key_of: Callable[..., Key]) -> Callable[..., Choice]:
        def chosen(*args: Any, **kwargs: Any) -> Choice:
            key = key_of(*args, **kwargs)
            if key in self.forced:
                return self.forced[key]
            self.in_use[key] = choose(*args, **kwargs)
            return self.in_use[key]

        return chosen

    @contextmanager
    def forcing(self, choices: Mapping[Key, Choice]) -> Iterator[None]:
        self.forced = dict(choices)
        try:
            yield
        finally:
            self.forced = {}


def _linear_key(x: Tensor, weight: Tensor, silu_mul: bool, *, leaves_sums: bool = False) -> Key:
    return "linear", *weight.shape, silu_mul, leaves_sums


CHOOSERS: list[tuple[ModuleType, str, Callable[..., Key]]] = [
    (skinny_linear, "choose_config", _linear_key),
    (fp8_linear, "choose_config", lambda w, tokens, silu_mul, block: ("fp8 linear", *w.shape, silu_mul, block)),
    (moe, "moe_tiles", lambda pairs, experts, size, width: ("experts", experts, width)),
    (fp8_moe, "choose_config", lambda down, tokens, top_k, block, dtype: ("fp8 experts", *down.shape, block)),
]


def candidates(key: Key, rows: int) -> list[Choice]:
    """Return configurations that may be faster for ``rows`` tokens."""
    kind, *shape = key
    padded = 1 << (rows - 1).bit_length()
    if kind == "linear":
        found = linear.candidates(linear.Size("", *shape[:3]), padded)
        return [c for c in found if c.method != "dot" or _fits(c, padded)] + [None]
    if kind == "fp8 linear":
        height, inner, silu_mul, block = shape
        return list(fp8.candidates(fp8.Size("", height, inner, block, silu_mul), rows))
    if kind == "fp8 experts":
        grouped = [c for c in expert_candidates(rows) if isinstance(c, Tiles) and c.up.rows > 1]
        return [*grouped, *_tiles()]  # one row in a table means pair by pair, in any shape
    return list(_tiles())


def _fits(config: skinny_choice.Config, tokens: int) -> bool:
    """Whether the pipeline's tiles of 16-bit numbers fit in shared memory."""
    return config.stages * config.inner * (config.rows + min(config.tokens, tokens)) * 2 <= 220 << 10


def _tiles() -> Iterator[Tiles]:
    """Yield tiles for experts with few tokens, for which 16 rows are enough."""
    ups = [(32, 4, 4), (32, 4, 3), (32, 4, 6), (64, 4, 4), (64, 4, 3), (16, 2, 6), (32, 2, 4)]
    downs = [(64, 4, 4), (64, 4, 3), (32, 4, 4), (128, 4, 3), (64, 2, 4), (128, 4, 2), (32, 2, 4)]
    for (up, *of_up), (down, *of_down) in product(ups, downs):
        yield Tiles(Tile(16, up, 128, *of_up), Tile(16, down, 128, *of_down))


def descend(
    in_use: Mapping[Key, Choice],
    candidates: Mapping[Key, list[Choice]],
    timed: Callable[[Mapping[Key, Choice], list[Mapping[Key, Choice]], bool], list[float]],
    passes: int = 2,
) -> tuple[dict[Key, Choice], list[dict[str, Any]]]:
    """The best choices, one product after the other, and what was measured.

    Args:
        timed: ``timed(reference, variants, carefully)``: each variant's share of the reference's time; infinite if it
            does not run.
    """
    current, log = dict(in_use), []
    promising = {key: list(dict.fromkeys(c for c in candidates[key] if c != in_use[key])) for key in in_use}
    for number in range(passes):
        before = dict(current)
        for key in in_use:
            others = [c for c in dict.fromkeys([*promising[key], in_use[key]]) if c != before[key]]
            shares = timed(before, [before | {key: c} for c in others], False)
            ranked = sorted(zip(shares, range(len(others)), strict=True))
            promising[key] = [others[i] for share, i in ranked if share < 1.02]
            best = [others[i] for _, i in ranked[:4]]
            again = timed(before, [before | {key: c} for c in best], True)
            log.append(
                {
                    "pass": number,
                    "product": key,
                    "in use": before[key],
                    "shares": [(others[i], round(share, 4)) for share, i in ranked],
                    "again": list(zip(best, again, strict=True)),
                }
            )
            if again and min(again) < 1 - LEAST_GAIN:
                current[key] = best[again.index(min(again))]
    return current, log


class StepTimer:
    """Captured decode steps of one number of rows, by what their products run."""

    def __init__(self, runner: ModelRunner, choices: Choices, rows: int, until: float) -> None:
        self.runner, self.choices, self.rows, self.until = runner, choices, rows, until
        self._options = CaptureOptions(runner.device, show_progress=False)
        self._pool = make_pool(runner.device)
        self.context = CONTEXT if ON_GPU else 8
        self._orders = decode_orders(runner, rows, self.context)
        fill_caches(runner)
        self._first = self.step({})  # holds the pool, which ends with its last graph

    @torch.inference_mode()
    def step(self, choices: Mapping[Key, Choice]) -> GraphSet[Any]:
        functions = self.runner.steps.functions
        with self.choices.forcing(choices):
            functions.builder.send_padding(functions.decode_shape(self.rows))
            recorder = FunctionRecorder(functions.decode, self._pool)
            graphs = GraphSet("steps", recorder, [self.rows], self._options, None)
        self.runner.run(self._orders)  # the rows have their contexts again
        return graphs

    @torch.inference_mode()
    def ms(self, graphs: GraphSet[Any], count: int) -> float:
        if not ON_GPU:
            graphs.replay(self.rows, self.rows)
            return 1.0
        pairs = []
        for _ in range(count):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs.replay(self.rows, self.rows)
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return median([start.elapsed_time(end) for start, end in pairs][2:])

    @torch.inference_mode()
    def error(self, before: GraphSet[Any], after: GraphSet[Any]) -> float:
        """How far the logits are apart: sums in another order, which also choose a few other experts."""
        logits = []
        for graphs in (before, after):
            torch.manual_seed(0)
            fill_caches(self.runner)  # a step changes recurrent states
            self.runner.run(self._orders)
            logits.append(graphs.replay(self.rows, self.rows).logits.double())
        return float((logits[1] - logits[0]).norm() / logits[0].norm())

    def shares(
        self, reference: Mapping[Key, Choice], variants: list[Mapping[Key, Choice]], carefully: bool
    ) -> list[float]:
        base, turns, count = self.step(reference), 5 if carefully else 1, 20 if carefully else 12
        found = []
        for variant in variants:
            if time.monotonic() > self.until:
                found.append(float("inf"))
                continue
            try:
                graphs = self.step(variant)
            except Exception as problem:  # a tile may not fit in shared memory
                print(f"{type(problem).__name__} {str(problem)[:100]}", flush=True)
                found.append(float("inf"))
                continue
            found.append(median([self.ms(graphs, count) / self.ms(base, count) for _ in range(turns)]))
        return found

    @torch.inference_mode()
    def compile_all(self, in_use: Mapping[Key, Choice], found: Mapping[Key, list[Choice]]) -> None:
        """All candidates, in parallel."""
        functions = self.runner.steps.functions

        def walk() -> None:
            functions.builder.send_padding(functions.decode_shape(self.rows))
            with one_layer_of_each_kind(self.runner.model.model):
                for key in in_use:
                    for choice in found[key]:
                        with self.choices.forcing({**in_use, key: choice}):
                            functions.decode(self.rows)

        try:
            if ON_GPU:
                with compiled_meanwhile(walk, self.runner.device):
                    pass
        except Exception as problem:  # fails again, and visibly, when it is captured
            print(f"{type(problem).__name__} {str(problem)[:100]}", flush=True)


def _table_row(key: Key, choice: Choice, rows: int) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return the path of the table beside the kernels, the key of the row, and the values of the row for a choice."""
    kind, *shape = key
    padded = 1 << (rows - 1).bit_length()
    if kind == "linear":
        place = dict(zip(("rows", "inner", "silu_mul", "tokens"), (*shape[:3], padded), strict=True))
        place |= {"leaves_sums": True} if shape[3] else {}
        return skinny_choice.TABLE_PATH, place, {"config": choice and list(choice)}
    if kind == "fp8 linear":
        place = dict(zip(("rows", "inner", "silu_mul", "block", "tokens"), (*shape, padded), strict=True))
        name = next(name for name, kind in fp8_linear.KINDS.items() if type(choice) is kind)
        return fp8_linear.TABLE_PATH, place, {"kind": name, "config": list(choice)}
    assert kind == "fp8 experts" and isinstance(choice, Tiles), f"no table has a row for {key}: {choice}"
    place = dict(zip(("experts", "hidden", "width", "block", "tokens"), (*shape, padded), strict=True))
    return fp8_moe.TABLE_PATH, place, {"up": list(choice.up[:5]), "down": list(choice.down[:5])}


def _is_for_more(row: Mapping[str, Any], place: Mapping[str, Any]) -> bool:
    """Whether a row is for the same experts, and more tokens."""
    return row["tokens"] > place["tokens"] and all(row[k] == v for k, v in place.items() if k != "tokens")


def read_choices(found: Mapping[str, Any]) -> dict[Key, Choice]:
    """Read the choices that ``main`` wrote as ``changed``. Kinds of FP8 products differ in their number of fields."""
    of_fp8 = {len(kind._fields): kind for kind in fp8_linear.KINDS.values()}

    def choice_of(kind: str, says: list[Any] | None) -> Choice:
        if says is None or kind == "linear":
            return says and skinny_choice.Config(*says)
        if kind == "fp8 linear":
            return of_fp8[len(says)](*says)
        return Tiles(*(Tile(*tile) for tile in says))

    return {tuple(key): choice_of(key[0], says) for key, says in found["changed"]}


def install(changed: Mapping[Key, Choice], rows: int) -> None:
    """Write choices into the tables beside the kernels."""
    for key, choice in changed.items():
        if key[0] == "experts":
            print(f"no table has {key}: {choice}")
            continue
        path, place, says = _table_row(key, choice, rows)
        table = json.loads(path.read_text())
        if key[0] == "fp8 experts" and not any(_is_for_more(row, place) for row in table["rows"]):
            print(f"not written, since prefill would use it too: {key}: {choice}")
            continue
        names = {*place, "leaves_sums"}
        kept = [row for row in table["rows"] if {k: v for k, v in row.items() if k in names} != place]
        head = json.dumps({name: value for name, value in table.items() if name != "rows"})[:-1]
        path.write_text(head + ', "rows": [\n' + ",\n".join(map(json.dumps, [*kept, place | says])) + "\n]}\n")


def tune(model: str, rows: int, seconds: float, settings: Mapping[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    choices = Choices()
    with ExitStack() as patched:
        for module, name, key_of in CHOOSERS:
            patched.enter_context(mock.patch.object(module, name, choices.wrap(getattr(module, name), key_of)))
        config = resolve(
            model=model, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=rows, cuda_graph_bs=[rows],
            cuda_graph_mode="FULL_DECODE_ONLY", enable_prefix_caching=False, device=DEVICE,
            **{"max_model_len": 2304, "max_num_batched_tokens": 2048, **settings},
        )  # fmt: skip
        runner = ModelRunner(config)
        choices.in_use.clear()  # of the steps of a start
        timer = StepTimer(runner, choices, rows, began + seconds)
        in_use = dict(choices.in_use)
        found = {key: candidates(key, rows) for key in in_use}
        print(f"{sum(map(len, found.values()))} candidates of {len(in_use)} products", flush=True)
        timer.compile_all(in_use, found)
        best, log = descend(in_use, found, timer.shares)
        steps = [timer.step(chosen) for chosen in (in_use, best)]
        turns = [[timer.ms(step, 25) for step in steps] for _ in range(10)]
    before, after = (median(column) for column in zip(*turns, strict=True))
    changed = {key: best[key] for key in best if best[key] != in_use[key]}
    error = timer.error(*steps)
    print(f"{model} {rows}: {before:.4f} ms, now {after:.4f} ms, error {error:.1e}", *changed.items(), sep="\n  ")
    figures = {"before_ms": before, "after_ms": after, "turns_ms": turns, "error": error}
    return report.provenance(DEVICE) | {
        "config": report.settings(config), "rows": rows, "context": timer.context, **figures, "changed": changed,
        "measured": log,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", type=Path, nargs="+", metavar="FILE", help="write their choices into the tables")
    parser.add_argument("--model", help="one of benchmarks/configs")
    parser.add_argument("--rows", type=int, help="sequences of the step")
    parser.add_argument("--seconds", type=float, default=50, help="no candidate is begun after them")
    parser.add_argument("--settings", default="{}", help="JSON of further engine settings")
    parser.add_argument("--share", type=int, default=1, metavar="RANKS", help="one rank's share of the model")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.install:
        for file in args.install:
            found = json.loads(file.read_text())
            install(read_choices(found), found["rows"])
        return
    if not (args.model and args.rows and args.json):
        parser.error("to tune needs --model, --rows and --json; to write what was chosen, --install")
    with tempfile.TemporaryDirectory() as folder:
        model = str(share_of(args.model, args.share, Path(folder)))
        found = tune(model, args.rows, args.seconds, json.loads(args.settings))
    changed = found.pop("changed")
    found["changed"] = [[key, choice] for key, choice in changed.items()]
    args.json.write_text(json.dumps(found | {"model": args.model, "share_of_ranks": args.share}, indent=1, default=str))


if __name__ == "__main__":
    main()
