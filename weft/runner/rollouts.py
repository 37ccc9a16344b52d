"""What a rank does between two steps for a training loop: new weights, on all ranks or on none.

Job: run one command on this rank, and agree with the others on its success. Owns: the table of the model's tensors.
Does not know: requests, caches of prefixes, who sends commands.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.errors import UnavailableError, WeightsError
from weft.runner.memory import wait_for_steps
from weft.weights.sources import Files, Relayed, Source
from weft.weights.update import ModelTensors, WeightUpdate

if TYPE_CHECKING:
    from weft.runner.model_runner import ModelRunner


class LoadFiles(msgspec.Struct, frozen=True, tag="files"):
    """Update weights from the safetensors files of a folder. ``complete``: every parameter has to get a value."""

    folder: str
    complete: bool = False


class TakeTensors(msgspec.Struct, frozen=True, tag="tensors"):
    """Update weights from tensors of rank 0's process."""

    complete: bool = False


Command = LoadFiles | TakeTensors


class Done(msgspec.Struct, frozen=True):
    """The result of a command. ``num_tensors`` were copied in ``seconds``."""

    num_tensors: int
    seconds: float


class RankControl:
    """Commands on one rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    @cached_property
    def _tensors(self) -> ModelTensors:
        return ModelTensors(self._runner.model, ties_head=self._runner.config.model_config.tie_word_embeddings)

    def run(self, command: Command, tensors: Source | None = None) -> Done:
        """Run a command that every rank runs.

        Args:
            tensors: rank 0's tensors, for ``TakeTensors``.

        Raises:
            WeightsError: an update was refused or failed, and the old weights are as before.
            UnavailableError: an update failed, and the old weights are lost.
        """
        runner = self._runner
        if isinstance(command, LoadFiles):
            return self._update(Files(Path(command.folder)), complete=command.complete)
        source = Relayed(tensors, runner.tp, runner.device) if runner.tp.size > 1 else tensors
        assert source is not None, "rank 0 has the tensors"
        return self._update(source, complete=command.complete)

    def _update(self, source: Source, *, complete: bool) -> Done:
        began, tp = time.monotonic(), self._runner.tp
        update = WeightUpdate(self._tensors, complete)
        error: BaseException | None = None
        try:
            offered = source.offered()
            if offered is not None:
                update.check(offered)
        except Exception as problem:
            error = problem
        if not tp.least(error is None):
            raise _failure(error, "nothing was changed") from error
        error = self._copy_all(update, source)
        if tp.least(error is None):
            return Done(update.num_tensors, time.monotonic() - began)
        is_restored = update.roll_back()
        wait_for_steps()
        if tp.least(is_restored):
            raise _failure(error, "the old weights were written back") from error
        raise UnavailableError(
            f"an update of weights failed in the middle, and the old ones are lost: {_reason(error)}. Update all "
            "weights, or start a new engine"
        ) from error

    def _copy_all(self, update: WeightUpdate, source: Source) -> BaseException | None:
        """Copy all tensors. Returns the first error. A source that must be drained is read to its end even then."""
        error: BaseException | None = None
        try:
            with closing(iter(source)) as tensors:  # type: ignore[type-var]  # sources are generators
                for tensor, read in tensors:
                    try:
                        if error is None:
                            update.copy(tensor, read)
                    except Exception as problem:
                        error = problem
                    if error is not None and not source.must_drain:
                        break
            if error is None:
                update.finish()
            wait_for_steps()
        except BaseException as problem:
            error = error or problem
        return error


def _reason(error: BaseException | None) -> str:
    if error is None:
        return "another rank failed, whose log says why"
    return str(error) if isinstance(error, WeightsError) else f"{type(error).__name__}: {error}"


def _failure(error: BaseException | None, state: str) -> BaseException:
    """The error of an update that left the old weights in place. An interrupt stays what it is."""
    if error is not None and not isinstance(error, Exception):
        return error
    return WeightsError(f"{_reason(error)} ({state})")
