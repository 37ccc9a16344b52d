"""Where the time of a decode step goes on a GPU: graph replay time per batch size, and the kernels inside.

    python benchmarks/decode_profile.py --model qwen3-0.6b --batches 1 32 256 --json FILE

Contexts are of one length, or of one for each batch size. The caches hold random numbers. ``--share 2`` profiles what
one of two ranks computes, alone: heads, widths and vocabulary are divided, and there are no sums over ranks.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from array import array
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from weft.bench import report
from weft.config import resolve
from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.ops.fp8 import E4M3
from weft.runner.model_runner import ModelRunner

CONFIGS = Path(__file__).parent / "configs"


def decode_orders(runner: ModelRunner, batch: int, context: int) -> SchedulerOutput:
    """A decode step of ``batch`` requests with ``context`` tokens each, on pages and slots of their own."""
    pages = runner.spec.pages_for(context + 1)
    rng = random.Random(batch)  # equal tokens would choose the same experts

    def prompt() -> list[int]:
        return [rng.randrange(runner.config.model_config.vocab_size) for _ in range(context + 1)]

    new = [NewRequest(r, array("I", prompt()), context + 1, RowSampling(temperature=0.0)) for r in range(batch)]
    orders = [
        ScheduledRequest(r, context, 1, list(range(1 + r * pages, 1 + (r + 1) * pages)), r + 1, True)
        for r in range(batch)
    ]
    return SchedulerOutput(1, orders, new)


def padded_size(runner: ModelRunner, batch: int) -> int:
    """The captured size that the batch runs in."""
    assert runner.graphs.decode is not None
    return next(size for size in runner.graphs.decode.sizes if size >= batch)


def graph_ms(replay: Callable[[], Any], repeats: int = 30) -> float:
    """Median device milliseconds of one replay, after a fifth of a second of them: an idle device lowers its clocks."""
    until = time.perf_counter() + 0.2
    while time.perf_counter() < until:
        replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def kernels_us(replay: Callable[[], Any], replays: int = 5) -> list[dict[str, Any]]:
    """``by_kernel`` of some replays."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(replays):
            replay()
        torch.cuda.synchronize()
    on_device = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return by_kernel([(e.time_range.start, e.time_range.end, e.name[:160]) for e in on_device], replays)


def by_kernel(launched: list[tuple[float, float, str]], replays: int) -> list[dict[str, Any]]:
    """What launches take, given as start and end in microseconds and name, per replay by name.

    Returns:
        Rows of ``kernel``, ``us``, ``launches`` and ``adds``, largest first. ``adds`` counts the microseconds in which
        no kernel that started before still runs. A kernel that is launched early waits for such kernels.
    """
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    reached = float("-inf")
    for start, end, name in sorted(launched):
        for place, value in enumerate((end - start, 1, max(0.0, end - max(start, reached)))):
            totals[name][place] += value / replays
        reached = max(reached, end)
    rows = [
        {"kernel": name, "us": round(us, 1), "launches": round(count, 1), "adds": round(adds, 1)}
        for name, (us, count, adds) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row["adds"])


def fill_caches(runner: ModelRunner) -> None:
    for cache in runner.caches.values():
        for tensor in cache.values():
            if tensor.dtype is E4M3:
                tensor.view(torch.uint8).random_(0, 0x48)  # 0 to 4
            else:
                tensor.normal_()


def profile_decode(
    runner: ModelRunner, model: str, batches: list[int], contexts: list[int], top: int = 14
) -> dict[int, Any]:
    """Replay time and kernels of a decode step, by batch size; printed as well."""
    result: dict[int, Any] = {}
    fill_caches(runner)
    for batch, context in zip(batches, contexts if len(contexts) > 1 else contexts * len(batches), strict=True):
        runner.run(decode_orders(runner, batch, context))
        size = padded_size(runner, batch)
        graphs = runner.graphs.decode
        assert graphs is not None
        run = partial(graphs.replay, size, batch)
        replay, kernels = graph_ms(run), kernels_us(run)
        result[batch] = {"context": context, "replay_ms": replay, "kernels": kernels}
        busy, launches = sum(k["adds"] for k in kernels) / 1e3, sum(k["launches"] for k in kernels)
        print(f"{model} batch {batch}: replay {replay:.3f} ms, kernels {busy:.3f} ms in {launches:.0f} launches")
        for row in kernels[:top]:
            print(f"   {row['adds']:9.1f} us {row['launches']:6.1f}  {row['kernel']}")
    return result


SHARED = (
    "num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads", "intermediate_size",
    "moe_intermediate_size", "shared_expert_intermediate_size", "vocab_size",
)  # fmt: skip


def share_of(model: str, ranks: int, folder: Path) -> Path:
    """A config with one rank's share of everything that ranks split."""
    config = json.loads((CONFIGS / model / "config.json").read_text())
    config |= {name: max(1, config[name] // ranks) for name in SHARED if name in config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--context", type=int, nargs="+", default=[1088])
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--share", type=int, default=1, metavar="RANKS")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    base = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 16384,
        "max_num_seqs": 256,
        "device": "cuda",
    }
    with tempfile.TemporaryDirectory() as folder:
        model = share_of(args.model, args.share, Path(folder))
        config = resolve(model=str(model), **(base | json.loads(args.settings)))
        runner = ModelRunner(config)
    result: dict[str, Any] = {
        "benchmark": "decode_profile",
        **report.provenance("cuda"),
        "model": args.model,
        "share_of_ranks": args.share,
        "config": report.settings(config),
        "batches": profile_decode(runner, args.model, args.batches, args.context),
    }
    Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
