"""The methods of ``LLM`` for training loops.

Job: bring the engine to rest, run a command, let the engine go on. Owns: nothing. Does not know: names of tensors,
ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from weft.errors import ConfigError
from weft.processes.interrupts import interrupts_held

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from weft.config import EngineConfig
    from weft.engine.core import EngineCore
    from weft.engine.rollouts import Rollouts
    from weft.request import Request

T = TypeVar("T")


class RolloutMethods:
    """New weights for an engine in this process; see docs/rollouts.md."""

    _core: EngineCore
    config: EngineConfig

    @abstractmethod
    def _take(self, changed: Iterable[Request]) -> None:
        """Note requests that got a token or ended. The next ``step`` returns their outputs."""

    @abstractmethod
    def _check_not_dead(self) -> None:
        """Raise EngineDeadError if the engine has died or was shut down."""

    @property
    def weight_version(self) -> int:
        """Version of the weights; 0 for those of the start."""
        return self._core.stats().weight_version

    def update_weights(
        self,
        items: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        mode: str = "wait",
        weight_version: int | None = None,
    ) -> int:
        """Copy new values into the weights, between two steps.

        Args:
            items: tensors under the names of the checkpoint, whole, in any order; or some of them. A collection is
                checked before anything changes. An iterator is checked as it is read, and copies are taken back.
            mode: "wait" runs open requests to their end first. "abort" ends open requests with the tokens so far.
                "keep" continues open requests with the new weights, from the next token on.
            weight_version: version of the new weights, above the present one; None: one more.

        Returns:
            The new version.

        Raises:
            ConfigError: ``mode`` or ``weight_version`` is not valid.
            WeightsError: a tensor does not fit. The old weights are served on.
            UnavailableError: the update failed in the middle, and the old weights are lost; update all of them.
            EngineDeadError: the engine has died, or was shut down.
        """
        from weft.runner.rollouts import TakeTensors
        from weft.weights.sources import Tensors

        def act(rollouts: Rollouts) -> None:
            rollouts.update(TakeTensors(rollouts.has_lost_weights), Tensors(items), weight_version)

        return self._update(act, mode)

    def update_weights_from_path(
        self, path: str | Path, *, mode: str = "wait", weight_version: int | None = None
    ) -> int:
        """Copy the safetensors files of a folder into the weights. See ``update_weights``."""
        from weft.runner.rollouts import LoadFiles

        def act(rollouts: Rollouts) -> None:
            rollouts.update(LoadFiles(str(path), rollouts.has_lost_weights), version=weight_version)

        return self._update(act, mode)

    def update_weights_from_ipc(
        self, descriptions: bytes | Sequence[bytes], *, mode: str = "wait", weight_version: int | None = None
    ) -> int:
        """Copy CUDA tensors of other processes on the same GPU into the weights. See ``update_weights``.

        Args:
            descriptions: what ``weft.weights.shared.share_weights`` returned; with several ranks, one from each GPU.
        """
        from weft.runner.rollouts import OpenHandles

        given = [descriptions] if isinstance(descriptions, bytes) else list(descriptions)

        def act(rollouts: Rollouts) -> None:
            rollouts.update(OpenHandles(given, rollouts.has_lost_weights), version=weight_version)

        return self._update(act, mode)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weft",
        backend: str | None = None,
    ) -> None:
        """Join a group of a trainer and engines (``weft.weights.group.WeightGroup``), and wait for the others.

        Args:
            rank_offset: rank of the engine's first rank in the group, at least 1. The trainer is rank 0.
            world_size: number of members, the trainer and all ranks of all engines.
            backend: "nccl" or "gloo"; None: the one of the device.

        Raises:
            ConfigError: an argument is not valid, or the members did not meet.
        """
        from weft.runner.rollouts import JoinGroup

        self._check_not_dead()
        group = JoinGroup(
            **group_arguments(self.config, master_address, master_port, rank_offset, world_size, group_name, backend)
        )
        self._rest(lambda rollouts: rollouts.join(group), "keep")

    def destroy_weights_update_group(self, group_name: str = "weft") -> None:
        """Leave a group."""
        self._rest(lambda rollouts: rollouts.leave(group_name), "keep")

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weft",
        *,
        mode: str = "wait",
        weight_version: int | None = None,
    ) -> int:
        """Copy tensors into the weights that the group's rank 0 broadcasts in this order. See ``update_weights``."""
        from weft.runner.rollouts import Receive

        def act(rollouts: Rollouts) -> None:
            whole = [list(shape) for shape in shapes]
            complete = rollouts.has_lost_weights
            rollouts.update(Receive(group_name, list(names), list(dtypes), whole, complete), version=weight_version)

        return self._update(act, mode)

    def sleep(self, level: int = 1, mode: str = "wait") -> None:
        """Give the memory of weights and caches back. Captured graphs stay valid.

        Args:
            level: 1 keeps a copy of the weights in host memory; 2 keeps none, so an update has to bring them.
            mode: what open requests do, see ``update_weights``; with "keep" they wait until the engine is awake.

        Raises:
            ConfigError: the engine was made without ``enable_sleep_mode``, or an argument is not valid.
            UnavailableError: the engine is asleep already.
            CapacityError: host memory has no room for the copy. The engine stays awake.
        """
        if not self.config.enable_sleep_mode:
            raise ConfigError("sleep() needs an engine that was made with enable_sleep_mode=True")
        self._rest(lambda rollouts: rollouts.sleep(level), mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Get memory back: "weights", "kv_cache", or all of it. Weights dropped by level 2 need an update then."""
        self._check_not_dead()
        self._core.rollouts.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether some memory is given back, so that no request can run."""
        return self._core.rollouts.is_sleeping

    def _update(self, act: Callable[[Rollouts], Any], mode: str) -> int:
        self._rest(act, mode)
        return self.weight_version

    def _rest(self, act: Callable[[Rollouts], T], mode: str) -> T:
        """Call ``act`` while the engine rests."""
        from weft.engine.rollouts import checked_mode

        pause_mode = checked_mode(mode)
        self._check_not_dead()
        rollouts = self._core.rollouts
        with interrupts_held(second_too=False):
            try:
                self._take(rollouts.pause(pause_mode))
                while not rollouts.is_quiet:
                    self._take(self._core.step())
                return act(rollouts)
            finally:
                rollouts.resume()


def group_arguments(
    config: EngineConfig, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str | None
) -> dict[str, Any]:
    """Fields of ``JoinGroup`` for an engine. Raises ConfigError if the group has no room for its ranks."""
    num_ranks = config.tensor_parallel_size
    if not 1 <= rank_offset <= world_size - num_ranks:
        raise ConfigError(
            f"rank_offset={rank_offset} and world_size={world_size} leave no room for the trainer and this "
            f"engine's {num_ranks} ranks"
        )
    chosen = backend or ("gloo" if config.device == "cpu" else "nccl")
    given = {"address": address, "port": port, "rank_offset": rank_offset, "world_size": world_size}
    return given | {"name": name, "backend": chosen}
