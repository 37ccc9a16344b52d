"""A rank of several: group, device, runner."""

from __future__ import annotations

import gc
import os
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch.distributed import Store

from weft.config import EngineConfig
from weft.parallel.process_group import ProcessGroup
from weft.processes.collector import collector_off
from weft.runner.memory import release_workspaces
from weft.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from weft.runner.rollouts import RankControl

_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",  # all ranks are on this machine, and nobody else should connect
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_GRAPH_REGISTER": "0",  # registering every buffer of a thousand captured sums would slow the start
}


class Rank:
    """Rank ``rank`` of ``size``, all on this machine. On GPUs, rank N uses device N. The end of the body leaves the
    group."""

    @collector_off()
    def __init__(self, config: EngineConfig, rank: int, size: int, store: Store) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        device = torch.device("cpu")
        if config.device == "cuda":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        self.group = ProcessGroup(rank, size, device, store)
        try:
            self.runner = ModelRunner(config, tp=self.group)
            self.group.least(0)  # no rank serves before all can
        except BaseException:
            self.group.close()
            raise

    @cached_property
    def control(self) -> RankControl:
        """The commands of this rank. Most engines need none."""
        from weft.runner.rollouts import RankControl

        return RankControl(self.runner)

    def close(self) -> None:
        """Free weights and caches, and leave the group."""
        self.__dict__.pop("control", None)
        if self.runner.sleep is not None:
            self.runner.sleep.close()
        del self.runner
        gc.collect()  # captured graphs before the memory that they use
        self.group.close()
        release_workspaces()

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
