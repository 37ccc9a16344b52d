"""Compiling a model's kernels before the first step, several at a time.

Job: make every kind of step that serving can bring, and run a walk through them without launching a kernel. Every
kernel of the model is then compiled (``runner/compile_processes.py``) or loaded from Triton's cache on disk. Owns:
the steps that cover the kernels. Does not know: the kernels.

A Triton kernel is compiled once for each combination of its compile-time arguments. These follow from the model and
from sizes of the step: tiles grow with the number of tokens or sequences, splits with the context. Sizes at powers of
two cover every tile. All layers of one kind use the same kernels, so the walk runs one layer of each kind.
"""

from __future__ import annotations

import functools
import os
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from weft.messages import NewRequest, RowSampling, ScheduledRequest, SchedulerOutput
from weft.models.decoder import Decoder, DecoderLayer
from weft.platforms.triton_version import is_known
from weft.processes import preload

GREEDY = RowSampling(temperature=0.0)

SAMPLERS = (
    RowSampling(temperature=1.0, top_p=0.9, logit_bias={0: 1.0}),
    RowSampling(temperature=1.0, top_p=0.9),
    RowSampling(temperature=1.0, top_k=20),
    RowSampling(temperature=1.0, min_p=0.1),
    RowSampling(temperature=1.0),
    RowSampling(temperature=1.0, logit_bias={0: 1.0}),
    RowSampling(temperature=0.0, logit_bias={0: 1.0}),
    GREEDY,
)
"""Ways to sample that use different kernels, the slowest to compile first. None keeps a history: it would be indexed by
tokens that are not any."""


MAX_PROCESSES = 16
"""Upper bound on compile processes. Forking a process takes 10 ms. The slowest kernel takes as long as a process's
share of all kernels."""

LEAST_TOKENS = 256
"""Least tokens of a step that is made smaller because memory is short. With fewer tokens a prompt would take very many
steps."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: tokens, sequences, and context in tokens."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int

    def smaller(self) -> StepLimits | None:
        """The next smaller ones to try where these do not fit: fewer tokens, and then fewer sequences; None after one
        sequence of ``LEAST_TOKENS``."""
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens // 2 >= max(seqs, LEAST_TOKENS):
            return StepLimits(tokens // 2, seqs, self.max_model_len)
        return StepLimits(tokens, seqs // 2, self.max_model_len) if seqs > 1 else None


def slow_steps(limits: StepLimits, state_slot: int) -> Iterator[SchedulerOutput]:
    """Steps within ``limits`` whose kernels take longest to compile: the most tokens, in one sequence and in many, all
    ways to sample, and a few sequences.

    Args:
        state_slot: the slot that every sequence uses; 0 if the model has no recurrent layers.
    """
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    yield step([(0, longest)], state_slot)
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    if most > 1:
        tokens = min(limits.max_num_batched_tokens, most * longest)
        yield step([(0, share) for share in shares(tokens, most)], state_slot)
    yield from (step([(0, 1)] * min(1 + i, most), state_slot, sampling) for i, sampling in enumerate(SAMPLERS))


def covering_steps(limits: StepLimits, state_slot: int) -> Iterator[SchedulerOutput]:
    """Steps that, with the slow ones, use every kernel that an eager step within ``limits`` can use."""
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    lengths, contexts = reversed(powers_of_two(longest)), powers_of_two(limits.max_model_len)
    counts = powers_of_two(min(limits.max_num_seqs, limits.max_num_batched_tokens))
    for length in lengths:
        yield step([(0, length)], state_slot)
        if limits.max_num_seqs > 1 and length < limits.max_num_batched_tokens and limits.max_model_len > 1:
            yield step([(1, 1), (0, length)], state_slot)
    if limits.max_num_seqs > 1 and longest > 2 and limits.max_model_len > 2:
        # Latent attention takes both of its forms here: the chunk of two tokens behind a context stays absorbed.
        yield step([(1, 2), (0, longest - 2)], state_slot)
    full = min(limits.max_num_seqs, limits.max_num_batched_tokens // longest)
    if full > 1:  # more tokens than one sequence can bring
        yield step([(0, longest)] * full, state_slot)
        if limits.max_model_len > 1:
            yield step([(1, 1)] + [(0, longest)] * (full - 1), state_slot)
    for tokens in powers_of_two(limits.max_num_batched_tokens):  # by many sequences, which take other kernels than one
        most = min(tokens, counts[-1] * longest)
        if counts[-1] > 1 and most // counts[-1] > 2:
            yield step([(0, share) for share in shares(most, counts[-1])], state_slot)
            others = shares(min(tokens - 1, (counts[-1] - 1) * longest), counts[-1] - 1)
            yield step([(1, 1)] + [(0, share) for share in others], state_slot)
    for count in counts:
        yield step([(0, max(1, min(2, longest, limits.max_num_batched_tokens // count)))] * count, state_slot)
        starts = {1, limits.max_model_len - 1} if limits.max_model_len > 1 else ()
        yield from (step([(start, 1)] * count, state_slot) for start in starts)
    for context in contexts[1:]:
        yield from (step([(context - 1, 1)] * count, state_slot) for count in (counts[0], counts[-1]))
    moves = step([(0, 1)], state_slot)
    yield replace(moves, page_copies=[(0, 0)], state_forks=[(0, 0)] if state_slot else [])


def step(
    sequences: list[tuple[int, int]], state_slot: int, sampling: RowSampling = GREEDY, num_drafts: int = 0
) -> SchedulerOutput:
    """A step of sequences given as ``(start, num_tokens)``, decodes first, each with ``num_drafts`` drafts after its
    tokens; they have no pages, so all use page 0."""
    new = [NewRequest(row, array("I", [0] * count), count, sampling) for row, (_, count) in enumerate(sequences)]
    requests = []
    for row, (start, count) in enumerate(sequences):
        states = [(start + count + i, state_slot) for i in range(num_drafts)]
        tokens, drafts = count + num_drafts, [0] * num_drafts
        requests.append(ScheduledRequest(row, start, tokens, [], state_slot, True, states, 0, drafts))
    return SchedulerOutput(0, requests, new)


def image_step(state_slot: int, merge: int) -> SchedulerOutput:
    """A step of one token: an image of ``merge * merge`` patches that was never encoded."""
    new = NewRequest(0, array("I", [0]), 1, GREEDY, [(0, 1, merge, merge)])
    return SchedulerOutput(0, [ScheduledRequest(0, 0, 1, [], state_slot, True, media=[(0, 1, 0)])], [new])


def shares(tokens: int, count: int) -> list[int]:
    """``tokens`` in ``count`` parts that differ by one token at most."""
    return [tokens // count + (i < tokens % count) for i in range(count)]


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, … below ``limit``, and ``limit``."""
    return [2**i for i in range((limit - 1).bit_length())] + [limit]


@functools.cache
def prepare_triton(device: torch.device) -> Future[None]:
    """In a thread: what Triton does at its first use."""
    threads = ThreadPoolExecutor(1, "triton")
    prepared = threads.submit(_prepare_triton, device.type == "cuda")
    threads.shutdown(wait=False)
    return prepared


def _prepare_triton(on_gpu: bool) -> None:
    from triton.runtime.driver import driver

    if on_gpu:
        _ = driver.active  # made when it is asked for
    preload.look_up_triton_key().join()


@contextmanager
def compiled_meanwhile(walk: Callable[[], None], device: torch.device) -> Iterator[None]:
    """Compile the kernels that ``walk`` would launch while the body runs, and wait for them at its end.

    On a GPU the kernels are then loaded too, so that no launch has to load one in the middle of a capture.

    ``walk`` runs first. Its torch operations run, its kernels do not. The kernels' results are arbitrary, so ``walk``
    must not index by them.
    """
    import triton

    on_gpu = device.type == "cuda"
    current = torch.cuda.current_device() if on_gpu else 0

    def load(kernel: Any) -> None:
        """Load its binary and make its launcher, as its first launch would."""
        if on_gpu:
            torch.cuda.set_device(current)  # of this thread
            _ = kernel.run

    prepare_triton(device).result()
    count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    with _compilers(count, load) as compilers, triton.AsyncCompileMode(compilers):
        with _no_launches():
            walk()
        yield


@contextmanager
def _compilers(count: int, load: Callable[[Any], None]) -> Iterator[Any]:
    """The executor of ``triton.AsyncCompileMode``: processes, or threads under an unknown Triton.

    Args:
        load: puts a kernel on the device.
    """
    import triton

    if not is_known(triton.__version__):
        with ThreadPoolExecutor(count) as threads:
            yield _LoadingThreads(threads, load)
        return
    from weft.ops.triton.launch import compiled_by
    from weft.runner.compile_processes import CompileProcesses

    with CompileProcesses(count, load) as processes, compiled_by(processes.compile):
        yield processes


class _LoadingThreads:
    """Threads that compile kernels and put them on the device."""

    def __init__(self, threads: ThreadPoolExecutor, load: Callable[[Any], None]) -> None:
        self._threads, self._load = threads, load

    def submit(self, compile_function: Callable[[], Any]) -> Future[Any]:
        return self._threads.submit(self._loaded, compile_function)

    def _loaded(self, compile_function: Callable[[], Any]) -> Any:
        kernel = compile_function()
        self._load(kernel)
        return kernel


@contextmanager
def _no_launches() -> Iterator[None]:
    """Launches compile only, each kind of launch once if kinds can be told."""
    from weft.ops.triton.launch import Kernel, launches_handled

    met: set[tuple[Any, ...]] = set()

    def compile_only(kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        kind = id(kernel), kernel.key(args, options)
        if kind[1] is None or kind not in met:
            met.add(kind)
            kernel.warmup(*args, grid=grid, **options)

    with launches_handled(compile_only):
        yield


@contextmanager
def one_layer_of_each_kind(decoder: Decoder) -> Iterator[None]:
    """Leave out layers that use the same kernels as another one. The last layer, which may compute fewer rows, stays
    behind another of its kind."""
    layers = decoder.layers
    kinds: dict[tuple[str, bool, bool], nn.Module] = {}
    for layer in layers:
        assert isinstance(layer, DecoderLayer)
        last = kinds.setdefault(layer.kind, layer)
    decoder.layers = nn.ModuleList([*kinds.values(), last])
    try:
        yield
    finally:
        decoder.layers = layers
