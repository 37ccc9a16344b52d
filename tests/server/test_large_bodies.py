"""Large bodies: read in workers as they are read in the event loop, which nobody else notices."""

from __future__ import annotations

import concurrent.futures
import json
import time
from array import array
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from tests.patience import GUARD_S, stretched
from tests.server.running import RunningServer
from tests.whole import RUNS_LONG, takes_long
from weft.config import resolve
from weft.engine.chat_prompts import ChatPrompts
from weft.errors import RequestError
from weft.server import large_bodies
from weft.server.anthropic_messages import CountTokensRequest, MessagesRequest
from weft.server.large_bodies import BodyRead, PromptSetup, ReadBody, is_large
from weft.server.prompt_worker import PromptWorker
from weft.server.protocol import MAX_ENTRIES, ChatCompletionRequest, CompletionRequest
from weft.server.responses import ResponsesRequest
from weft.server.settings import ServerSettings
from weft.server.worker import decode, encode
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer

CONTEXT = 200_000
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = "/v1/chat/completions"
LONG = "word and, more 'words' \n" * 16_000
MANY = 20 if RUNS_LONG else 8
"""Times that the largest bodies hold it: they take seconds to read."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve(device="cpu").tokenizer_path)


@pytest.fixture(scope="module")
def worker() -> PromptWorker:
    return PromptWorker(encode(PromptSetup(resolve(device="cpu"), ServerSettings(), 500, "", True)))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(WEFT_FAKE_CONTEXT=str(CONTEXT))
    yield running.wait_ready()
    running.close()


def user(text: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def read(worker: PromptWorker, path: str, body: Any) -> tuple[BodyRead, list[int]]:
    value, blob = worker(encode(ReadBody(path)), json.dumps(body).encode())
    found = decode(encode(value), BodyRead)
    return found, array("I", blob).tolist()


@pytest.mark.parametrize(
    ("path", "kind", "body"),
    [
        (CHAT, ChatCompletionRequest, {"messages": user("Grüße"), "tools": [TOOL], "seed": 5, "echo": True}),
        ("/v1/responses", ResponsesRequest, {"input": "Grüße", "temperature": 0.5}),
        ("/v1/messages", MessagesRequest, {"messages": user("Grüße"), "max_tokens": 3}),
        ("/v1/messages/count_tokens", CountTokensRequest, {"messages": user([{"type": "text", "text": "Grüße"}])}),
    ],
)
def test_conversations(worker: PromptWorker, tokenizer: Tokenizer, path: str, kind: Any, body: dict[str, Any]) -> None:
    found, ids = read(worker, path, body | {"model": "m", "surprise": 1})
    chat = ChatPrompts(tokenizer).make(user("Grüße"), TemplateOptions(body.get("tools")), turn_boundaries=True)
    assert found.prompts is not None
    (prompt,) = found.prompts
    assert (prompt.text, ids, prompt.positions) == (chat.text, chat.token_ids, chat.turn_boundaries)
    assert (found.model, found.unknown, prompt.num_tokens) == ("m", ["surprise"], len(ids))
    request = decode(found.request, kind)
    kept = msgspec.to_builtins(msgspec.convert(body | {"model": "m"}, kind))
    for name, value in msgspec.to_builtins(request).items():
        assert value == kept[name] or name in ("messages", "input"), name
    if body.get("echo"):
        assert request.messages == body["messages"]


def test_prompts(worker: PromptWorker, tokenizer: Tokenizer) -> None:
    found, ids = read(worker, "/v1/completions", {"prompt": ["ab", "Grüße"], "checkpoint_positions": [1]})
    expected = [tokenizer.encode(text) for text in ("ab", "Grüße")]
    assert found.prompts is not None and ids == [*expected[0], *expected[1]]
    assert [(p.text, p.num_tokens, p.positions) for p in found.prompts] == [
        ("ab", len(expected[0]), [1]), ("Grüße", len(expected[1]), [1]),
    ]  # fmt: skip
    assert decode(found.request, CompletionRequest).prompt == ""
    found, ids = read(worker, "/v1/completions", {"prompt": [7, 8]})
    assert found.prompts is not None and ids == [7, 8] and found.prompts[0].text is None


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        (CHAT, {"messages": user("a " * 2000)}, None),
        (CHAT, {"messages": user("x"), "seed": 2**70}, "out of range"),
        (CHAT, {"messages": user("x") * (MAX_ENTRIES + 1)}, "messages has 16,385 entries"),
        (CHAT, {"messages": user([{"type": "text", "text": "x"}] * (MAX_ENTRIES + 1))}, "16,385 parts"),
        (CHAT, {"messages": user("x"), "tools": [TOOL] * 1025}, "tools has 1,025 entries; this server takes 1,024"),
        (CHAT, {"messages": user("x"), "stop": ["a"] * (MAX_ENTRIES + 1)}, "stop has 16,385 entries"),
        ("/v1/completions", {"prompt": [1] * 501}, "maximum context length is 500"),
        ("/tokenize", {}, "give either prompt or messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens holds -1"),
    ],
)
def test_refusals(worker: PromptWorker, path: str, body: dict[str, Any], error: str | None) -> None:
    if error is None:  # its length is checked where the request is accepted
        found, ids = read(worker, path, body)
        assert found.prompts is not None and len(ids) > 500
        return
    with pytest.raises(RequestError, match=error):
        read(worker, path, body)


def test_a_template_that_does_not_end_is_stopped(worker: PromptWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(*given: Any, **named: Any) -> None:
        while True:
            pass

    monkeypatch.setattr(worker._chats, "render", spin)
    with pytest.raises(RequestError, match="chat template took longer than 2 s"):
        read(worker, CHAT, {"messages": user("x")})


def test_images_are_left_to_the_process_that_has_their_processor() -> None:
    seeing = PromptWorker(encode(PromptSetup(resolve(device="cpu"), ServerSettings(), 500, None, True)))
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert read(seeing, CHAT, {"messages": user([part])})[0].prompts is None


def test_which_bodies_are_large() -> None:
    size = large_bodies.LARGE_BODY
    assert not is_large(b"," * size) and is_large(b"x" * (size + 1))
    assert not is_large(b";base64," + b"A" * size) and is_large(b";base64," + b"," * size)


@takes_long
def test_large_bodies_of_every_path(server: RunningServer) -> None:
    tokens = server.client.post("/tokenize", json={"prompt": LONG}).json()
    count = tokens["count"]
    assert count == len(tokens["tokens"]) > 100_000
    ids = tokens["tokens"][:100_000]
    text = server.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert LONG.startswith(text)
    prompt = server.client.post("/v1/completions", json={"prompt": ids, "max_tokens": 4, "echo": True}).json()
    assert prompt["usage"]["prompt_tokens"] == 100_000 and prompt["choices"][0]["text"].startswith(text)
    asked = text[:300_000]
    body = {"messages": user(asked), "max_tokens": 4}
    chat = server.client.post(CHAT, json=body).json()
    assert LONG.startswith(chat["choices"][0]["message"]["content"])
    num_tokens = server.client.post("/v1/messages/count_tokens", json={"messages": user(asked)}).json()["input_tokens"]
    assert chat["usage"]["prompt_tokens"] == num_tokens
    assert server.client.post("/v1/messages", json=body).json()["usage"]["input_tokens"] == num_tokens
    responses = {"input": asked, "max_output_tokens": 4}
    assert server.client.post("/v1/responses", json=responses).json()["usage"]["input_tokens"] == num_tokens
    wrong = server.client.post("/tokenize", json={"prompt": LONG, "model": "other"})
    assert wrong.status_code == 404
    too_long = server.client.post(CHAT, json={"messages": user(LONG * 3)})
    assert too_long.status_code == 400 and too_long.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body", "count", "status"),
    [
        (CHAT, {"messages": [{"role": ("user", "assistant")[i % 2], "content": "a"} for i in range(200_000)]}, 1, 400),
        pytest.param(CHAT, {"messages": user("x"), "tools": [TOOL] * 60_000}, 1, 400, marks=takes_long),
        ("/v1/completions", {"prompt": list(range(100, 1100)) * 1500}, 1, 400),
        pytest.param("/tokenize", {"prompt": LONG * MANY}, 1, 200, marks=takes_long),
        (CHAT, {"messages": user(LONG * MANY)}, 4 if RUNS_LONG else 2, 400),
    ],
    ids=["messages", "tools", "ids", "tokenize", "prompts"],
)
def test_nobody_waits_for_a_large_body(
    server: RunningServer, path: str, body: dict[str, Any], count: int, status: int
) -> None:
    """Here a pause may last 200 ms on an idle machine: other processes of the test run on its two processors."""
    content = json.dumps(body).encode()
    server.client.post("/tokenize", json={"prompt": LONG})  # the workers have started
    headers = {"Content-Type": "application/json"}

    def send() -> int:
        return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=GUARD_S).status_code

    late = 0.0
    with concurrent.futures.ThreadPoolExecutor(count) as threads:
        answers = [threads.submit(send) for _ in range(count)]
        while not all(answer.done() for answer in answers):
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            late = max(late, time.monotonic() - began)
            time.sleep(0.002)
    assert [answer.result() for answer in answers] == [status] * count
    assert late < stretched(0.2), late
