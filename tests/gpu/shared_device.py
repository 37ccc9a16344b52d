"""Several engines that prefill on one GPU at a time: ``python -m tests.gpu.shared_device --engines 3 --seconds 30``.

Job: run processes side by side, each with an engine of dummy weights and random prompts of thousands of tokens. Say
which of them failed, stopped answering, or gave a prompt another next token than before. Owns: the prompts. Does not
know: what a right token is.

To find a cause, ``--products N`` adds N processes that only multiply matrices with torch, and ``--sync`` has each
engine's host wait for the device after every module. ``--without-gluon`` and ``--without-early-launches`` leave these
out. ``--core-dumps`` asks cuda-gdb where a kernel failed or waits. ``shared_device_kernels.py`` runs kernels alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.dummy_engine import CONFIGS
from tests.gpu.shared_device_kernels import ask_for_core_dump, core_dump_settings, explain_core_dumps
from tests.x_matrix import runner_of
from weft import LLM, SamplingParams
from weft.ops.triton import early_launch, hopper

START_SECONDS = 90.0
"""How long a start may take beside others."""


def prefill(args: argparse.Namespace) -> str:
    """Prefill prompts of random lengths, many of them again and again."""
    if args.without_gluon:
        hopper.is_gluon_tested = lambda _version: False  # type: ignore[assignment]
    if args.without_early_launches:
        early_launch._can_launch_early = lambda _device: False  # type: ignore[assignment]
    least, most = args.lengths
    passes, different = 0, 0
    known: dict[tuple[int, int], int] = {}
    settings: dict[str, Any] = {"enforce_eager": True} if args.eager else {}
    with LLM(
        str(CONFIGS / args.model), load_format="dummy", skip_tokenizer_init=True, max_model_len=most + 16,
        max_num_batched_tokens=most, max_num_seqs=4, num_kv_pages=3000, enable_prefix_caching=False,
        device=args.device, **settings,
    ) as llm:  # fmt: skip
        if args.sync:
            for module in runner_of(llm).model.modules():
                module.register_forward_hook(_wait)
        rng, params = random.Random(0), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        vocab_size = llm.config.model_config.vocab_size
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            length = rng.choice([most // 2, most * 3 // 4, most, rng.randint(least, most)])
            seed = rng.randrange(4)
            tokens = random.Random(seed * 100_000 + length)
            prompt = [tokens.randrange(vocab_size) for _ in range(length)]
            print("prefills", length, "tokens, seed", seed, flush=True)
            output = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids[0]
            different += known.setdefault((length, seed), output) != output
            passes += 1
    assert not different, f"{different} of {passes} prompts had another next token than before"
    return f"{passes} passes of {len(known)} prompts"


def _wait(_module: nn.Module, _inputs: Any, _output: Any) -> None:
    torch.cuda.synchronize()


def multiply(args: argparse.Namespace) -> str:
    """Products of torch alone, which keep the device as busy as an engine does."""
    x = torch.randn(8192, 8192, device=args.device, dtype=torch.bfloat16)
    end, products = time.monotonic() + args.seconds, 0
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        x.sum().item()
        products += 20
    return f"{products} products"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--products", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each engine, after its start")
    parser.add_argument("--model", default="qwen3-0.6b", help="one of benchmarks/configs, or a folder")
    parser.add_argument("--lengths", type=int, nargs=2, default=[3100, 8192], metavar=("LEAST", "MOST"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--without-gluon", action="store_true")
    parser.add_argument("--without-early-launches", action="store_true")
    parser.add_argument("--core-dumps", action="store_true")
    parser.add_argument("--role", choices=["engine", "products"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        print("passed:", prefill(args) if args.role == "engine" else multiply(args), flush=True)
        return 0
    names = [f"engine {i}" for i in range(args.engines)] + [f"products {i}" for i in range(args.products)]
    command = [sys.executable, "-m", "tests.gpu.shared_device", *sys.argv[1:], "--role"]
    root, folder = Path(__file__).resolve().parents[2], Path(tempfile.mkdtemp())
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    settings = {**os.environ, **(core_dump_settings(folder) if args.core_dumps else {})}
    running = {
        name: subprocess.Popen([*command, name.split()[0]], cwd=root, text=True, env=settings, **pipes)
        for name in names
    }  # fmt: skip
    deadline = time.monotonic() + START_SECONDS + args.seconds
    failed = 0
    for name, child in running.items():
        try:
            said, _ = child.communicate(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            if args.core_dumps:
                ask_for_core_dump(folder, child.pid)
            child.kill()
            said, _ = child.communicate()
        lines = [line for line in said.splitlines() if line.startswith(("passed", "prefills")) or "Error" in line]
        failed += child.returncode != 0
        print(f"{name}: {' | '.join(lines[-2:]) if child.returncode else lines[-1]} (status {child.returncode})")
    if args.core_dumps:
        explain_core_dumps(folder)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
