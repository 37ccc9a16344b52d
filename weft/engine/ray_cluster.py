"""The connection to a Ray cluster: placement groups and actors.

Job: every call of Ray's interface. Owns: nothing; actors and placement groups belong to those who asked for them.
Does not know: what an actor's engine does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any

from weft.engine.ray_actor import EngineHost
from weft.errors import ConfigError

_connecting = threading.Lock()

_LOOK_S = 1.0
"""How long one look at a placement group waits."""


def check_installed() -> None:
    """Raises ConfigError if there is no Ray."""
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"replicas on a Ray cluster need {error.name}; install it with: pip install 'weft[ray]'"
        ) from error


def connect() -> None:
    """Join the cluster that ``RAY_ADDRESS`` names, or the one that runs on this machine.

    Raises:
        ConfigError: there is none, or it does not let this process in.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "auto")
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would warn that the signals stay as they are
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
    """Give SIGTERM back to who had it: Ray has set a handler of its own, which ends the process. In the main thread."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    signal.siginterrupt(signal.SIGTERM, False)


def this_address() -> str:
    """This machine's IP address, as the cluster knows it."""
    import ray

    return ray.util.get_node_ip_address()


def bundle_of(settings: Mapping[str, Any]) -> dict[str, float]:
    """What one replica needs, all of it on one machine: a GPU and a processor for each rank, or processors only."""
    import ray

    size = settings.get("tensor_parallel_size") or 1
    device = settings.get("device") or "auto"
    if device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0):
        return {"GPU": size, "CPU": size}
    return {"CPU": size}


async def reserve(bundle: Mapping[str, float], patience_s: float | None) -> Any:
    """A placement group of one bundle.

    Args:
        patience_s: how long to wait for room; None: as long as it takes.

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
    """Give the room back."""
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(Exception):  # the cluster has gone, and the room with it
        remove_placement_group(group)


def start_actor(group: Any, bundle: Mapping[str, float]) -> Any:
    """An ``EngineHost`` that has the whole bundle; Ray names its GPUs in ``CUDA_VISIBLE_DEVICES``."""
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
    """End its process at once; what it has started ends with it."""
    import ray

    with contextlib.suppress(Exception):  # it has gone already
        ray.kill(actor)
