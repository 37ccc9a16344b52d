"""Measure updates from another process, by handles on the same GPU or through a group, and sleep and wake.

    python -m benchmarks.rollouts --model qwen3-next-12l --json FILE
    python -m benchmarks.rollouts --group --json FILE  # the trainer's process uses the second GPU

The engine has dummy weights. A second process makes random tensors under the checkpoint's names, and shares or sends
them. Every figure is written to the file at once. Memory is what nvidia-smi reports. Updates stand beside a plain copy
of as many bytes. The file also says whether tokens are equal where they have to be, and where the time of one update
goes. Without a GPU, ``--group`` runs over gloo, as a rehearsal.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import multiprocessing
import os
import pstats
import socket
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
from weft.weights.group import WeightGroup
from weft.weights.shared import Handles, share_weights

CONFIGS = Path(__file__).parent / "configs"
ROUNDS = 5
SHOWN = 12

Names = list[tuple[str, tuple[int, ...]]]


def used_gib() -> float:
    """Memory of the GPU in use, by nvidia-smi."""
    device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    query = ["nvidia-smi", "-i", device, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return round(float(subprocess.check_output(query, text=True).split()[0]) / 1024, 2)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(act: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    act()
    synchronize()
    return round(time.perf_counter() - began, 4)


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    vocabulary = min(5000, llm.config.model_config.vocab_size - 10)
    prompts = [[(i * i + seed) % vocabulary + 10 for i in range(100 + 50 * seed)] for seed in range(4)]
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


def first_token_ms(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    prompt = [int(x) for x in torch.randint(10, 5000, (512,))]
    return round(1e3 * seconds(lambda: llm.generate([prompt], params, use_tqdm=False)), 2)


def wanted(llm: LLM) -> Names:
    """Names and shapes of a whole checkpoint, fused over experts where the model reads that."""
    control: RankControl = llm._core.executor._control  # type: ignore[attr-defined]
    known = control._tensors
    return [(name, known.pieces[name].shape) for name in known.missing(set())]


def fill(tensors: dict[str, torch.Tensor], names: Names, seed: int, device: str) -> None:
    """Fill tensors of these names with the random numbers of a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in names:
        if name not in tensors:
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16, device=device)
        tensors[name].normal_(0.0, 0.02, generator=generator)


def share(link: Connection, names: Names) -> None:
    """A trainer's process on the engine's GPU: new tensors for each seed, shared until the next one."""
    tensors: dict[str, torch.Tensor] = {}
    while (seed := link.recv()) is not None:
        fill(tensors, names, seed, "cuda")
        link.send_bytes(share_weights(tensors))


def send(link: Connection, names: Names, port: int, device: str) -> None:
    """A trainer's process on another GPU: new tensors for each seed, sent through a group."""
    if device != "cpu":
        torch.cuda.set_device(device)
    group = WeightGroup("127.0.0.1", port, 0, 2, "nccl" if device.startswith("cuda") else "gloo")
    tensors: dict[str, torch.Tensor] = {}
    while (seed := link.recv()) is not None:
        fill(tensors, names, seed, device)
        synchronize()
        link.send(True)
        for name, _ in names:
            group.broadcast(tensors[name])
        synchronize()


def copy_rate(num_bytes: int, device: str) -> float:
    """Bytes per second of a plain copy from a device to the engine's."""
    size = min(max(num_bytes, 2**26), 4 * 2**30)
    target = torch.empty(size, dtype=torch.uint8, device=device.partition(":")[0])
    source = torch.empty_like(target, device=device)
    target.copy_(source)
    times = [seconds(partial(target.copy_, source)) for _ in range(9)]
    rate = source.numel() / median(times)
    del source, target
    gc.collect()
    torch.cuda.empty_cache()
    return rate


def host_profile(act: Callable[[], object]) -> list[str]:
    """Where the host's time goes: milliseconds in a function alone, calls, name."""
    profile = cProfile.Profile()
    profile.runcall(act)
    stats: dict[tuple[str, int, str], Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    most = sorted(stats.items(), key=lambda item: -item[1][2])[:SHOWN]
    return [f"{1e3 * own[2]:.1f} ms, {own[1]} calls, {Path(file).name}: {name}" for (file, _, name), own in most]


def device_profile(act: Callable[[], object]) -> list[str]:
    """Where the GPU's time goes: milliseconds, launches, kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        act()
        synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)[:SHOWN]
    return [f"{event.self_device_time_total / 1e3:.1f} ms, {event.count} launches, {event.key:.80}" for event in events]


class Run:
    """One run: the engine, the figures so far."""

    def __init__(self, args: argparse.Namespace, device: str) -> None:
        self._target = report.open_json(args.json)
        self._found: dict[str, Any] = report.provenance(device) | {"model": args.model}
        folder = CONFIGS / args.model
        began = time.perf_counter()
        self.llm = LLM(
            str(folder if folder.exists() else args.model), load_format="dummy", skip_tokenizer_init=True,
            max_model_len=8192, max_num_seqs=64, gpu_memory_utilization=args.utilization, cuda_graph_mode="FULL",
            enable_sleep_mode=not (args.without_sleep or args.group),
        )  # fmt: skip
        self.keep(start_s=round(time.perf_counter() - began, 1), settings=report.settings(self.llm.config))
        self.reference, self.names = tokens(self.llm), wanted(self.llm)
        self.num_bytes = sum(2 * torch.Size(shape).numel() for _, shape in self.names)

    def keep(self, **figures: Any) -> None:
        self._found.update(figures)
        report.write_json(self._target, self._found)
        print(figures, flush=True)

    def measure(self, update: Callable[[int], float], source: str) -> list[list[int]]:
        """Measure updates, each with the tensors of a seed. Returns tokens of the first weights, which are back."""
        self.keep(num_tensors=len(self.names), update_bytes=self.num_bytes, first_update_s=update(1))
        one = tokens(self.llm)
        times = [update(2) for _ in range(ROUNDS)]
        two, rate = tokens(self.llm), copy_rate(self.num_bytes, source)
        share_of_copy = round(self.num_bytes / rate / median(times), 3)
        self.keep(
            update_s=times, copy_s=round(self.num_bytes / rate, 4), copy_gb_s=round(rate / 1e9, 1),
            share_of_copy=share_of_copy, updates_differ=self.reference != one != two,
        )  # fmt: skip
        update(1)
        self.keep(equal_after_update=tokens(self.llm) == one)
        return one


def sleep_and_wake(run: Run) -> None:
    llm = run.llm
    run.keep(sleep_1_s=seconds(llm.sleep), asleep_1_gib=used_gib())
    run.keep(wake_1_s=seconds(llm.wake_up), awake_again_gib=used_gib())
    first = [first_token_ms(llm) for _ in range(3)]
    run.keep(first_after_wake_ms=first, equal_after_sleep_1=tokens(llm) == run.reference)


def by_handles(args: argparse.Namespace) -> None:
    """The engine and a trainer on one GPU."""
    before, run = used_gib(), Run(args, "cuda")
    llm = run.llm
    weights = sum(p.nbytes for p in llm._core.executor._runner.model.parameters())  # type: ignore[attr-defined]
    run.keep(before_gib=before, awake_gib=used_gib(), weights_gib=round(weights / 2**30, 2))
    run.keep(first_ms=first_token_ms(llm))
    if not args.without_sleep:
        sleep_and_wake(run)
    link, trainer = start(share, run.names)

    def shared(seed: int) -> bytes:
        link.send(seed)
        return link.recv_bytes()

    def update(seed: int) -> float:
        description = shared(seed)
        return seconds(lambda: llm.update_weights_from_ipc(description))

    one = run.measure(update, "cuda")
    run.keep(first_after_update_ms=[first_token_ms(llm) for _ in range(3)])
    run.keep(host=host_profile(partial(llm.update_weights_from_ipc, shared(1))))
    run.keep(gpu=device_profile(partial(llm.update_weights_from_ipc, shared(1))))
    held = list(Handles([shared(1)], torch.device("cuda", 0)))  # mappings of this memory stay, so none is opened
    run.keep(update_of_mapped_s=[update(1) for _ in range(ROUNDS)])
    del held
    if not args.without_sleep:
        run.keep(both_gib=used_gib(), sleep_2_s=seconds(lambda: llm.sleep(2)), asleep_2_gib=used_gib())
        wake_s = seconds(llm.wake_up)
        run.keep(wake_2_s=wake_s, update_after_wake_s=update(1), equal_after_sleep_2=tokens(llm) == one)
    end(run, link, trainer)


def by_group(args: argparse.Namespace) -> None:
    """The engine on one device, and a trainer on another, over NCCL. Without a GPU: over gloo."""
    device = "cuda:1" if torch.cuda.is_available() else "cpu"
    run = Run(args, device.partition(":")[0])
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    link, trainer = start(send, run.names, port, device)
    run.keep(join_s=seconds(lambda: run.llm.init_weights_update_group("127.0.0.1", port, 1, 2)))
    names, shapes = zip(*run.names, strict=True)

    def receive() -> int:
        return run.llm.update_weights_from_distributed(names, ["bfloat16"] * len(names), shapes)

    def ready(seed: int) -> None:
        link.send(seed)
        link.recv()

    def update(seed: int) -> float:
        ready(seed)
        return seconds(receive)

    run.measure(update, device)
    ready(1)
    run.keep(host=host_profile(receive))
    end(run, link, trainer)


def start(target: Callable[..., None], *arguments: Any) -> tuple[Connection, Any]:
    """Start a trainer's process. Returns its connection and the process."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    trainer = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    trainer.start()
    return link, trainer


def end(run: Run, link: Connection, trainer: Any) -> None:
    run.keep(weight_version=run.llm.weight_version, steps_by_mode=run.llm.stats().steps_by_mode)
    link.send(None)
    trainer.join(10)
    run.llm.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-next-12l", help="a folder, or one in benchmarks/configs")
    parser.add_argument("--json")
    parser.add_argument("--group", action="store_true", help="a trainer on another device, through a group")
    parser.add_argument("--without-sleep", action="store_true", help="measure updates alone")
    parser.add_argument("--utilization", type=float, default=0.42)
    args = parser.parse_args()
    (by_group if args.group else by_handles)(args)


if __name__ == "__main__":
    main()
