"""Single kernels of a prefill, each in several processes on one GPU: ``python -m tests.gpu.shared_device_kernels``.

Job: let processes launch a kernel side by side, one kind of kernel after the other. Say which processes failed, stopped
answering, or got other results than before. Owns: the kinds. Does not know: engines.

``library`` are products and attention of torch. ``before`` is Hopper's prefill attention with a barrier that nobody
uses, as it had one, ``still`` the same without the parts' register counts, and ``attention`` that of the package.
``--core-dumps`` asks cuda-gdb where a kernel failed or waits.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
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

from weft.forward_context import Batch
from weft.ops.attention import AttentionCall, prefill_hopper
from weft.ops.attention.prefill import launch_prefill, prefill_tile

UNUSED = (
    "    barriers = (k_ready,",
    "    if not SHARED:\n"
    "        unused = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())\n"
    "        mbarrier.init(unused.index(0), count=1)\n"
    "    barriers = (k_ready,",
)
LENGTHS = (8192, 6144, 3333)
START_SECONDS = 90.0
STOPPED = "stopped answering"


def variant(name: str, *replaced: tuple[str, str]) -> ModuleType:
    """``prefill_hopper`` with other text in some places."""
    source = Path(prefill_hopper.__file__).read_text()
    for old, new in replaced:
        assert old in source
        source = source.replace(old, new)
    path = Path(tempfile.mkdtemp()) / f"prefill_{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def attention(length: int, launch: Callable[[AttentionCall], None]) -> Callable[[], Tensor]:
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
        launch(AttentionCall(q, k_cache, v_cache, batch, 128**-0.5, out))
        return out

    return run


def hopper(module: ModuleType) -> list[Callable[[], Tensor]]:
    return [attention(n, lambda call: module.launch_prefill_hopper(call, skip_decodes=False)) for n in LENGTHS]


def still() -> list[Callable[[], Tensor]]:
    from triton._C.libtriton import gluon_ir

    gluon_ir.WarpSpecializeOp.set_requested_registers = lambda *_: None
    # Other text, or Triton's cache has it.
    return hopper(variant("still", UNUSED, ("k_empty", "k_empties"), (" maxnreg=_ALL_REGISTERS,", "")))


def plain() -> list[Callable[[], Tensor]]:
    def launch(call: AttentionCall) -> None:
        launch_prefill(call, prefill_tile(call.q.shape[0], 16, 128, 2, 2), skip_decodes=False)

    return [attention(n, launch) for n in LENGTHS]


def gated() -> list[Callable[[], Tensor]]:
    from weft.ops.linear.gated_hopper import gated_linear_hopper

    weight = torch.randn(6144, 1024, dtype=torch.bfloat16, device="cuda") / 32
    inputs = [torch.randn(n, 1024, dtype=torch.bfloat16, device="cuda") for n in LENGTHS]
    return [lambda x=x: gated_linear_hopper(x, weight) for x in inputs]  # type: ignore[misc]


def library() -> list[Callable[[], Tensor]]:
    x, y = (torch.randn(8192, 4096, dtype=torch.bfloat16, device="cuda") for _ in "xy")
    q, k, v = (torch.randn(1, 16, 8192, 128, dtype=torch.bfloat16, device="cuda") for _ in "qkv")
    attend = torch.nn.functional.scaled_dot_product_attention
    return [lambda: x @ y.T, lambda: attend(q, k, v, is_causal=True)]


KINDS: dict[str, Callable[[], list[Callable[[], Tensor]]]] = {
    "before": lambda: hopper(variant("before", UNUSED)),
    "attention": lambda: hopper(prefill_hopper),
    "still": still,
    "plain": plain,
    "gated": gated,
    "library": library,
}


def work(kind: str, seconds: float) -> None:
    """Prepare, say so, wait for a line, and run."""
    torch.manual_seed(0)
    runs = KINDS[kind]()
    wanted = [run() for run in runs]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    assert all(bool(torch.isfinite(x).all()) for x in wanted)
    print("ready", flush=True)
    sys.stdin.readline()
    end, launches = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end:
            for _ in range(16):
                for run, want in zip(runs, wanted, strict=True):
                    different += (run() != want).any()
                    launches += 1
            torch.cuda.synchronize()
        found = int(different)
        print(f"result {launches} launches, {found} different", flush=True)
    except RuntimeError as error:
        print(f"result {launches} launches, then {str(error).splitlines()[0]}", flush=True)
        os._exit(3)
    os._exit(4 if found else 0)


def core_dump_settings(folder: Path) -> dict[str, str]:
    """Environment in which a failed kernel leaves a file, and a process can be asked for one."""
    parts = ("nonrelocated_elf_images", "global_memory", "shared_memory", "local_memory", "constbank_memory")
    return {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_ENABLE_USER_TRIGGERED_COREDUMP": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": ",".join(f"skip_{part}" for part in (*parts, "abort")),
        "CUDA_COREDUMP_FILE": str(folder / "core.%p"),
        "CUDA_COREDUMP_PIPE": str(folder / "pipe.%p"),
    }


def ask_for_core_dump(folder: Path, pid: int, seconds: float = 15.0) -> None:
    """Have a process that does not answer write where its kernels are."""
    try:
        pipe = os.open(folder / f"pipe.{pid}", os.O_WRONLY | os.O_NONBLOCK)
        os.write(pipe, b"dump\n")
    except OSError as error:
        print(f"no core dump of {pid}: {error}")
        return
    end = time.monotonic() + seconds
    while time.monotonic() < end and not (folder / f"core.{pid}").exists():
        time.sleep(0.2)
    time.sleep(1.0)


def explain_core_dumps(folder: Path, most: int = 3) -> None:
    """Print the kernels of the core dumps, and the instructions that failed. ``$OUT`` gets registers too."""
    commands = ["info registers", "info registers system", "info cuda warps"]
    commands += ["info cuda kernels", "print $errorpc", "x/12i $errorpc - 0x60", "x/3i $pc"]
    for path in sorted(folder.glob("core.*"))[:most]:
        given = [part for command in (f"target cudacore {path}", *commands) for part in ("-ex", command)]
        done = subprocess.run(["cuda-gdb", "-batch", *given], capture_output=True, text=True, timeout=60)
        found = done.stdout + done.stderr
        (Path(os.environ.get("OUT", folder)) / f"{path.name}.txt").write_text(found)
        print(f"--- {path.name}\n" + "\n".join(found.splitlines()[-60:]))


class Worker:
    """A process that works on a kind."""

    def __init__(self, command: list[str], settings: dict[str, str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        root = Path(__file__).resolve().parents[2]
        self.process = subprocess.Popen(command, cwd=root, text=True, bufsize=1, env=settings, **pipes)
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        last = ""
        for line in self.process.stdout:
            last = line.strip() or last
            if line.startswith(("ready", "result")):
                self._lines.put(last)
        self._lines.put(f"ended with status {self.process.wait()}: {last}")

    def news(self, end: float) -> str:
        """The next line with news that comes before ``end``."""
        try:
            return self._lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            return STOPPED

    def go(self) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.5, help="of each kind")
    parser.add_argument("--core-dumps", action="store_true")
    parser.add_argument("--work", choices=KINDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work, args.seconds)
    folder = Path(tempfile.mkdtemp())
    settings = {**os.environ, **(core_dump_settings(folder) if args.core_dumps else {})}
    command = [sys.executable, "-m", "tests.gpu.shared_device_kernels", "--seconds", str(args.seconds), "--work"]
    began, failed = time.monotonic(), 0
    groups = {kind: [Worker([*command, kind], settings) for _ in range(args.processes)] for kind in args.kinds}
    for kind, workers in groups.items():
        for worker in workers:
            news = worker.news(began + START_SECONDS)
            if news != "ready":
                print(f"{kind}: not ready: {news}", flush=True)
    print(f"ready after {time.monotonic() - began:.1f} s", flush=True)
    for kind, workers in groups.items():
        for worker in workers:
            worker.go()
        end = time.monotonic() + args.seconds + 6.0
        results = [worker.news(end) for worker in workers]
        for worker, result in zip(workers, results, strict=True):
            failed += not result.endswith(" 0 different")
            if result == STOPPED and args.core_dumps:
                ask_for_core_dump(folder, worker.process.pid)
            worker.process.kill()
            worker.process.wait()
        print(f"{kind}: " + " | ".join(results), flush=True)
    if args.core_dumps:
        explain_core_dumps(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
