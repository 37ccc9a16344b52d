"""Measure updates from another process on the same GPU, and sleep and wake.

    python -m benchmarks.rollouts --model qwen3-next-12l --json FILE

The engine has dummy weights. A second process makes random tensors under the checkpoint's names, and shares them by
handles. Every figure is written to the file at once. Memory is what nvidia-smi reports. Updates stand beside a plain
copy of as many bytes. The file also says whether tokens are equal where they have to be.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from weft import LLM, SamplingParams
from weft.bench import report
from weft.runner.rollouts import RankControl
from weft.weights.shared import share_weights

CONFIGS = Path(__file__).parent / "configs"
ROUNDS = 5


def used_gib() -> float:
    """Memory of the GPU in use, by nvidia-smi."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return round(float(subprocess.check_output(query, text=True).split()[0]) / 1024, 2)


def seconds(act: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return round(time.perf_counter() - began, 4)


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[(i * i + seed) % 5000 + 10 for i in range(100 + 50 * seed)] for seed in range(4)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def first_token_ms(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = [int(x) for x in torch.randint(10, 5000, (512,))]
    return round(1e3 * seconds(lambda: llm.generate([prompt], params, use_tqdm=False)), 2)


def wanted(llm: LLM) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a whole checkpoint, fused over experts where the model reads that."""
    control: RankControl = llm._core.executor._control  # type: ignore[attr-defined]
    known = control._tensors
    return [(name, known.pieces[name].shape) for name in known.missing(set())]


def train(link: Connection, names: list[tuple[str, tuple[int, ...]]]) -> None:
    """The trainer's process: new random tensors for each seed, shared until the next one."""
    tensors: dict[str, torch.Tensor] = {}
    generator = torch.Generator("cuda")
    while (seed := link.recv()) is not None:
        generator.manual_seed(seed)
        for name, shape in names:
            if name not in tensors:
                tensors[name] = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            tensors[name].normal_(0.0, 0.02, generator=generator)
        link.send_bytes(share_weights(tensors))


def copy_rate(num_bytes: int) -> float:
    """Bytes per second of a plain copy on the device."""
    source = torch.empty(min(num_bytes, 4 * 2**30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    times = [seconds(partial(target.copy_, source)) for _ in range(9)]
    rate = source.numel() / median(times)
    del source, target
    gc.collect()
    torch.cuda.empty_cache()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-next-12l")
    parser.add_argument("--json")
    parser.add_argument("--without-sleep", action="store_true", help="measure updates alone")
    parser.add_argument("--utilization", type=float, default=0.42)
    args = parser.parse_args()
    target = report.open_json(args.json)
    found: dict[str, Any] = report.provenance("cuda") | {"model": args.model}

    def keep(**figures: Any) -> None:
        found.update(figures)
        report.write_json(target, found)
        print(figures, flush=True)

    before = used_gib()
    began = time.perf_counter()
    llm = LLM(
        str(CONFIGS / args.model), load_format="dummy", skip_tokenizer_init=True, max_model_len=8192, max_num_seqs=64,
        gpu_memory_utilization=args.utilization, enable_sleep_mode=not args.without_sleep, cuda_graph_mode="FULL",
    )  # fmt: skip
    keep(start_s=round(time.perf_counter() - began, 1), settings=report.settings(llm.config))
    weights = sum(p.nbytes for p in llm._core.executor._runner.model.parameters())  # type: ignore[attr-defined]
    reference, names = tokens(llm), wanted(llm)
    keep(before_gib=before, awake_gib=used_gib(), weights_gib=round(weights / 2**30, 2), first_ms=first_token_ms(llm))
    if not args.without_sleep:
        keep(sleep_1_s=seconds(llm.sleep), asleep_1_gib=used_gib())
        keep(wake_1_s=seconds(llm.wake_up), awake_again_gib=used_gib())
        keep(first_after_wake_ms=[first_token_ms(llm) for _ in range(3)], equal_after_sleep_1=tokens(llm) == reference)
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    trainer = context.Process(target=train, args=(theirs, names), daemon=True)
    trainer.start()

    def update(seed: int) -> float:
        link.send(seed)
        shared = link.recv_bytes()
        return seconds(lambda: llm.update_weights_from_ipc(shared))

    num_bytes = sum(2 * torch.Size(shape).numel() for _, shape in names)
    keep(num_tensors=len(names), update_bytes=num_bytes, first_update_s=update(1))
    one = tokens(llm)
    times = [update(2) for _ in range(ROUNDS)]
    two = tokens(llm)
    rate = copy_rate(num_bytes)
    keep(
        update_s=times, copy_s=round(num_bytes / rate, 4), copy_gb_s=round(rate / 1e9, 1),
        share_of_copy=round(num_bytes / rate / median(times), 3), updates_differ=reference != one != two,
    )  # fmt: skip
    update(1)
    keep(equal_after_update=tokens(llm) == one, first_after_update_ms=[first_token_ms(llm) for _ in range(3)])
    if not args.without_sleep:
        keep(both_gib=used_gib(), sleep_2_s=seconds(lambda: llm.sleep(2)), asleep_2_gib=used_gib())
        keep(wake_2_s=seconds(llm.wake_up), update_after_wake_s=update(1), equal_after_sleep_2=tokens(llm) == one)
    keep(weight_version=llm.weight_version, steps_by_mode=llm.stats().steps_by_mode)
    link.send(None)
    trainer.join(10)
    llm.shutdown()


if __name__ == "__main__":
    main()
