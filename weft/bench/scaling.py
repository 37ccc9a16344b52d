"""Scaling: one model on one GPU, split over several GPUs, and in several replicas.

Job: run the same load on each of these. Owns: the method below. Does not know: flags, files.

Each size is a fresh set of engine processes behind the router of ``weft serve``, without HTTP. Throughput is that of
``weft bench throughput``'s queue, submitted at once. The time of a decode step is that of ``weft bench latency``:
(median time of a batch for ``output_len`` tokens - for 1) / (output_len - 1). Replicas share the batch.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import median
from typing import Any

from weft.bench.throughput import ThroughputWorkload
from weft.config import EngineConfig
from weft.engine import wire
from weft.engine.launcher import ENGINE_MODULE, EngineCommand
from weft.engine.replicas import ReplicaSet
from weft.errors import ConfigError, EngineDeadError
from weft.messages import RowSampling
from weft.request import RequestSpec


@dataclass(frozen=True, slots=True)
class ScalingWorkload:
    """The workload at each size.

    Attributes:
        sizes: pairs of GPUs per replica, and replicas.
        queue: the queue of the throughput. Its repeats are not used.
        batch_sizes: sequences decoded together, with ``prompt_len`` prompt tokens and ``output_len`` new ones.
    """

    sizes: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (1, 2))
    queue: ThroughputWorkload = ThroughputWorkload()
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    prompt_len: int = 1024
    output_len: int = 128
    repeats: int = 3


def measure(settings: Mapping[str, Any], workload: ScalingWorkload) -> dict[str, Any]:
    """Measure each size. Returns figures, and the engine's ``config`` at the first size.

    Raises:
        WeftError: an engine cannot start, or dies.
    """
    rows: list[dict[str, Any]] = []
    configs: list[EngineConfig] = []
    for tensor_parallel, replicas in workload.sizes:
        sizes = {"tensor_parallel_size": tensor_parallel, "data_parallel_size": replicas}
        row, config = asyncio.run(_measure_size(dict(settings) | sizes, workload))
        first = rows[0] if rows else row
        gain = round(row["output_tokens_per_s"] / first["output_tokens_per_s"], 2)
        rows.append(sizes | {"throughput_gain": gain} | row)
        configs.append(config)
    return {"config": configs[0], "results": rows}


async def _measure_size(settings: dict[str, Any], workload: ScalingWorkload) -> tuple[dict[str, Any], EngineConfig]:
    began = time.monotonic()
    engines = Engines(settings)
    try:
        config = await engines.ready()
        start_s = time.monotonic() - began
        queue, top = workload.queue, config.model_config.vocab_size
        prompts, lengths = queue.requests(top)
        for _ in range(queue.warmups):
            await engines.run(prompts, lengths, queue.temperature)
        seconds = await engines.run(prompts, lengths, queue.temperature)
        decode = [await _decode(engines, workload, size, top) for size in workload.batch_sizes]
        row = {
            "output_tokens_per_s": round(sum(lengths) / seconds, 1),
            "seconds": round(seconds, 3),
            "decode_ms": dict(zip(map(str, workload.batch_sizes), decode, strict=True)),
            "start_s": round(start_s, 1),
        }
        return row, config
    finally:
        await engines.close()


async def _decode(engines: Engines, workload: ScalingWorkload, batch_size: int, vocab_size: int) -> float:
    """Milliseconds per step."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(workload.prompt_len)] for _ in range(batch_size)]
    times: dict[int, list[float]] = {1: [], workload.output_len: []}
    for repeat in range(workload.repeats + 1):
        for length, seconds in times.items():
            took = await engines.run(prompts, [length] * batch_size, 0.0)
            if repeat:  # the first is a warm-up
                seconds.append(took)
    return round((median(times[workload.output_len]) - median(times[1])) / (workload.output_len - 1) * 1e3, 3)


class Engines:
    """A set of replicas that answers batches of token ids. Make it inside a running event loop.

    Args:
        settings: keyword arguments of ``weft.config.resolve``.
        module: the module that their processes run.
    """

    def __init__(self, settings: dict[str, Any], module: str = ENGINE_MODULE) -> None:
        self._config: EngineConfig | None = None
        self._failed = "the engine process ended unexpectedly"
        self._error: type[Exception] = EngineDeadError
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
        self._open: set[str] = set()
        self._numbers = count()
        self._set = ReplicaSet(EngineCommand(settings, module), self._handle, self._exited)

    async def ready(self) -> EngineConfig:
        """Wait for all replicas. Raises WeftError if one does not start."""
        await self._ready
        assert self._config is not None, "an engine reports its settings before it is ready"
        return self._config

    async def run(self, prompts: Sequence[list[int]], lengths: Sequence[int], temperature: float) -> float:
        """Seconds from the first request to the last token of all. Raises EngineDeadError if one fails."""
        began = time.monotonic()
        specs = [
            RequestSpec(
                f"r{next(self._numbers)}", array("I", prompt), RowSampling(temperature=temperature, seed=seed), length
            )
            for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        self._open = {spec.request_id for spec in specs}
        self._ended.clear()
        for spec in specs:
            self._set.send(spec)
        await self._ended.wait()
        if self._open:
            raise EngineDeadError(self._failed)
        return time.monotonic() - began

    async def close(self) -> None:
        await self._set.stop()

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Configured():
                self._config = message.config
            case wire.Ready():
                self._ready.set_result(None)
            case wire.Failed():
                self._failed, self._error = message.message, ConfigError if message.user_error else EngineDeadError
            case wire.Outputs():
                for update in message.updates:
                    self._update(update)

    def _update(self, update: wire.Update) -> None:
        if update.finish_reason == "error":
            self._failed = "a request failed: its replica has died"
            self._ended.set()
        elif update.finish_reason is not None:
            self._open.discard(update.request_id)
            if not self._open:
                self._ended.set()

    def _exited(self, status: int) -> None:
        self._ended.set()
        if not self._ready.done():
            self._ready.set_exception(self._error(self._failed))
