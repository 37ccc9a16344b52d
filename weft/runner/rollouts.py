"""Commands of a training loop that a rank runs between two steps: new weights, on all ranks or on none.

Job: run one command on this rank, and agree with the others on its success. Owns: the table of the model's tensors.
Does not know: requests, caches of prefixes, who sends commands.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.errors import CapacityError, ConfigError, UnavailableError, WeftError, WeightsError
from weft.runner.memory import wait_for_steps
from weft.runner.sleep import TAGS, Tag
from weft.weights.group import Received, WeightGroup
from weft.weights.shared import Handles
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


class OpenHandles(msgspec.Struct, frozen=True, tag="handles"):
    """Update weights from CUDA tensors of processes on the ranks' GPUs; see ``share_weights``."""

    descriptions: list[bytes]
    complete: bool = False


class JoinGroup(msgspec.Struct, frozen=True, tag="join"):
    """Join a group as rank ``rank_offset`` plus the rank of the model."""

    address: str
    port: int
    rank_offset: int
    world_size: int
    name: str
    backend: str


class LeaveGroup(msgspec.Struct, frozen=True, tag="leave"):
    """Leave a group."""

    name: str


class Receive(msgspec.Struct, frozen=True, tag="receive"):
    """Update weights from tensors that rank 0 of a group broadcasts."""

    group: str
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    complete: bool = False


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give the memory of weights and caches back. ``keeps_weights``: keep a copy of the weights in host memory."""

    keeps_weights: bool


class WakeUp(msgspec.Struct, frozen=True, tag="wake_up"):
    """Get the memory of these tags back."""

    tags: list[Tag]


Update = LoadFiles | TakeTensors | OpenHandles | Receive
Command = Update | JoinGroup | LeaveGroup | Sleep | WakeUp


class Done(msgspec.Struct, frozen=True):
    """The result of a command: its seconds, and the number of tensors that an update copied."""

    seconds: float
    num_tensors: int = 0


class RankControl:
    """Commands on one rank."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._groups: dict[str, WeightGroup] = {}

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
        match command:
            case Sleep():
                return self._sleep(keeps_weights=command.keeps_weights)
            case WakeUp():
                return self._wake_up(command.tags)
            case JoinGroup():
                return self._join(command)
            case LeaveGroup():
                self._groups.pop(command.name, None)
                return Done(0.0)
            case _:
                return self._update(self._source(command, tensors), complete=command.complete)

    def _source(self, command: Update, tensors: Source | None) -> Source:
        runner = self._runner
        match command:
            case LoadFiles():
                return Files(Path(command.folder))
            case OpenHandles():
                return Handles(command.descriptions, runner.device)
            case Receive():
                group = self._groups[command.group]
                return Received(group, command.names, command.dtypes, command.shapes, runner.device)
        source = Relayed(tensors, runner.tp, runner.device) if runner.tp.size > 1 else tensors
        assert source is not None, "rank 0 has the tensors"
        return source

    def _join(self, command: JoinGroup) -> Done:
        """Join a group. Raises ConfigError, on every rank, if one cannot."""
        began, tp, error = time.monotonic(), self._runner.tp, None
        rank = command.rank_offset + tp.rank
        try:
            group = WeightGroup(command.address, command.port, rank, command.world_size, command.backend, command.name)
            self._groups[command.name] = group
        except ConfigError as problem:
            error = problem
        if not tp.least(error is None):
            self._groups.pop(command.name, None)
            raise ConfigError(_reason(error)) from error
        return Done(time.monotonic() - began)

    def _sleep(self, *, keeps_weights: bool) -> Done:
        """Give memory back. Raises CapacityError, with nothing changed, if a rank has no room for its copy."""
        began, memory, error = time.monotonic(), self._runner.sleep, None
        assert memory is not None, "the engine was made without enable_sleep_mode"
        try:
            if keeps_weights:
                memory.save()
        except (RuntimeError, CapacityError) as problem:
            error = problem
        if not self._runner.tp.least(error is None):
            memory.forget()
            raise CapacityError(
                f"host memory has no room for a copy of the weights ({_reason(error)}); use sleep(level=2)"
            ) from error
        for tag in TAGS:
            memory.give_back(tag)
        return Done(time.monotonic() - began)

    def _wake_up(self, tags: Sequence[Tag]) -> Done:
        began, memory = time.monotonic(), self._runner.sleep
        assert memory is not None, "an engine without this memory never sleeps"
        for tag in tags:
            memory.restore(tag)
        return Done(time.monotonic() - began)

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
            if isinstance(source, Received):
                source.drain()
            raise _failure(error, "nothing was changed") from error
        error = self._copy_all(update, source)
        if tp.least(error is None):
            return Done(time.monotonic() - began, update.num_tensors)
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
    return str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"


def _failure(error: BaseException | None, state: str) -> BaseException:
    """The error of an update that left the old weights in place. An interrupt stays what it is."""
    if error is not None and not isinstance(error, Exception):
        return error
    return WeightsError(f"{_reason(error)} ({state})")
