"""The executor that the settings ask for.

Job: choose. Owns: nothing. Does not know: how executors work.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.config import EngineConfig
from weft.executor.executor import Executor
from weft.executor.rank_process import StartedRank


def make_executor(config: EngineConfig, ranks: Sequence[StartedRank] = ()) -> Executor:
    """Start all ranks of the model. ``ranks``: those that ``begin_start`` has started for it.

    Raises:
        WeftError: a rank cannot start, and why.
    """
    if config.distributed_executor_backend == "uni":
        from weft.executor.in_process import InProcessExecutor

        return InProcessExecutor(config)
    from weft.executor.multi_process import MultiProcessExecutor

    return MultiProcessExecutor(config, ranks)
