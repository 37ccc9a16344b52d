"""Ranks started by torchrun: ``torchrun --nproc-per-node 2 script.py``.

Every process runs the same script. When the script makes an engine, rank 0 continues with it. The other processes
become ranks of the engine until it is shut down, and then exit without running the rest of the script. The ranks find
each other through torchrun's store.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec

from weft.config.parallelism import is_launched
from weft.config.transport import decode_other
from weft.errors import ConfigError, WeftError
from weft.executor.worker import FAILED_STATUS, WorkerStart, encode_start, run_rank

if TYPE_CHECKING:
    from torch.distributed import Store

    from weft.executor.rank_process import RankProcess
    from weft.executor.ring import Writer

logger = logging.getLogger(__name__)

_KEY = "weft-start"
_PATIENCE = timedelta(minutes=10)
_decode = msgspec.msgpack.Decoder(WorkerStart, dec_hook=decode_other).decode


def _store() -> Store:
    """torchrun's store, in the process of its agent."""
    from torch.distributed import PrefixStore, TCPStore

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    leads = not is_agents and os.environ["RANK"] == "0"
    return PrefixStore("weft", TCPStore(host, port, is_master=leads, timeout=_PATIENCE, wait_for_workers=False))


def lead(start: WorkerStart, ring: Writer) -> tuple[Sequence[RankProcess], Store]:
    """Prepare rank 0. Returns the other ranks, and the store in which all ranks meet.

    Raises:
        ConfigError: torchrun has started a different number of processes, or some on other machines.
    """
    from weft.executor.rank_process import SiblingRank

    size, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if size != start.size:
        raise ConfigError(
            f"tensor_parallel_size={start.size}, but torchrun has started {size} processes; "
            f"use --nproc-per-node {start.size}"
        )
    if here != size:
        raise ConfigError(
            f"torchrun has started {size} processes on several machines, {here} of them here; tensor parallelism is "
            f"for the GPUs of one machine: use --nnodes 1 --nproc-per-node {size}"
        )
    store = _store()
    store.set(_KEY, encode_start(start))  # type: ignore[arg-type]  # bytes are accepted too
    return [SiblingRank(rank, ring) for rank in range(1, size)], store


def become_rank(settings: Mapping[str, Any]) -> None:
    """Become a rank if torchrun started this process and it is not rank 0. Does nothing otherwise, or if one rank is
    asked for.

    Raises:
        SystemExit: this process was a rank, and its engine was shut down or failed.
    """
    size, backend = settings.get("tensor_parallel_size") or 1, settings.get("distributed_executor_backend")
    if size == 1 or backend not in (None, "external_launcher") or not is_launched() or os.environ["RANK"] == "0":
        return
    store = _store()
    rank, start = int(os.environ["RANK"]), _decode(store.get(_KEY))
    sys.exit(_run(start, rank, lambda: store))


def _run(start: WorkerStart, rank: int, store: Callable[[], Store]) -> int:
    try:
        run_rank(start, rank, store, lambda report: logger.info("start-up of rank %d: %s", rank, report))
    except EOFError:
        return 0  # the script of rank 0 has ended without a shutdown
    except WeftError as error:
        print(f"rank {rank}: {error}", file=sys.stderr)
        return FAILED_STATUS
    return 0
