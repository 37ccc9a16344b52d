"""The methods of ``AsyncLLM`` for training loops.

Job: send commands to the engine's process, and return its answers. Owns: nothing. Does not know: ranks, how an engine
comes to rest. Names and arguments are those of ``LLM``, or of vLLM's ``AsyncLLM`` where it has them.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from weft.engine.llm_rollouts import group_arguments

if TYPE_CHECKING:
    from torch import Tensor

    from weft.config import EngineConfig
    from weft.engine import wire


class AsyncRolloutMethods:
    """New weights for an engine in a process of its own; see docs/rollouts.md.

    Every method raises ConfigError for a command that was refused or failed, with the reason, and EngineDeadError if
    the engine has died.
    """

    config: EngineConfig | None

    @abstractmethod
    async def _control(self, action: str, mode: str = "keep", **arguments: Any) -> wire.Controlled:
        """Start the engine if need be, and have it carry out a command."""

    async def pause_generation(self, *, mode: str = "abort", wait_for_inflight_requests: bool = False) -> None:
        """Begin a pause, and wait until the engine rests. New requests wait for ``resume_generation``.

        Args:
            mode: what open requests do, see ``LLM.update_weights``.
            wait_for_inflight_requests: an older name of mode "wait".
        """
        await self._control("pause", "wait" if wait_for_inflight_requests else mode)

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._control("resume")

    async def is_paused(self) -> bool:
        """Whether the engine is paused."""
        return (await self._control("state")).is_paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give the memory of weights and caches back; see ``LLM.sleep``. Open requests end, by default."""
        await self._control("sleep", mode, level=level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Get memory back; see ``LLM.wake_up``."""
        await self._control("wake_up", tags=None if tags is None else list(tags))

    async def is_sleeping(self) -> bool:
        """Whether some memory is given back, so that no request can run."""
        return (await self._control("state")).is_sleeping

    async def update_weights(
        self,
        items: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor],
        *,
        mode: str = "wait",
        weight_version: int | None = None,
    ) -> int:
        """Copy tensors of this process into the weights; see ``LLM.update_weights``.

        The tensors travel in a temporary file. Tensors on the engine's GPU are faster with
        ``update_weights_from_ipc``.
        """
        with TemporaryDirectory(prefix="weft-weights-") as folder:
            await asyncio.to_thread(_write, dict(items), Path(folder))
            return await self.update_weights_from_path(folder, mode=mode, weight_version=weight_version)

    async def update_weights_from_path(
        self, path: str | Path, *, mode: str = "wait", weight_version: int | None = None
    ) -> int:
        """Copy the safetensors files of a folder into the weights. Returns the new version."""
        return await self._update("load", mode, weight_version, folder=str(path))

    async def update_weights_from_ipc(
        self, descriptions: bytes | Sequence[bytes], *, mode: str = "wait", weight_version: int | None = None
    ) -> int:
        """Copy CUDA tensors of processes on the same GPU into the weights; see ``LLM.update_weights_from_ipc``."""
        given = [descriptions] if isinstance(descriptions, bytes) else list(descriptions)
        return await self._update("open", mode, weight_version, descriptions=given)

    async def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weft",
        *,
        mode: str = "wait",
        weight_version: int | None = None,
    ) -> int:
        """Copy tensors into the weights that the group's rank 0 broadcasts in this order. Returns the new version."""
        whole = [list(shape) for shape in shapes]
        given = {"names": list(names), "dtypes": list(dtypes), "shapes": whole, "group": group_name}
        return await self._update("receive", mode, weight_version, **given)

    async def _update(self, action: str, mode: str, version: int | None, **arguments: Any) -> int:
        return (await self._control(action, mode, version=version, **arguments)).weight_version

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weft",
        backend: str | None = None,
    ) -> None:
        """Join a group of a trainer and engines, and wait for the others; see ``LLM.init_weights_update_group``."""
        await self._control("state")  # the engine has started, and its device is known
        assert self.config is not None
        given = group_arguments(self.config, master_address, master_port, rank_offset, world_size, group_name, backend)
        await self._control("join", **given)

    async def destroy_weights_update_group(self, group_name: str = "weft") -> None:
        """Leave a group."""
        await self._control("leave", name=group_name)


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write a file of tensors. The file format allows no shared memory, so each tensor is copied."""
    from safetensors.torch import save_file

    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / "model.safetensors")
