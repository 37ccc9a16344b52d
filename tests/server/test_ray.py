"""Replicas on a Ray cluster: two nodes on this machine, with token authentication."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.patience import GUARD_S
from tests.server.fake_engine import CAPACITY, SLOW
from tests.server.running import RunningServer, is_alive, wait_until
from tests.server.test_admin import of_each, post, start, states, tokens_of, views
from tests.server.test_replicas import Server, serve
from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft.engine import ray_cluster, wire
from weft.errors import ConfigError

if find_spec("ray") is None:
    pytest.skip("Ray is not installed (pip install 'weft[ray]')", allow_module_level=True)

WHOLE_NODE = {"data_parallel_backend": "ray", "tensor_parallel_size": 2}
"""Two processors for two ranks: all that a node has."""

LIMIT_S = GUARD_S


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_gcs_server_port_wait_time_s", "120")  # a busy machine may need more than 20 seconds
        import ray

        cluster = two_nodes()
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


def two_nodes() -> Any:
    """A cluster. A node gives up after 30 seconds, which a busy machine may need."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20}
    for is_last in (False, False, True):
        try:
            cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
            cluster.add_node(**node)
            return cluster
        except Exception as error:
            if is_last or "timed out during startup" not in str(error):
                raise
    raise AssertionError("the last one returned or raised")


def engines(server: Server) -> list[int]:
    return [member.process.pid for member in server.set.members if member.process is not None]


def num_free() -> float:
    """Processors of the cluster that nobody has."""
    import ray

    return ray.available_resources().get("CPU", 0)


def run(body: Callable[[Server], Awaitable[None]], **settings: Any) -> Server:
    """On a set that is ready; nothing is left of it, on no node."""
    pids: list[int] = []

    async def watched(server: Server) -> None:
        try:
            await body(server)
        finally:
            await server.until(lambda: all(engines(server)))
            pids.extend(engines(server))

    server = serve(watched, **WHOLE_NODE | settings)
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)) and num_free() == 4, LIMIT_S)
    return server


@takes_long
def test_two_replicas_on_two_nodes_and_one_killed_under_load(cluster: Any) -> None:
    """Requests without a seen token start anew on the other node, the rest end with an error. The replica returns."""

    async def body(server: Server) -> None:
        assert server.capacity is not None and server.capacity.max_num_seqs == 2 * CAPACITY.max_num_seqs
        assert num_free() == 0, "each replica has a node to itself"
        places = [server.ask(f"r{i}", [100 + i, 7, 8]) for i in range(4)]
        assert sorted(places) == [0, 0, 1, 1]
        await server.until(lambda: len(server.ends) == 4)
        assert server.tokens == {f"r{i}": [100 + i, 7, 8] for i in range(4)}

        seen = server.ask("seen", [5] * 100, count=4000, priority=SLOW)
        other = server.ask("other", [6] * 100, count=4000, priority=SLOW)
        assert {seen, other} == {0, 1}
        await server.until(lambda: bool(server.tokens.get("seen")) and bool(server.tokens.get("other")))
        await server.until(lambda: all(engines(server)))
        victim = engines(server)[seen]
        os.kill(victim, signal.SIGSTOP)
        assert server.ask("unseen", [5] * 100) == seen, "its prompt is cached there"
        os.kill(victim, signal.SIGKILL)
        await server.until(lambda: "unseen" in server.ends and "seen" in server.ends)
        assert server.ends["seen"] == "error" and server.tokens["unseen"] == [5] * 3
        length = len(server.tokens["other"])
        await server.until(lambda: len(server.tokens["other"]) > length)
        await server.until(lambda: server.set.members[seen].is_ready)
        assert server.set.members[seen].restarts.num == 1 and server.status is None
        server.set.send(wire.FinishRequests(["other"]))
        assert victim not in engines(server)

    run(body)


@takes_long  # tests/server/test_replicas.py: a replica on this machine
def test_a_node_is_lost_and_another_one_comes(cluster: Any) -> None:
    """Its replica's requests go elsewhere or end; the replica waits for a machine with room, and starts there."""

    async def body(server: Server) -> None:
        names = [f"r{i}" for i in range(2)]
        places = {server.ask(name, [5 + i] * 100, count=4000, priority=SLOW): name for i, name in enumerate(names)}
        await server.until(lambda: all(server.tokens.get(name) for name in names) and all(engines(server)))
        before = engines(server)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        await server.until(lambda: bool(server.ends))
        (lost,) = (index for index, name in places.items() if name in server.ends)
        other = places[1 - lost]
        assert server.ends == {places[lost]: "error"} and server.status is None
        assert server.ask("now", [9] * 5) == 1 - lost, "the one that is left"
        await server.until(lambda: "now" in server.ends)
        await server.until(lambda: not is_alive(before[lost]))
        assert not server.set.members[lost].is_ready
        cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        await server.until(lambda: server.set.members[lost].is_ready)
        assert other not in server.ends and engines(server)[1 - lost] == before[1 - lost]
        server.set.send(wire.FinishRequests([other]))

    run(body)


def test_a_replica_that_has_no_room_is_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.replicas.PLACEMENT_PATIENCE_S", 0.0)

    async def main() -> Server:
        server = Server(1, data_parallel_backend="ray", tensor_parallel_size=3)
        await server.until(lambda: server.status is not None)
        await server.set.stop(grace_s=0.0)
        return server

    server = asyncio.run(main())
    assert server.status == wire.FAILED_STATUS
    failed = next(m for m in server.others if isinstance(m, wire.Failed))
    assert "a replica needs 3 CPU on one machine of the Ray cluster" in failed.message and failed.user_error


@takes_long  # two ranks on one node, and servers over the other executors: CI
def test_a_server_over_ray(cluster: Any) -> None:
    running = RunningServer("--distributed-executor-backend", "ray", "--tp", "2", "--device", "cpu")
    try:
        running.wait_ready()
        assert running.chat("hello").status_code == 200
        assert "weft:replica_up{" in running.client.get("/metrics").text
        assert running.stop() == 0
    finally:
        running.close()


@takes_long
def test_two_ranks_on_one_node_generate_what_one_generates(cluster: Any) -> None:
    from weft import LLM, SamplingParams

    prompt = list(range(300, 340))
    with LLM(device="cpu", cpu_cache_gib=0.05, max_num_seqs=2, skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
        alone = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids

    async def body(server: Server) -> None:
        server.ask("r", prompt, count=8)
        await server.until(lambda: "r" in server.ends)
        assert server.tokens["r"] == alone

    run(body, count=1, module="weft.engine.process", cpu_cache_gib=0.05, max_num_seqs=2)


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"need ray; install it with: pip install 'weft\[ray\]'"):
        ray_cluster.check_installed()


@takes_long
def test_commands_of_a_training_loop(cluster: Any, tmp_path: Path) -> None:
    """Both replicas get new weights. A replica that is started again lacks the new weights and gets no requests.
    ``test_admin.py`` tests commands to replicas without Ray."""
    folders = [
        make_checkpoint("Qwen3ForCausalLM", tmp_path / name, seed, with_tokenizer=True)
        for seed, name in enumerate(("old", "new"))
    ]
    server = start(folders[0], "--data-parallel-size", "2", "--data-parallel-backend", "ray")
    try:
        server.wait_ready()
        old, new = map(tokens_of, folders)
        assert of_each(server) == [old] * 4
        assert post(server, "/update_weights_from_disk", json={"model_path": str(folders[1])})["weight_version"] == 1
        assert of_each(server) == [new] * 4 and all(view["num_decode_tokens"] for view in views(server))
        assert post(server, "/sleep")["is_sleeping"] and not post(server, "/wake_up")["is_sleeping"]
        os.kill(views(server)[0]["pid"], signal.SIGKILL)
        wait_until(lambda: states(server) == ["behind", "up"], LIMIT_S)
        assert of_each(server) == [new] * 4
        assert server.stop() == 0
    finally:
        server.close()
