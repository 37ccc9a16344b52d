"""The executor of several ranks on this machine. Rank 0 is in this process; this process or torchrun started the
others.

Job: send every step to all ranks, read the results of rank 0, end all ranks together. Owns: rank 0, the ring and the
processes of the other ranks. Does not know: the meaning of a step, or how ranks communicate during a step.

Every rank prepares its own inputs from the scheduler output, and samples the same tokens from the same gathered logits,
so the others send nothing back.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.cache.plan import CachePlan
from weft.config import EngineConfig
from weft.errors import CapacityError, ConfigError, UnavailableError, WeftError
from weft.executor import external
from weft.executor.rank import Rank
from weft.executor.rank_process import RankProcess, StartedRank
from weft.executor.ring import Writer
from weft.executor.worker import COMMAND, STOP, WorkerStart, encode_step
from weft.executor.workers import Workers
from weft.layers.sampler import LogitsProcessor
from weft.messages import ModelOutput, SchedulerOutput
from weft.processes.interrupts import interrupts_held
from weft.processes.log_format import logs_json
from weft.runner.profiler import StepProfiler
from weft.runner.results import PendingStep

if TYPE_CHECKING:
    from weft.runner.rollouts import Command, Done
    from weft.weights.sources import Source

logger = logging.getLogger(__name__)

SPIN_S = 2e-3
"""Seconds that a rank polls for the next step, if there are enough processors."""

_POLL_S = 20e-6

_FINISH_S = 10.0
"""Seconds that the end waits for steps in flight. It is longer than the detection of a hanging rank."""

_EXPLAIN_S = 3.0
"""Seconds to wait for another rank's failure as the cause of an error on this rank."""


class MultiProcessExecutor:
    """The executor of ``tensor_parallel_size`` ranks. ``started``: the processes of the other ranks if they run
    already. They end with this executor."""

    def __init__(self, config: EngineConfig, started: Sequence[StartedRank] = ()) -> None:
        size = config.tensor_parallel_size
        self._pending: deque[PendingStep] = deque()
        self._profiler = StepProfiler(Path(config.profile_dir)) if config.profile_dir else None
        self._num_threads = torch.get_num_threads()
        shared = max(1, self._num_threads // size) if config.device == "cpu" else self._num_threads
        torch.set_num_threads(shared)
        self._ring = Writer(size - 1)
        spin_s = SPIN_S if (os.cpu_count() or 1) >= 2 * size else 0.0
        address = self._ring.address
        start = WorkerStart(size, config, address, shared, spin_s, verbose=_is_verbose(), log_json=logs_json())
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        try:
            ranks, store = self._gather(start, started)
        except BaseException:
            self._release()
            raise
        self._workers = Workers(ranks, self._ring)
        try:
            self._workers.wait_until_loaded()
            self._rank = Rank(config, 0, size, store)
            self._workers.wait_until_ready()
        except WeftError:
            self._end_ranks()
            raise
        except BaseException as error:
            cause = self._workers.failure(wait_s=_EXPLAIN_S) if isinstance(error, Exception) else None
            self._end_ranks()
            raise (cause or error) from error

    def _gather(self, start: WorkerStart, started: Sequence[StartedRank]) -> tuple[Sequence[RankProcess], dist.Store]:
        """Start and return the other ranks, and the store in which all ranks meet."""
        if start.config.distributed_executor_backend == "external_launcher":
            return external.lead(start, self._ring)
        store, ranks = f"{self._folder.name}/store", started or [StartedRank(rank) for rank in range(1, start.size)]
        for rank in ranks:
            rank.begin(start, store)
        return ranks, dist.FileStore(store, start.size)

    def _end_ranks(self) -> None:
        self._workers.end()
        self._release()

    def _release(self) -> None:
        """Free the resources that no rank needs any more. An open ring would keep its memory and descriptors."""
        self._folder.cleanup()
        self._ring.close()
        torch.set_num_threads(self._num_threads)

    @property
    def plan(self) -> CachePlan:
        return self._rank.runner.plan

    @property
    def startup(self) -> dict[str, float]:
        """Seconds of each stage of rank 0, then of the other ranks with their numbers."""
        others = {f"rank {w.rank} {name}": s for w in self._workers.ranks for name, s in w.stages.items()}
        return self._rank.runner.startup.seconds | others

    def launch(
        self, scheduler_output: SchedulerOutput, processors: Mapping[int, LogitsProcessor] | None = None
    ) -> None:
        """Launch a step on every rank. Once the step is sent, rank 0 must run it too. An error after that ends all
        ranks, and an interrupt waits until the launch is over.

        Raises:
            EngineDeadError: a rank has died or hangs, or this step failed on a rank.
        """
        assert not processors, "logits processors do not reach the other ranks; requests with some were refused"
        self._workers.check()
        with interrupts_held(second_too=True):
            self._ring.send(encode_step(scheduler_output), self._workers.check)
            try:
                with nullcontext() if self._profiler is None else self._profiler.step(scheduler_output):
                    self._pending.append(self._rank.runner.launch(scheduler_output))
            except Exception as error:
                self._workers.fail(f"a step broke on rank 0: {type(error).__name__}: {error}", wait_s=_EXPLAIN_S)
                self._workers.check()

    def result(self) -> ModelOutput:
        pending = self._pending.popleft()
        while not pending.is_done:
            self._workers.check()
            time.sleep(_POLL_S)
        return pending.result()

    def command(self, command: Command, tensors: Source | None = None) -> Done:
        assert not self._pending, "a command runs between steps"
        self._workers.check()
        with interrupts_held(second_too=True):
            self._ring.send(COMMAND + encode_step(command), self._workers.check)
            try:
                return self._rank.control.run(command, tensors)
            except (ConfigError, UnavailableError, CapacityError):  # all ranks agree on these
                raise
            except Exception as error:
                self._workers.fail(f"a command broke on rank 0: {type(error).__name__}: {error}", wait_s=_EXPLAIN_S)
                self._workers.check()
                raise

    def stop(self) -> None:
        self._finish_steps()
        if self._profiler is not None:
            self._profiler.close()
        failed = self._workers.failure() is not None
        if not failed:
            self._ring.send(STOP, self._workers.check)
            self._workers.may_leave()
        self._rank.close()
        self._workers.wait()
        self._release()

    def _finish_steps(self) -> None:
        """Drop the steps in flight after they are done, since they read and write host memory that rank 0 frees. A dead
        rank may leave a step that never ends."""
        last = self._pending.pop() if self._pending else None
        self._pending.clear()
        deadline = time.monotonic() + _FINISH_S
        while last is not None and not last.is_done and self._workers.failure() is None:
            if time.monotonic() > deadline:
                logger.warning("a step in flight is not done after %.0f s; the ranks end without it", _FINISH_S)
                return
            time.sleep(_POLL_S)


def _is_verbose() -> bool:
    return logging.getLogger().isEnabledFor(logging.INFO)
