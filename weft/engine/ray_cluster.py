"""The connection to a Ray cluster: placement groups, actors, and the code that an actor runs.

Job: every call of Ray's interface. ``EngineHost`` starts an engine process on another machine and watches it. Owns:
nothing; actors and placement groups belong to the callers. Does not know: requests. Messages go between server and
engine directly.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from weft.engine.channel import EngineStart
from weft.errors import ConfigError
from weft.processes.child import Child
from weft.processes.heartbeat import Pulse


class EngineHost:
    """The actor. The server's machine calls its methods; ``beat`` may be called while ``run`` runs."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._pulse: Pulse | None = None

    def run(self, content: bytes, module: str) -> int:
        """Run an engine from its start to its end. Returns its exit status.

        Args:
            content: an ``EngineStart`` in msgpack; heartbeat and parent are filled in here.
            module: what ``python -m`` runs.
        """
        descriptor = os.memfd_create("weft-heartbeat")
        heartbeat = f"/proc/{os.getpid()}/fd/{descriptor}"  # a memory file leaves nothing behind
        start = replace(msgspec.msgpack.decode(content, type=EngineStart), heartbeat=heartbeat, parent_pid=os.getpid())
        self._pulse = Pulse(Path(heartbeat))
        self._child = Child(module)
        self._child.send(msgspec.msgpack.encode(start))
        status = self._child.wait()
        assert status is not None, "it was waited for without a limit"
        return status

    def beat(self) -> tuple[int, float, float]:
        """Return the engine's process id (0 before its start), its silence in seconds (0.0 before its first sign of
        life), and the machine's monotonic clock."""
        if self._child is None or self._pulse is None:
            return 0, 0.0, time.monotonic()
        self._pulse.poll(self._child.pid)
        silence_s = self._pulse.silence_s
        return self._child.pid, silence_s if math.isfinite(silence_s) else 0.0, time.monotonic()


_connecting = threading.Lock()

_LOOK_S = 1.0
"""Seconds that one look at a placement group waits."""


def check_installed() -> None:
    """Raise ConfigError if Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"replicas on a Ray cluster need {error.name}; install it with: pip install 'weft[ray]'"
        ) from error


def connect() -> None:
    """Join the cluster named by ``RAY_ADDRESS``, or the one on this machine.

    Raises:
        ConfigError: there is no cluster, or it refuses this process.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    logging.getLogger("ray").setLevel(logging.ERROR)  # Ray would warn that signals stay as they are
    try:
        with _connecting:
            if not ray.is_initialized():
                ray.init(address=address, configure_logging=False)
    except Exception as error:
        raise ConfigError(
            f"no Ray cluster can be reached at RAY_ADDRESS={address}: {error}; start one with `ray start --head`, and "
            "`ray start --address=HEAD:6379` on every further machine, with the same RAY_AUTH_MODE and token everywhere"
        ) from error


def keep_signals() -> None:
    """Restore the handler of SIGTERM after Ray replaced it with one that ends the process. Call it in the main
    thread."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)


def this_address() -> str:
    import ray

    return ray.util.get_node_ip_address()


def bundle_of(settings: Mapping[str, Any]) -> dict[str, float]:
    """The resources of one replica, all on one machine: a GPU and a processor for each rank, or processors only."""
    import ray

    size = settings.get("tensor_parallel_size") or 1
    device = settings.get("device") or "auto"
    if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0):
        return {"GPU": size, "CPU": size}
    return {"CPU": size}


async def reserve(bundle: Mapping[str, float], patience_s: float | None) -> Any:
    """Reserve a placement group of one bundle.

    Args:
        patience_s: seconds to wait for room; None: without a limit.

    Raises:
        ConfigError: there was no room in time.
    """
    from ray.util.placement_group import placement_group

    group = placement_group([dict(bundle)], strategy="STRICT_PACK")
    deadline = None if patience_s is None else time.monotonic() + patience_s
    try:
        while not await asyncio.to_thread(group.wait, _LOOK_S):
            if deadline is not None and time.monotonic() > deadline:
                raise ConfigError(_no_room(bundle))
    except BaseException:
        release(group)
        raise
    return group


def _no_room(bundle: Mapping[str, float]) -> str:
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = [f"{n['NodeManagerAddress']} has {_describe(n['Resources'], bundle)}" for n in nodes]
    return (
        f"a replica needs {_describe(bundle, bundle)} on one machine of the Ray cluster and found no room; "
        f"{'; '.join(each)}; some may be taken. Lower tensor_parallel_size or data_parallel_size, or add machines"
    )


def _describe(resources: Mapping[str, float], names: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0):g} {name}" for name in names)


def release(group: Any) -> None:
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(Exception):  # the cluster is gone, and the group with it
        remove_placement_group(group)


def start_actor(group: Any, bundle: Mapping[str, float]) -> Any:
    """Start an ``EngineHost`` with the whole bundle. Ray names its GPUs in ``CUDA_VISIBLE_DEVICES``."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    options = {
        "num_cpus": bundle["CPU"],
        "num_gpus": bundle.get("GPU", 0),
        "max_concurrency": 4,
        "max_restarts": 0,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
    }
    return ray.remote(EngineHost).options(**options).remote()


def kill_actor(actor: Any) -> None:
    """Kill the actor's process at once. Its children end with it."""
    import ray

    with contextlib.suppress(Exception):  # the actor is gone already
        ray.kill(actor)
