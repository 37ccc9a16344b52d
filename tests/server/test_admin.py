"""The administrator's endpoints against a real server: names and fields of vLLM and SGLang, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import GUARD_S
from tests.server.running import RunningServer, wait_until
from tests.tiny import make_checkpoint
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
             "--max-num-seqs", "4", "--cpu-cache-gib", "0.05", "--device", "cpu", "--api-key", "caller"]  # fmt: skip
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


def test_without_the_setting(folders: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The endpoints do not exist, and the setting needs a key of its own and one engine."""
    for flags, message in (
        ([], "--admin-key"),
        (["--admin-key", "k", "--api-server-count", "2"], "one API process"),
        (["--admin-key", "k", "--data-parallel-size", "2"], "one engine"),
    ):
        assert main(["serve", "--model", str(folders[0]), "--enable-admin-api", *flags]) == 2
        assert message in capsys.readouterr().err
    running = RunningServer()
    try:
        assert running.wait_ready().client.post("/sleep").status_code == 404
    finally:
        running.close()
