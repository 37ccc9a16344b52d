"""Profile a step that verifies drafts on a GPU, compared with a decode step of the same engine.

    python benchmarks/verify_profile.py --json FILE [--model qwen3-next-12l] [--batches 1 8 32] [--drafts 2]
                                        [--methods ngram mtp] [--references]

Weights are dummies, caches are random. The figures for each method and batch size:

- median device milliseconds of one replay of the decode graph and of the verification graph;
- the kernels of both graphs by name, with launches;
- the time that the verification spends beyond the decode, by kernel, largest first;
- the memory floor of both graphs (``weft/bench/roofline.py``) at the ceilings of the device.

The host has no part in the times. ``--references`` measures again with torch's operations around the forward pass
(``weft/ops/drafts``), as ``mtp references`` and ``ngram references``, in the same process.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.decode_profile import CONFIGS, decode_orders, fill_caches, graph_ms, kernels_us
from weft.bench import report
from weft.bench.roofline import Roofline, ceilings_of
from weft.config import resolve
from weft.graph.dispatcher import smallest_fitting
from weft.messages import ScheduledRequest, SchedulerOutput
from weft.models import mtp
from weft.ops.backend import Backend
from weft.runner.drafting import step_drafts
from weft.runner.model_runner import ModelRunner

CONTEXT = 576


def verify_orders(runner: ModelRunner, batch: int, num_drafts: int) -> SchedulerOutput:
    """A step of ``batch`` requests with ``CONTEXT`` tokens each that verify drafts, on pages and slots of their own."""
    decodes = decode_orders(runner, batch, CONTEXT + num_drafts)
    requests = []
    for r, decode in enumerate(decodes.requests):
        slots = range(1 + r * (num_drafts + 1), (r + 1) * (num_drafts + 1))
        states = [(CONTEXT + 1 + i, slot) for i, slot in enumerate(slots)]
        drafts = [(7 * r + 11 * i) % 1000 for i in range(num_drafts)]
        working = (r + 1) * (num_drafts + 1)
        requests.append(
            ScheduledRequest(
                r, CONTEXT, 1 + num_drafts, decode.new_pages, working, True, states, draft_token_ids=drafts
            )
        )
    return SchedulerOutput(1, requests, decodes.new_requests)


def beyond(verify: list[dict[str, Any]], decode: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By kernel, what the first adds beyond the second, in microseconds and launches."""
    before = {row["kernel"]: row for row in decode}
    rows = []
    for name in {row["kernel"] for row in verify} | set(before):
        now = next((row for row in verify if row["kernel"] == name), {"adds": 0.0, "launches": 0.0})
        then = before.get(name, {"adds": 0.0, "launches": 0.0})
        more = {"adds": round(now["adds"] - then["adds"], 1), "launches": round(now["launches"] - then["launches"], 1)}
        rows.append({"kernel": name} | more)
    return sorted(rows, key=lambda row: -row["adds"])


@torch.inference_mode()
def profile(runner: ModelRunner, batch: int, num_drafts: int, bytes_per_s: float | None) -> dict[str, Any]:
    """Both kinds of step at one batch size."""
    found: dict[str, Any] = {"batch": batch}
    work = Roofline.of(runner.config)
    kinds = (
        ("decode", decode_orders(runner, batch, CONTEXT), runner.graphs.decode, 0),
        ("verify", verify_orders(runner, batch, num_drafts), runner.graphs.verification, num_drafts),
    )
    for name, orders, graphs, count in kinds:
        output = runner.run(orders)
        assert graphs is not None and output.mode == "FULL", f"the step ran as {output.mode}"
        size = smallest_fitting(graphs.sizes, batch)
        assert size is not None
        replay = partial(graphs.replay, size, batch)
        kernels = kernels_us(replay)
        floor = work.decode(batch, CONTEXT, count).num_bytes
        found[name] = {
            "replay_ms": round(graph_ms(replay), 3),
            "kernels_ms": round(sum(row["adds"] for row in kernels) / 1e3, 3),
            "launches": round(sum(row["launches"] for row in kernels)),
            "floor_ms": round(1e3 * floor / bytes_per_s, 3) if bytes_per_s else None,
            "kernels": kernels,
        }
    found["ratio"] = round(found["verify"]["replay_ms"] / found["decode"]["replay_ms"], 3)
    found["beyond"] = beyond(found["verify"]["kernels"], found["decode"]["kernels"])
    return found


@contextmanager
def references() -> Iterator[None]:
    """In the body, verifications and drafts are moved, accepted and placed by torch's operations."""
    rooms = ((step_drafts, "follow_step"), (step_drafts, "accept_drafts"), (mtp, "places_ahead"))
    before = [getattr(room, name) for room, name in rooms]
    for (room, name), operation in zip(rooms, before, strict=True):

        def by_torch(*args: Any, operation: Any = operation, backend: Backend) -> Any:
            return operation(*args, backend=Backend.TORCH)

        setattr(room, name, by_torch)
    try:
        yield
    finally:
        for (room, name), operation in zip(rooms, before, strict=True):
            setattr(room, name, operation)


def profiles(args: argparse.Namespace, method: str, bytes_per_s: float | None) -> list[dict[str, Any]]:
    """All batch sizes of one method."""
    config = resolve(
        model=str(CONFIGS / args.model), load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
        max_num_seqs=max(args.batches), device=args.device, enable_prefix_caching=False,
        speculative_config={
            "method": method, "num_speculative_tokens": args.drafts, "synthetic_acceptance_rate": 0.8,
        },
    )  # fmt: skip
    gc.collect()  # what an earlier runner holds goes first
    runner = ModelRunner(config)
    fill_caches(runner)
    return [profile(runner, batch, args.drafts, bytes_per_s) for batch in args.batches]


def show(name: str, row: dict[str, Any]) -> None:
    print(name, {key: value for key, value in row.items() if key not in ("decode", "verify", "beyond")})
    for kind in ("decode", "verify"):
        print("  ", kind, {key: value for key, value in row[kind].items() if key != "kernels"})
    for more in row["beyond"][:16]:
        print(f"   {more['adds']:9.1f} us {more['launches']:6.1f}  {more['kernel']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="a step that verifies drafts beside a decode step, kernel by kernel")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", default="qwen3-next-12l")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=2)
    parser.add_argument("--methods", nargs="+", choices=("ngram", "mtp"), default=["ngram", "mtp"])
    parser.add_argument("--references", action="store_true")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    ceilings = ceilings_of(args.device)
    result: dict[str, Any] = {**report.provenance(args.device), "drafts": args.drafts, "context": CONTEXT}
    peak = ceilings.bytes_per_s if ceilings is not None else None
    for method in args.methods:
        for name, around in ((method, nullcontext), (f"{method} references", references))[: 1 + args.references]:
            with around():
                result[name] = profiles(args, method, peak)
            for row in result[name]:
                show(name, row)
            report.write_json(args.json, result)


if __name__ == "__main__":
    main()
