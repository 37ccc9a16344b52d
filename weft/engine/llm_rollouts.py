"""The methods of ``LLM`` for training loops.

Job: bring the engine to rest, run a command, let the engine go on. Owns: nothing. Does not know: names of tensors,
ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from weft.processes.interrupts import interrupts_held

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from weft.engine.core import EngineCore
    from weft.engine.rollouts import Rollouts
    from weft.request import Request

T = TypeVar("T")


class RolloutMethods:
    """New weights for an engine in this process; see docs/rollouts.md."""

    _core: EngineCore

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
            mode: what open requests do: "wait" runs them to their end first, "abort" ends them with the tokens that
                they have, "keep" lets them go on with the new weights from their next token on.
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
            rollouts.update(TakeTensors(bool(rollouts.unavailable)), Tensors(items), weight_version)

        return self._update(act, mode)

    def update_weights_from_path(
        self, path: str | Path, *, mode: str = "wait", weight_version: int | None = None
    ) -> int:
        """Copy the safetensors files of a folder into the weights. See ``update_weights``."""
        from weft.runner.rollouts import LoadFiles

        def act(rollouts: Rollouts) -> None:
            rollouts.update(LoadFiles(str(path), bool(rollouts.unavailable)), version=weight_version)

        return self._update(act, mode)

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
