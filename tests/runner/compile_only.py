"""Compiles a model's kernels for an absent GPU, and lists those that the start-up walk missed.

    python -m tests.runner.compile_only FOLDER [SPECULATIVE_CONFIG [RANKS [KV_CACHE_DTYPE [DETERMINISTIC [KNOWN]]]]]

A program of its own, because kernels are interpreted in the tests' process. Its output is JSON: the kernels compiled
at start, and kernels that random steps asked for later. Nothing is launched, so sampled tokens are arbitrary and never
fed. With ``KNOWN``, one variant of a kernel is compiled, and none of the kernels whose modules and names it lists.
Other variants count as compiled.
"""

from __future__ import annotations

import json
import random
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from weft.cache.plan import CachePlan
from weft.config import resolve
from weft.messages import NewRequest, ScheduledRequest, SchedulerOutput
from weft.ops.attention import decode as attention_decode
from weft.ops.attention import paged as attention
from weft.ops.backend import Backend
from weft.ops.delta_rule import scan as delta_scan
from weft.ops.delta_rule import verify as gdn_verify
from weft.ops.mamba import scan as selective_scan
from weft.ops.triton import early_launch, launch
from weft.runner import model_runner, warmup
from weft.runner.kernel_walk import walk_captured_steps

LIMITS = {"max_num_batched_tokens": 700, "max_num_seqs": 21, "max_model_len": 1024}


class AbsentGpu:
    """A stand-in for the driver of an H100 or H200, with the calls that Triton makes before it compiles."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class AbsentRanks:
    """A group of which only rank 0 is there."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)

    def peer_memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(self.size, dtype=torch.int64)

    def least(self, value: int) -> int:
        return value

    is_alone = False

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()


@contextmanager
def walked(walk: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Stands for ``compiled_meanwhile``, without other processes."""
    with warmup._no_launches():
        walk()
    yield


def compile_few(known: set[str]) -> None:
    """Compile one variant of each kernel that is not ``known``."""

    def compile_or_not(src: Any, **options: Any) -> Any:
        name = f"{src.fn.__module__.removeprefix('weft.ops.')}.{src.fn.__name__}"
        if name in known:
            return object()  # nobody launches it
        known.add(name)
        return triton.compile(src, **options)

    launch._compiler = compile_or_not
    model_runner.compiled_meanwhile = walked


def random_step(rng: random.Random, state_slot: int) -> Any:
    """Up to 18 decodes and 3 prefills, of which some continue."""
    decodes = [(rng.choice([1, 5, 63, 64, 255, rng.randint(1, 1000)]), 1) for _ in range(rng.choice([0, 1, 2, 7, 18]))]
    lengths = [rng.choice([1, 2, 3, 16, 17, 65, 130, 210]) for _ in range(rng.randint(0, 3))]
    prefills = [(rng.choice([0, 0, 64, 300]) if length > 1 else 0, length) for length in lengths]
    return warmup.step(decodes + prefills or [(0, 1)], state_slot, rng.choice(warmup.SAMPLERS))


def random_verification(rng: random.Random, num_drafts: int, state_slot: int) -> Any:
    """Up to 18 sequences of which some or all verify as many drafts."""
    count, same = rng.choice([1, 2, 7, 18]), rng.random() < 0.7
    requests, new = [], []
    for row in range(count):
        start = rng.choice([1, 5, 64, rng.randint(1, 900)])
        drafts = [0] * (num_drafts if same else rng.randint(1, num_drafts))
        states = [(start + 1 + i, state_slot) for i in range(len(drafts))]
        requests.append(ScheduledRequest(row, start, 1 + len(drafts), [], state_slot, True, states, 0, drafts))
        new.append(NewRequest(row, array("I", [0] * (start + 1)), start + 1, rng.choice(warmup.SAMPLERS)))
    return SchedulerOutput(0, requests, new)


def main(
    folder: str, speculative_config: str = "", ranks: str = "1", kv_cache_dtype: str = "auto", deterministic: str = "",
    known: str = "",
) -> None:  # fmt: skip
    driver.set_active(AbsentGpu())
    if known:
        compile_few(set(known.split()))
    compiled: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda *, repr, **rest: compiled.append(repr)
    early_launch._can_launch_early = lambda device: True  # type: ignore[assignment]
    attention_decode._HELD_WORK = 8 * 128  # batches so small take all of its ways
    if attention.GLUON_IS_KNOWN:
        from weft.ops.attention import expanded_latent_hopper
        from weft.ops.linear import coded as coded_linear
        from weft.ops.linear import fp8 as fp8_linear
        from weft.ops.linear import gated_hopper as gated_linear_hopper
        from weft.ops.moe import coded_pairs_hopper
        from weft.ops.moe import fp8_pairs_hopper as fp8_moe_pairs_hopper

        attention.hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
        expanded_latent_hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
        attention.decode_hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
        delta_scan.hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
        gdn_verify.gdn_verify_gluon.runs_gluon = lambda device: True  # type: ignore[assignment]
        gdn_verify.gdn_decode_gluon.runs_gluon = lambda device: True  # type: ignore[assignment]
        selective_scan.gluon.runs_gluon = lambda device: True  # type: ignore[assignment]
        gated_linear_hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
        coded_linear.runs_gluon = coded_pairs_hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
        fp8_linear.runs_gluon = fp8_moe_pairs_hopper.runs_gluon = lambda device: True  # type: ignore[assignment]
    backend = Backend.INVARIANT_TRITON if deterministic else Backend.TRITON
    model_runner.resolve_backend = lambda *_, **__: backend  # type: ignore[assignment]
    # With graphs, whose kernels have variants of their own; but nothing is captured, because nothing can run.
    model_runner.ModelRunner._capture_graphs = lambda self: None  # type: ignore[method-assign]
    config = resolve(
        model=folder, device="cpu", dtype="bfloat16", cpu_cache_gib=0.1, speculative_config=speculative_config or None,
        tensor_parallel_size=int(ranks), kv_cache_dtype=kv_cache_dtype,
        deterministic=bool(deterministic), cuda_graph_mode="FULL", enable_overlap=True,
        piecewise_cuda_graph_max_tokens=LIMITS["max_num_batched_tokens"], **LIMITS,
    )  # fmt: skip
    group = AbsentRanks(config.tensor_parallel_size)
    runner = model_runner.ModelRunner(config, tp=group if group.size > 1 else None)
    at_start, rng = len(compiled), random.Random(0)
    with warmup._no_launches(), torch.inference_mode():
        runner.plan = CachePlan(2, 2, config.max_num_seqs, config.max_model_len, 0, {})
        runner.attach(runner.plan)
        for _ in range(60):
            runner.launch(random_step(rng, state_slot=1))
            runner.steps.rows.last_token.zero_()
            if config.num_drafts:
                runner.launch(random_verification(rng, config.num_drafts, state_slot=1))
                runner.steps.rows.last_token.zero_()
        if config.num_drafts:
            walk_captured_steps(runner)
        if runner.media is not None:
            runner.media.run_smallest()
            for size in config.encoder_cuda_graph_patches:
                runner.media.graphs.encode(size)
            runner.launch(warmup.image_step(0, runner.media.merge))
    print(json.dumps({"at_start": compiled[:at_start], "later": compiled[at_start:]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
