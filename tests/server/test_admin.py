"""The administrator's endpoints against a real server: names and fields of vLLM and SGLang, on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.test_weight_groups import described, free_port, train
from tests.patience import GUARD_S
from tests.ranks import fork_ranks
from tests.server.running import RunningServer, wait_until
from tests.tiny import make_checkpoint
from tests.whole import RUNS_LONG, takes_long
from weft import LLM, SamplingParams
from weft.cli import main

KEY = {"Authorization": "Bearer admin"}
PROMPT = [5, 6, 7, 8, 9, 10, 11]
PATHS = ("/pause", "/resume", "/sleep", "/wake_up", "/update_weights_from_disk", "/update_weights_from_distributed",
         "/init_weights_update_group", "/destroy_weights_update_group")  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [
        make_checkpoint("Qwen3NextForCausalLM", tmp_path_factory.mktemp("admin"), seed, with_tokenizer=True)
        for seed in (0, 1)
    ]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[RunningServer]:
    flags = ["--model", str(folders[0]), "--enable-admin-api", "--admin-key", "admin", "--enable-sleep-mode",
             "--max-num-seqs", "4", "--cpu-cache-gib", "0.05", "--device", "cpu", "--api-key", "caller",
             "--restart-engine"]  # fmt: skip
    running = RunningServer(*flags, module="weft")
    try:
        running.client.headers.update(KEY)
        yield running.wait_ready()
    finally:
        running.close()


def complete(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return server.client.post("/v1/completions", json=body | fields)


def token_ids(server: RunningServer) -> list[int]:
    response = complete(server)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


def post(server: RunningServer, path: str, **more: Any) -> dict[str, Any]:
    response = server.client.post(path, **more)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def tokens_of(folder: Path) -> list[int]:
    with LLM(str(folder), device="cpu", max_num_seqs=4, cpu_cache_gib=0.05) as llm:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        return list(llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_update_and_sleep(server: RunningServer, folders: list[Path]) -> None:
    old, new = map(tokens_of, folders)
    assert token_ids(server) == old != new
    found = post(server, "/update_weights_from_disk", json={"model_path": str(folders[1]), "weight_version": 4})
    assert found == {"success": True, "is_sleeping": False, "is_paused": False, "weight_version": 4}
    assert token_ids(server) == new
    (report,) = complete(server).json()["weft"]["prompts"]
    assert report["weight_version"] == 4 and report["weight_spans"] == [[[0, 4]]]
    assert "weft:weight_version" in server.client.get("/metrics").text
    assert post(server, "/sleep?level=1")["is_sleeping"]
    assert server.client.get("/is_sleeping").json()["is_sleeping"]
    refused = complete(server)
    assert refused.status_code == 503 and "asleep" in refused.json()["error"]["message"]
    busy = server.client.post("/update_weights_from_disk", json={"model_path": str(folders[0])})
    assert busy.status_code == 400 and "weights are asleep" in busy.json()["error"]["message"]
    assert post(server, "/wake_up?tags=weights")["is_sleeping"]
    assert not post(server, "/wake_up", json={"tags": ["kv_cache"]})["is_sleeping"]
    assert token_ids(server) == new
    post(server, "/sleep", json={"level": 2})
    post(server, "/wake_up")
    lost = complete(server)
    assert lost.status_code == 503 and "update all of them" in lost.json()["error"]["message"]
    post(server, "/update_weights_from_disk", json={"model_path": str(folders[0])})
    assert token_ids(server) == old


def test_pause_and_resume(server: RunningServer) -> None:
    want = token_ids(server)
    for mode in ("keep", "wait", "abort"):
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(complete(server, max_tokens=200)))  # noqa: B023
        thread.start()
        wait_until(lambda: server.client.get("/load").json()["num_running"] == 1, 10)
        assert post(server, f"/pause?mode={mode}")["is_paused"]
        later: list[list[int]] = []
        other = threading.Thread(target=lambda: later.append(token_ids(server)))  # noqa: B023
        other.start()
        other.join(0.3)
        assert not later, "a paused engine computes nothing"
        assert not post(server, "/resume")["is_paused"]
        thread.join(GUARD_S)
        other.join(GUARD_S)
        assert later == [want]
        (choice,) = answers[0].json()["choices"]
        assert choice["finish_reason"] == ("abort" if mode == "abort" else "length")
        assert choice["token_ids"][:8] == want[: len(choice["token_ids"])]


@pytest.mark.parametrize("path", PATHS)
def test_only_the_admin_may(server: RunningServer, path: str) -> None:
    for key, status in (("caller", 403), ("nobody", 401)):
        response = server.client.post(path, json={}, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == status


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/sleep", {"level": 7}, "level=7 is not valid"),
        ("/sleep", {"depth": 1}, "unknown field `depth`"),
        ("/pause", {"mode": "now"}, "Invalid enum value 'now'"),
        ("/wake_up", {"tags": ["graphs"]}, "are not valid"),
        ("/update_weights_from_disk", {}, "missing required field `model_path`"),
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "/nowhere is not a folder"),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}, "no group 'weft'"),
        ("/destroy_weights_update_group", {}, "no group 'weft'"),
    ],
)
def test_bad_fields(server: RunningServer, path: str, body: dict[str, Any], message: str) -> None:
    response = server.client.post(path, json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]
    assert complete(server).status_code == 200


def start(folder: Path, *flags: str) -> RunningServer:
    running = RunningServer("--model", str(folder), "--enable-admin-api", "--admin-key", "admin", "--enable-sleep-mode",
                            "--max-num-seqs", "4", "--device", "cpu", *flags, module="weft")  # fmt: skip
    running.client.headers.update(KEY)
    return running


def views(server: RunningServer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/replicas").json()["replicas"]
    return found


def states(server: RunningServer) -> list[str]:
    return [view["state"] for view in views(server)]


def of_each(server: RunningServer) -> list[list[int]]:
    """Tokens of prompts that are sent at once, so that each replica gets some."""
    with ThreadPoolExecutor(4) as threads:
        return list(threads.map(lambda _: token_ids(server), range(4)))


@takes_long
def test_replicas(folders: list[Path]) -> None:
    """Commands reach both; one that is started with the checkpoint's weights serves nobody before an update."""
    server = start(folders[0], "--data-parallel-size", "2")
    try:
        server.wait_ready()
        old, new = map(tokens_of, folders)
        assert of_each(server) == [old] * 4
        found = post(server, "/update_weights_from_disk", json={"model_path": str(folders[1])})
        assert found == {"success": True, "is_sleeping": False, "is_paused": False, "weight_version": 1}
        assert of_each(server) == [new] * 4 and all(view["num_decode_tokens"] for view in views(server))
        bad = server.client.post("/update_weights_from_disk", json={"model_path": "/nowhere"})
        assert bad.status_code == 400 and "/nowhere is not a folder" in bad.json()["error"]["message"]
        assert states(server) == ["up", "up"]
        os.kill(views(server)[0]["pid"], signal.SIGKILL)
        wait_until(lambda: states(server) == ["behind", "up"], GUARD_S)
        assert of_each(server) == [new] * 4
        asleep = post(server, "/sleep")
        assert asleep["is_sleeping"] and asleep["replicas_out"] == {"0": "it is behind, with weights of version 0"}
        assert complete(server).status_code == 503
        assert not post(server, "/wake_up")["is_sleeping"]
        found = post(server, "/update_weights_from_disk", json={"model_path": str(folders[0])})
        assert found["weight_version"] == 2 and "replicas_out" not in found
        assert states(server) == ["up", "up"] and of_each(server) == [old] * 4
        if RUNS_LONG:  # of one engine: test_a_restarted_engine_serves_no_old_weights
            for view in views(server):
                os.kill(view["pid"], signal.SIGKILL)
            wait_until(lambda: states(server) == ["behind", "behind"], GUARD_S)
            refused = complete(server)
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
            assert "no replica has weights of version 2; update all of them" in refused.json()["error"]["message"]
    finally:
        server.close()


@takes_long
def test_replicas_in_a_group(folders: list[Path]) -> None:
    """Each is a rank of the trainer's group."""
    server = start(folders[0], "--data-parallel-size", "2")
    port, given = free_port(), described(folders[1])
    with fork_ranks():
        trainer = multiprocessing.get_context("forkserver").Process(target=train, args=(folders[1], port, 3, 1))
        trainer.start()
    try:
        server.wait_ready()
        group = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "backend": "gloo"}
        small = server.client.post("/init_weights_update_group", json=group | {"world_size": 2})
        assert small.status_code == 400 and "leave no room for 2 replicas" in small.json()["error"]["message"]
        post(server, "/init_weights_update_group", json=group | {"world_size": 3})
        assert post(server, "/update_weights_from_distributed", json=given)["weight_version"] == 1
        assert of_each(server) == [tokens_of(folders[1])] * 4
        post(server, "/destroy_weights_update_group")
        trainer.join(GUARD_S)
        assert trainer.exitcode == 0
    finally:
        trainer.kill()
        server.close()


@takes_long
def test_several_api_processes(folders: list[Path]) -> None:
    """All API processes know the outcome of a command to any of them. A process that is started later is told."""
    server = start(folders[0], "--api-server-count", "2")

    def anew(method: str, path: str, **more: Any) -> httpx.Response:
        """Over a new connection, so by whichever process."""
        return httpx.request(method, server.url + path, headers=KEY, timeout=GUARD_S, **more)

    def statuses() -> set[int]:
        body = {"prompt": PROMPT, "max_tokens": 2}
        return {anew("POST", "/v1/completions", json=body).status_code for _ in range(12)}

    try:
        server.wait_ready()
        for version in range(1, 7):
            found = anew("POST", "/update_weights_from_disk", json={"model_path": str(folders[version % 2])})
            assert found.json()["weight_version"] == version, found.text
        assert token_ids(server) == tokens_of(folders[0])
        assert anew("POST", "/sleep").json()["is_sleeping"] and statuses() == {503}
        victim = server.api_pids[0]
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(server.api_pids) == 2 and victim not in server.api_pids, GUARD_S)
        assert statuses() == {503}
        assert {anew("GET", "/is_sleeping").json()["is_sleeping"] for _ in range(8)} == {True}
        assert not anew("POST", "/wake_up").json()["is_sleeping"] and statuses() == {200}
    finally:
        server.close()


def test_without_the_setting(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The setting needs a key of its own. Without it the endpoints do not exist (``test_api.py``)."""
    assert main(["serve", "--model", str(folders[0]), "--enable-admin-api"]) == 2
    assert "--admin-key" in capsys.readouterr().err


@takes_long
def test_a_restarted_engine_serves_no_old_weights(server: RunningServer, folders: list[Path]) -> None:
    """The last test of the shared server: its weights are then others."""
    check_restarts(server, folders, count=1)


@takes_long
def test_a_restarted_engine_of_two_api_processes(folders: list[Path]) -> None:
    running = start(folders[0], "--restart-engine", "--api-server-count", "2", "--cpu-cache-gib", "0.05")
    try:
        check_restarts(running.wait_ready(), folders, count=2)
    finally:
        running.close()


def check_restarts(server: RunningServer, folders: list[Path], count: int) -> None:
    old = token_ids(server)
    post(server, "/update_weights_from_disk", json={"model_path": str(folders[1]), "weight_version": 6})
    new = token_ids(server)
    assert old != new
    for version in range(7, 7 + count):
        os.kill(server.engine_pid, signal.SIGKILL)
        wait_until(lambda: server.client.get("/ready").status_code == 503, GUARD_S)
        wait_until(lambda: server.client.get("/ready").status_code == 200, GUARD_S)
        for response in (complete(server), complete(server)):
            assert response.status_code == 503 and int(response.headers["Retry-After"]) > 0
            refusal = response.json()["error"]["message"]
            assert f"weights of version {version - 1} are expected; update all of them" in refusal
        found = post(server, "/update_weights_from_disk", json={"model_path": str(folders[1])})
        assert found["weight_version"] == version and token_ids(server) == new
