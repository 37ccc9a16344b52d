"""Several processes on one GPU at a time: ``python -m tests.gpu.shared_device --engines 3 --seconds 10 --json FILE``.

Job: let processes do the same work side by side, one kind of work after the other. Say which of them failed, stopped
answering, or got other results than before. Owns: the kinds. Does not know: what a right result is.

``attention`` is Hopper's prefill attention alone, ``before`` the same with a barrier that nobody uses, as it once had
one, and ``library`` products and attention of torch. Engines have dummy weights and random prompts. The exit status is
1 if a process failed, unless it ran ``before``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.dummy_engine import CONFIGS
from weft import LLM, SamplingParams
from weft.bench import report
from weft.forward_context import Batch
from weft.ops.attention import AttentionCall, prefill_hopper

Turn = Callable[[], tuple[int, int]]
"""Works for a moment: how many launches, or prompts of an engine, and how many had another result than before."""

ANCHOR = "    barriers = (k_ready,"
UNUSED = """    if not SHARED:
        unused = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(unused.index(0), count=1)
"""
START_SECONDS = 120.0
"""How long a start may take beside others."""
LATE_SECONDS = 6.0
"""How long after its time a process may answer."""


def with_unused_barrier() -> ModuleType:
    """``prefill_hopper`` with a barrier that nobody uses."""
    source = Path(prefill_hopper.__file__).read_text()
    assert ANCHOR in source
    path = Path(tempfile.mkdtemp()) / "prefill_before.py"
    path.write_text(source.replace(ANCHOR, UNUSED + ANCHOR))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def attention(module: ModuleType, length: int) -> Callable[[], Tensor]:
    """Prefill of one prompt of Qwen3-0.6B over pages in random order."""
    page_size, num_pages = 16, 3000
    num_used = -(-length // page_size)
    q = torch.randn(length, 16, 128, dtype=torch.bfloat16, device="cuda")
    k_cache, v_cache = (torch.randn(num_pages, page_size, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    pages = torch.randperm(num_pages - 1, device="cuda")[None, :num_used].int() + 1
    positions = torch.arange(length, device="cuda")
    ends = torch.tensor([0, length], dtype=torch.int32, device="cuda")
    batch = Batch(
        num_tokens=length, num_seqs=1, num_decodes=0, max_query_len=length, max_seq_len=length, positions=positions,
        slot_mapping=positions, cu_seqlens_q=ends, seq_lens=ends[1:], page_table=pages, state_slots=ends[1:],
    )  # fmt: skip

    def run() -> Tensor:
        out = torch.empty_like(q)
        call = AttentionCall(q, k_cache, v_cache, batch, 128**-0.5, out)
        module.launch_prefill_hopper(call, skip_decodes=False)
        return out

    return run


def library() -> list[Callable[[], Tensor]]:
    x, y = (torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda") for _ in "xy")
    q, k, v = (torch.randn(1, 16, 8192, 128, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda: x @ y.T, lambda: attend(q, k, v, is_causal=True)]


KINDS: dict[str, Callable[[], list[Callable[[], Tensor]]]] = {
    "before": lambda: [attention(with_unused_barrier(), length) for length in (8192, 6144, 3333)],
    "attention": lambda: [attention(prefill_hopper, length) for length in (8192, 6144, 3333)],
    "library": library,
}


def kernels(kind: str) -> Turn:
    torch.manual_seed(0)
    runs = KINDS[kind]()
    wanted = [run() for run in runs]
    assert all(bool(torch.isfinite(x).all()) for x in wanted)

    def turn() -> tuple[int, int]:
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(16):
            for run, want in zip(runs, wanted, strict=True):
                different += (run() != want).any()
        return 16 * len(runs), int(different)

    return turn


def engine(args: argparse.Namespace) -> Turn:
    """Prefill of prompts of random lengths, many of them again and again."""
    least, most = args.lengths
    llm = LLM(
        str(CONFIGS / args.model), load_format="dummy", skip_tokenizer_init=True, max_model_len=most + 16,
        max_num_batched_tokens=most, max_num_seqs=4, num_kv_pages=3000, enable_prefix_caching=False,
        **({"enforce_eager": True} if args.eager else {}),
    )  # fmt: skip
    rng, params = random.Random(0), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    vocab_size = llm.config.model_config.vocab_size
    known: dict[tuple[int, int], int] = {}

    def turn() -> tuple[int, int]:
        length = rng.choice([most // 2, most * 3 // 4, most, rng.randint(least, most)])
        seed = rng.randrange(4)
        tokens = random.Random(seed * 100_000 + length)
        prompt = {"prompt_token_ids": [tokens.randrange(vocab_size) for _ in range(length)]}
        output = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids[0]
        return 1, int(known.setdefault((length, seed), output) != output)

    turn()
    return turn


def work(args: argparse.Namespace) -> None:
    """Prepare, say so, wait for a line, and run."""
    launches, different, failure = 0, 0, None
    try:
        turn = engine(args) if args.work == "engine" else kernels(args.work)
        print("ready", flush=True)
        sys.stdin.readline()
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            more, others = turn()
            launches, different = launches + more, different + others
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    print("result", json.dumps(outcome(launches, different, failure)), flush=True)
    os._exit(0)  # a device that failed may not let Python end


def outcome(launches: int | None, different: int | None, failure: str | None) -> dict[str, Any]:
    """This is what a process reports. ``launches`` are those that ended."""
    return {"launches": launches, "different": different, "failure": failure}


class Worker:
    """A process that works on a kind."""

    def __init__(self, command: list[str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(command, cwd=root, text=True, bufsize=1, **pipes)
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        last = ""
        for line in self.process.stdout:
            last = line.strip() or last
            if line.startswith("ready"):
                self._news.put({})
            elif line.startswith("result"):
                self._news.put(json.loads(line.removeprefix("result")))
        self._news.put(outcome(None, None, f"ended with status {self.process.wait()}: {last}"))

    def news(self, end: float) -> dict[str, Any]:
        """Wait until ``end`` for the outcome of the process. Return nothing if the process is ready."""
        try:
            return self._news.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return outcome(None, None, "stopped answering")

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=KINDS, help="kernels; default: all")
    parser.add_argument("--processes", type=int, default=3, help="of each kind of kernel")
    parser.add_argument("--engines", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind, after all starts")
    parser.add_argument("--model", default="qwen3-0.6b", help="one of benchmarks/configs, or a folder")
    parser.add_argument("--lengths", type=int, nargs=2, default=[3100, 8192], metavar=("LEAST", "MOST"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--work", choices=[*KINDS, "engine"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args)
    target = report.open_json(args.json)
    command = [sys.executable, "-m", "tests.gpu.shared_device", *sys.argv[1:], "--work"]
    counts = dict.fromkeys(args.kinds, args.processes) | ({"engine": args.engines} if args.engines else {})
    began = time.monotonic()
    groups = {kind: [Worker([*command, kind]) for _ in range(count)] for kind, count in counts.items()}
    starts = {kind: [worker.news(began + START_SECONDS) for worker in workers] for kind, workers in groups.items()}
    found: dict[str, list[dict[str, Any]]] = {}
    for kind, workers in groups.items():
        for worker, start in zip(workers, starts[kind], strict=True):
            if not start:
                worker.go()
        end = time.monotonic() + args.seconds + LATE_SECONDS
        found[kind] = [start or worker.news(end) for worker, start in zip(workers, starts[kind], strict=True)]
        for worker in workers:
            worker.process.kill()
            worker.process.wait()
        for result in found[kind]:
            print(kind, result, flush=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report.write_json(target, report.provenance(device) | {"seconds": args.seconds, "processes": found})
    return int(any(x["failure"] or x["different"] for kind in found if kind != "before" for x in found[kind]))


if __name__ == "__main__":
    sys.exit(main())
