"""All-reduce with residual addition and RMSNorm: the fused kernel beside NCCL and a norm, checked, then timed.

Usage: ``python -m benchmarks.kernels.all_reduce [--ranks 2] [--replays 10000] [--json FILE]``. One process per GPU.

For every number of rows the result is checked against float64, and all ranks must hold the same bits. For a few
numbers, a graph is replayed ``--replays`` times. Every 100 replays get fresh inputs and outputs filled with NaN, and
the last of them must give what the first gave. Timed: a graph of 20 calls. Without GPUs it rehearses on gloo, without
the fused kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels.measure import ON_GPU, error, graph_ms
from weft.bench import report
from weft.ops.backend import Backend
from weft.ops.collectives.packed import packed_all_reduce_rms_norm
from weft.ops.collectives.peer_buffers import MAX_PROGRAMS, PeerBuffers, buffer_bytes, make_counters
from weft.ops.collectives.signalled import all_reduce_rms_norm_triton
from weft.ops.norm import rms_norm
from weft.parallel.process_group import ProcessGroup

WIDTH = 2048 if ON_GPU else 64
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if ON_GPU else (1, 3)
LIMIT = 8e-3 if ON_GPU else 2e-6
"""Relative error against float64: two roundings to bfloat16 for NCCL's sum, one for the fused kernel's."""
EPS, CHAIN = 1e-6, 20


class Rank:
    """One process."""

    def __init__(self, rank: int, size: int, store: str) -> None:
        self.rank, self.size = rank, size
        self.device = torch.device("cuda", rank) if ON_GPU else torch.device("cpu")
        if ON_GPU:
            torch.cuda.set_device(self.device)
        self.backend = Backend.TRITON if ON_GPU else Backend.TORCH
        self.group = ProcessGroup(rank, size, self.device, dist.FileStore(store, size))
        self.peers: PeerBuffers | None = None
        addresses = self.group.peer_memory(buffer_bytes(size, WIDTH, DTYPE, max(SIZES)))
        if addresses is not None:
            self.peers = PeerBuffers(addresses, make_counters(self.device), rank, size, WIDTH, max(SIZES))

    def inputs(self, rows: int, seed: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """``x`` of every rank, residual, weight: the same numbers on every rank."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shapes = [(rows, WIDTH)] * (self.size + 1) + [(WIDTH,)]
        *xs, residual, weight = (torch.randn(s, generator=generator, device=self.device).to(DTYPE) for s in shapes)
        return xs, residual, weight

    def fused(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """With a barrier, however few the rows."""
        assert self.peers is not None
        return all_reduce_rms_norm_triton(x, residual, weight, EPS, self.peers, zero_centered=True)

    def packed(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """By packets, also where the barrier is chosen."""
        assert self.peers is not None and x.shape[0] <= MAX_PROGRAMS
        return packed_all_reduce_rms_norm(x, residual, weight, EPS, self.peers, zero_centered=True)

    def plain(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Sums into ``x``."""
        total = self.group.all_reduce(x)
        return rms_norm(total, weight, EPS, zero_centered=True, residual=residual, backend=self.backend)

    def check(self, rows: int, kind: str) -> float:
        """The error of the result; raises if ranks disagree."""
        xs, residual, weight = self.inputs(rows, rows)
        y, total = getattr(self, kind)(xs[self.rank].clone(), residual, weight)
        want_total = torch.stack([x.double() for x in xs]).sum(0) + residual.double()
        scale = (1 + weight.double()) / (want_total.square().mean(-1, keepdim=True) + EPS).sqrt()
        worst = max(error(y, want_total * scale), error(total, want_total))
        gathered = self.group.all_gather(torch.cat([y, total]).unsqueeze(-1))
        assert all(torch.equal(gathered[..., 0], gathered[..., r]) for r in range(self.size)), "ranks disagree"
        assert worst < LIMIT, f"{kind} at {rows} rows is {worst:.2e} from float64"
        return worst

    def milliseconds(self, rows: int, kind: str) -> float:
        xs, residual, weight = self.inputs(rows, 1)
        return graph_ms([lambda: getattr(self, kind)(xs[self.rank], residual, weight)] * CHAIN)

    def replay(self, rows: int, kind: str, replays: int) -> int:
        """Replays of a graph of 8 exchanges under poison. Returns how many."""
        xs, residual, weight = self.inputs(rows, 5)
        x, outputs = xs[self.rank].clone(), []
        reduce = getattr(self, kind)
        reduce(x, residual, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = [reduce(x, residual, weight) for _ in range(8)]
        for number in range(replays):
            fresh = number % 100 == 0
            if fresh:
                xs, _, _ = self.inputs(rows, number)
                x.copy_(xs[self.rank])
                for y, total in outputs:
                    y.fill_(torch.nan)
                    total.fill_(torch.nan)
            graph.replay()
            if fresh:
                want = torch.stack([v.double() for v in xs]).sum(0) + residual.double()
                first = [t.clone() for t in outputs[0]]
                assert all(error(total, want) < LIMIT for _, total in outputs)
            if number % 100 == 99:
                pairs = [(a, b) for out in outputs for a, b in zip(out, first, strict=True)]
                assert all(torch.equal(a, b) for a, b in pairs), f"replay {number} differs"
        return replays


def run_rank(rank: int, size: int, store: str, replays: int, time_it: bool) -> dict[str, Any]:
    me = Rank(rank, size, store)
    kinds = ("packed", "fused", "plain") if me.peers is not None else ("plain",)
    rows: list[dict[str, Any]] = []
    for count in SIZES:
        row: dict[str, Any] = {"rows": count, "kib": count * WIDTH * DTYPE.itemsize / 1024}
        for kind in (kind for kind in kinds if kind != "packed" or count <= MAX_PROGRAMS):
            row[f"{kind}_error"] = me.check(count, kind)
            if time_it:
                row[f"{kind}_us"] = round(me.milliseconds(count, kind) * 1e3, 2)
        rows.append(row)
    replayed = {}
    for kind, count in [("packed", 1), ("packed", 7), ("packed", 128), ("fused", 1), ("fused", 130), ("fused", 1300)]:
        if me.peers is not None:
            replayed[f"{kind} {count}"] = me.replay(count, kind, replays)
    me.group.least(0)
    return {"ranks": size, "width": WIDTH, "dtype": str(DTYPE), "rows": rows, "replays": replayed}


def launch(size: int, replays: int, time_it: bool = True, timeout_s: float = 120.0) -> dict[str, Any]:
    """Run all ranks in processes; what rank 0 found. Raises if one fails or they do not end in time."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", __spec__.name, "--store", f"{folder}/store", "--ranks", str(size)]
        command += ["--replays", str(replays), "--json", f"{folder}/found", *([] if time_it else ["--check"])]
        processes = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
        try:
            assert all(process.wait(timeout_s) == 0 for process in processes), "a rank failed"
        finally:
            for process in processes:
                process.kill()
        return json.loads(Path(f"{folder}/found").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replays", type=int, default=10_000)
    parser.add_argument("--json")
    parser.add_argument("--check", action="store_true", help="do not time")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        found = run_rank(args.rank, args.ranks, args.store, args.replays, not args.check)
        if args.rank == 0:
            Path(args.json).write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # a communicator that is torn down at exit may wait for the others
    found = launch(args.ranks, args.replays, not args.check)
    for row in found["rows"]:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if args.json:
        Path(args.json).write_text(json.dumps(report.provenance("cuda" if ON_GPU else "cpu") | found, indent=1))


if __name__ == "__main__":
    main()
