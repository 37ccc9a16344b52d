"""The API over real sockets, with the fake engine: shapes, streaming, limits, errors."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import APIError, BadRequestError, NotFoundError, OpenAI

from tests.patience import GUARD_S
from tests.server.fake_engine import BREAK, CUT, NAN, SLOW
from tests.server.running import RunningServer, chat_body, wait_until
from weft.outputs import Logprob
from weft.server.logprobs import completion_logprobs
from weft.server.protocol import CompletionRequest
from weft.server.sampling import completion_params
from weft.server.settings import ServerSettings

UNICODE = "Grüße aus 東京 😀👩‍👩‍👧 ok"


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(response: httpx.Response) -> list[Any]:
    """The events of a stream; it must end with [DONE]."""
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""], lines[-3:]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def say(client: OpenAI, text: str, **fields: Any) -> Any:
    return client.chat.completions.create(model="weft-mini", messages=[{"role": "user", "content": text}], **fields)


# -- chat ------------------------------------------------------------------------------------------------------------


def test_chat(client: OpenAI) -> None:
    answer = say(client, UNICODE)
    assert answer.choices[0].message.content == UNICODE and answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.model_extra["weft"]["prompts"][0]["time_to_first_token_s"] >= 0


@pytest.mark.parametrize("stop", [None, "京", ["zzz", "ok"]])
@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_whole(client: OpenAI, stop: Any, n: int) -> None:
    whole = say(client, UNICODE, stop=stop, n=n)
    texts, reasons = [""] * n, [None] * n
    for chunk in say(client, UNICODE, stop=stop, n=n, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices] == ["stop"] * n
    if stop == "京":
        assert texts[0] == "Grüße aus 東" and whole.choices[0].model_extra["stop_reason"] == "京"


def test_stream_shape(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.chat("one two three four", stream=True, stream_options=options))
    first = chunks[0]["choices"][0]["delta"]
    assert first["role"] == "assistant" and first["content"]
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:-1])
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert all(c["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"] for c in chunks)
    plain = events(server.chat("one two", stream=True))
    assert all("usage" not in chunk and chunk["choices"] for chunk in plain)
    assert [c["choices"][0]["finish_reason"] for c in plain][-1] == "stop"


@pytest.mark.parametrize("with_ids", [False, True])
def test_every_chunk_has_the_same_form(server: RunningServer, with_ids: bool) -> None:
    """Chunks in the middle of a stream are put together from parts that were encoded before."""
    body = chat_body('a "quoted" \\ line\nand Grüße', stream=True, return_token_ids=with_ids)
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"priority": SLOW, "max_tokens": 12})
    middle = [chunk for chunk in events(response)[1:-1] if "content" in chunk["choices"][0]["delta"]]
    assert middle
    for chunk in middle:
        assert list(chunk) == ["id", "object", "created", "model", "choices"]
        assert list(chunk["choices"][0]) == ["index", "delta", "logprobs", "finish_reason", *["token_ids"] * with_ids]
        assert list(chunk["choices"][0]["delta"]) == ["content"]
        assert "data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False) in response.text


def test_length_and_token_ids(server: RunningServer) -> None:
    choice = server.chat("one two three", max_completion_tokens=2, return_token_ids=True).json()["choices"][0]
    assert choice["finish_reason"] == "length" and len(choice["token_ids"]) == 2


def test_alternatives_of_one_name_do_not_take_the_chosen_ones_place() -> None:
    entry = {7: Logprob(-3.0, 3, "\ufffd"), 8: Logprob(-0.1, 1, "\ufffd"), 9: Logprob(-2.5, 2, "a")}
    shown, _ = completion_logprobs([entry], 2, as_ids=False)
    assert shown["top_logprobs"] == [{"\ufffd": -3.0, "a": -2.5}] and shown["token_logprobs"] == [-3.0]


def test_without_a_tokenizer() -> None:
    """Token ids in, token ids out; what needs text is refused by name."""
    running = RunningServer("--skip-tokenizer-init")
    try:
        post = running.wait_ready().client.post
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 2, "return_token_ids": True}
        choice = post("/v1/completions", json=body).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert all(len(alternatives) >= 2 for alternatives in choice["logprobs"]["top_logprobs"])
        for field, value in (("echo", True), ("prompt", "a"), ("stop", "a"), ("bad_words", ["a"])):
            for stream in (False, True):
                refused = post("/v1/completions", json=body | {field: value, "logprobs": None, "stream": stream})
                assert refused.status_code == 400 and refused.json()["error"]["param"] == field
                assert "skip_tokenizer_init" in refused.json()["error"]["message"]
    finally:
        running.close()


def test_chat_logprobs(client: OpenAI) -> None:
    answer = say(client, "abc", logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content).startswith("abc")
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -1.0, -9999.0]
    assert content[0].logprob == -1.0 and content[0].bytes == list(content[0].token.encode())
    streamed = [
        e for c in say(client, "abc", logprobs=True, top_logprobs=3, stream=True) for e in c.choices[0].logprobs.content
    ]
    assert streamed == content


def test_prompt_logprobs_and_ids_of_a_chat(server: RunningServer) -> None:
    fields: dict[str, Any] = {"prompt_logprobs": 1, "return_token_ids": True}
    answer = server.chat("abc", **fields).json()
    ids = answer["prompt_token_ids"]
    assert len(ids) == answer["usage"]["prompt_tokens"] == len(answer["prompt_logprobs"])
    assert answer["prompt_logprobs"][0] is None and answer["prompt_logprobs"][1][str(ids[1])]["logprob"] == -1.0
    chunks = events(server.chat("abc", stream=True, return_token_ids=True))
    assert chunks[0]["prompt_token_ids"] == ids and not any("prompt_token_ids" in c for c in chunks[1:])
    refused = server.chat("abc", stream=True, prompt_logprobs=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"
    body = {"prompt": ["ab", "cd"], "stream": True, "return_token_ids": True, "n": 2}
    told = [c["choices"][0] for c in events(server.client.post("/v1/completions", json=body))]
    assert sorted(c["index"] for c in told if "prompt_token_ids" in c) == [0, 1, 2, 3]


def test_bytes_of_split_characters_are_true(server: RunningServer) -> None:
    content = server.chat("東", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).startswith("東".encode())
    assert len(content[0]["bytes"]) < 3 and content[0]["token"] == "\ufffd"


def test_a_prompt_is_cut_on_the_left(server: RunningServer) -> None:
    ids = server.client.post("/tokenize", json={"prompt": "one two three four"}).json()["tokens"]
    for keep, kept in ((2, ids[-2:]), (len(ids) + 5, ids), (-1, ids)):
        body = {"prompt": "one two three four", "truncate_prompt_tokens": keep, "return_token_ids": True, "echo": True}
        choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
        assert choice["prompt_token_ids"] == kept and choice["text"].startswith("one" if kept == ids else "our")
    long = server.chat("x " * 6000, truncate_prompt_tokens=-1, max_tokens=10)
    assert long.status_code == 200 and long.json()["usage"]["prompt_tokens"] == 4086
    for bad in (0, -2):
        assert server.chat("x", truncate_prompt_tokens=bad).json()["error"]["param"] == "truncate_prompt_tokens"


def test_reasoning_can_be_left_out(server: RunningServer) -> None:
    text = "<think>\nhm, hm\n</think>\n\nyes"
    message = server.chat(text, include_reasoning=False).json()["choices"][0]["message"]
    assert message["content"] == "yes" and not message.get("reasoning") and not message.get("reasoning_content")
    deltas = [c["choices"][0]["delta"] for c in events(server.chat(text, stream=True, include_reasoning=False))]
    assert not any(d.get("reasoning") for d in deltas)
    assert "".join(d.get("content") or "" for d in deltas) == "yes"
    assert server.chat("x", reasoning_effort="huge").json()["error"]["param"] == "reasoning_effort"


def test_whole_numbers_may_be_written_with_a_point(server: RunningServer) -> None:
    assert server.chat("one two three", max_tokens=2.0).json()["usage"]["completion_tokens"] == 2


def test_reasoning_is_told_apart(server: RunningServer) -> None:
    text = "<think>\nhm, hm\n</think>\n\nyes"
    message = server.chat(text).json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm, hm", "hm, hm", "yes")
    deltas = [c["choices"][0]["delta"] for c in events(server.chat(text, stream=True))]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm, hm"
    assert "".join(d.get("content") or "" for d in deltas) == "yes"


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n' * 2


def test_tool_calls(client: OpenAI) -> None:
    answer = say(client, CALLS, tools=[TOOL])
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert [c.function.arguments for c in answer.choices[0].message.tool_calls] == ['{"a": 1}'] * 2
    calls = [
        c for chunk in say(client, CALLS, tools=[TOOL], stream=True) for c in chunk.choices[0].delta.tool_calls or []
    ]
    assert [(c.index, c.function.name) for c in calls] == [(0, "add"), (1, "add")]
    one = say(client, CALLS, tools=[TOOL], parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1 and one.message.content is None and one.finish_reason == "tool_calls"
    untold = say(client, CALLS, tools=[TOOL], tool_choice="none")
    assert untold.choices[0].finish_reason == "stop" and "<tool_call>" in untold.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_half_a_call_is_no_content(server: RunningServer, stream: bool) -> None:
    answer = server.chat(CALLS, tools=[TOOL], max_tokens=12, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in events(answer)]
        assert choices[-1]["finish_reason"] == "length" and not any(c["delta"].get("content") for c in choices)
    else:
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]


def test_a_conversation_with_tools_comes_back(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "th"}, {"type": "text", "text": "anks"}]},
    ]
    body = {"messages": messages, "tools": [TOOL]}
    assert server.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "thanks"


# -- completions -----------------------------------------------------------------------------------------------------


def test_completions(client: OpenAI) -> None:
    answer = client.completions.create(model="weft-mini", prompt="abcdef ghi", temperature=0)
    assert answer.choices[0].text == "abcdef ghi" and answer.choices[0].finish_reason == "stop"
    assert (
        client.completions.create(
            model="weft-mini", prompt="ab", extra_body={"ignore_eos": True}
        ).usage.completion_tokens
        == 16
    )


def test_batched_prompts_and_token_ids(server: RunningServer) -> None:
    body = {"prompt": ["hello there", "you"], "n": 2, "echo": True}
    choices = server.client.post("/v1/completions", json=body).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert [c["text"] for c in choices] == ["hello therehello there"] * 2 + ["youyou"] * 2
    streamed = [""] * 4
    for chunk in events(server.client.post("/v1/completions", json=body | {"stream": True})):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == [c["text"] for c in choices]
    ids = server.client.post("/tokenize", json={"prompt": "you"}).json()["tokens"]
    for prompt in (ids, [ids, ids]):
        choices = server.client.post("/v1/completions", json={"prompt": prompt, "echo": True}).json()["choices"]
        assert {c["text"] for c in choices} == {"youyou"}


def test_echo_with_logprobs_and_no_new_tokens(server: RunningServer) -> None:
    body = {"prompt": "abc def", "echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True, "stop": "a"}
    answer = server.client.post("/v1/completions", json=body).json()
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == "abc def" and "".join(logprobs["tokens"]) == "abc def"
    assert logprobs["token_logprobs"][0] is None and set(logprobs["token_logprobs"][1:]) == {-1.0}
    assert logprobs["text_offset"] == [sum(map(len, logprobs["tokens"][:i])) for i in range(len(logprobs["tokens"]))]
    assert answer["usage"]["completion_tokens"] == 0 and choice["token_ids"] == []
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    with server.client.stream("POST", "/v1/completions", json=body | {"logprobs": None, "stream": True}) as response:
        chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert not any(choice.get("token_ids") for chunk in chunks for choice in chunk["choices"])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(("logprobs", "prompt", "computed"), [(2, None, 2), (2, 5, 5), (2, 0, 2), (0, -1, -1)])
def test_as_many_prompt_logprobs_as_asked_for_beside_echo(logprobs: int, prompt: int | None, computed: int) -> None:
    request = CompletionRequest(prompt="abc", echo=True, logprobs=logprobs, prompt_logprobs=prompt)
    assert completion_params(request, ServerSettings()).prompt_logprobs == computed


def test_prompt_logprobs_beside_more_that_echo_shows(server: RunningServer) -> None:
    body = {"prompt": "abc def", "echo": True, "logprobs": 1, "prompt_logprobs": 0, "max_tokens": 0}
    choice = server.client.post("/v1/completions", json=body).json()["choices"][0]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1] * (len(choice["logprobs"]["tokens"]) - 1)
    assert max(map(len, choice["logprobs"]["top_logprobs"][1:])) == 2
    refused = server.client.post("/v1/completions", json=body | {"prompt_logprobs": -2})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "prompt_logprobs"


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": 17}, "n"),
        ({"n": 10**9}, "n"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 30000}]}, "prompt"),
        ({"tools": [{"type": "web"}]}, "tools"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"request_id": "a\nb"}, "request_id"),
        ({"priority": 2**40}, "priority"),
        ({"min_tokens": 2**70}, "min_tokens"),
        ({"min_tokens": 5, "tools": [TOOL], "tool_choice": "required"}, "min_tokens"),
        ({"ignore_eos": True, "tools": [TOOL], "tool_choice": "required"}, "ignore_eos"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_bad_chat_fields(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        response = server.client.post("/v1/chat/completions", json={**chat_body("x"), **fields, "stream": stream})
        if stream and param == "stream_options":
            continue
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (
            error["param"] == param and error["type"] == "invalid_request_error" and param in error["message"] + param
        )


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}',
        b"[" * 100_000, b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}", b'{"prompt": []}', b'{"prompt": [1, "x"]}',
        b'{"prompt": [[]]}', b'{"prompt": [-1]}', b'{"prompt": [2048]}', b'{"prompt": ""}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "min_tokens": 99999999999999999999999}', b'{"prompt": [99999999999999999999]}',
    ],
)  # fmt: skip
def test_bad_bodies(server: RunningServer, body: bytes) -> None:
    response = server.client.post("/v1/completions", content=body)
    assert response.status_code == 400 and response.json()["error"]["message"]


def test_max_tokens_beyond_the_context_is_refused_with_the_numbers(server: RunningServer) -> None:
    for path, prompt in (("/v1/chat/completions", chat_body("hi")), ("/v1/completions", {"prompt": [5, 6, 7]})):
        response = server.client.post(path, json=prompt | {"max_tokens": 10**9})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "max_tokens", "context_length_exceeded")
        assert "4096" in error["message"] and "1000000000" in error["message"]
    room = 4096 - 3
    assert f"ask for {room} or fewer" in error["message"]
    fitting = {"prompt": [5, 6, 7], "max_tokens": room, "stop_token_ids": list(range(64))}
    assert server.client.post("/v1/completions", json=fitting | {"max_tokens": room + 1}).status_code == 400
    assert server.client.post("/v1/completions", json=fitting).status_code == 200
    unasked = {"prompt": [5] * 4090}  # the default of 16 is lowered
    assert server.client.post("/v1/completions", json=unasked).status_code == 200


def test_agents_may_ask_for_more_tokens_than_the_context_has(server: RunningServer) -> None:
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32000}
    assert server.client.post("/v1/messages", json=message).status_code == 200
    assert server.client.post("/v1/responses", json={"input": "hi", "max_output_tokens": 32000}).status_code == 200


def test_a_prompt_beyond_the_context_is_told_in_openais_words(server: RunningServer) -> None:
    for path, body in (("chat/completions", chat_body("x " * 6000)), ("completions", {"prompt": "x " * 6000})):
        response = server.client.post(f"/v1/{path}", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "maximum context length is 4096 tokens" in error["message"]


def test_other_refusals(server: RunningServer, client: OpenAI) -> None:
    with pytest.raises(NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(BadRequestError, match="temperature"):
        say(client, "x", temperature=1000)
    assert server.client.post("/sleep").status_code == 404, "only with --enable-admin-api"
    nothing = server.client.get("/nothing")
    assert nothing.status_code == 404 and "/openapi.json" in nothing.json()["error"]["message"]
    wrong = server.client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET is not allowed here; allowed: POST"
    assert server.client.post("/v1/completions", content=b"x" * (9 << 20)).status_code == 413
    assert server.client.get("/health", headers={"Host": "evil.example"}).status_code == 403
    too_many = server.client.post("/v1/completions", json={"prompt": ["x"] * 10, "n": 5})
    assert too_many.status_code == 400 and "48" in too_many.json()["error"]["message"]
    assert say(client, "still here").choices[0].message.content == "still here"


def test_what_a_web_page_may_send_is_refused(server: RunningServer) -> None:
    body = json.dumps(chat_body("x"))
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = server.client.post("/v1/chat/completions", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415, kind
    for headers in ({"Content-Type": "application/json; charset=utf-8"}, {"Origin": server.url}, {}):
        assert server.client.post("/v1/chat/completions", content=body, headers=headers).status_code == 200
    refused = server.client.post("/v1/chat/completions", content=body, headers={"Origin": "https://evil.example"})
    assert refused.status_code == 403 and "--allowed-origins" in refused.json()["error"]["message"]


def test_compressed_bodies_are_refused(server: RunningServer) -> None:
    body = json.dumps(chat_body("x")).encode()
    headers = {"Content-Type": "application/json"}
    for encoding, status in (("gzip", 415), ("br", 415), ("identity", 200), ("", 200)):
        given = headers | {"Content-Encoding": encoding}
        answer = server.client.post("/v1/chat/completions", content=body, headers=given)
        assert answer.status_code == status, encoding
    assert (
        "without compression"
        in server.client.post(
            "/tokenize", content=gzip.compress(body), headers=headers | {"Content-Encoding": "gzip"}
        ).text
    )


def test_every_response_has_a_request_id_and_a_callers_own_comes_back(server: RunningServer) -> None:
    """The headers behave like those of vLLM's --enable-request-id-headers."""
    calls: list[tuple[str, str, Any]] = [
        ("GET", "/health", None), ("GET", "/nothing", None), ("GET", "/", None), ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/v1/chat/completions", chat_body("x")), ("POST", "/v1/chat/completions", {}),
        ("POST", "/v1/chat/completions", chat_body("x", stream=True)),
    ]  # fmt: skip
    for method, path, body in calls:
        ids = set()
        for given in (None, None, "my-id", "no good", "x" * 129):
            headers = {} if given is None else {"X-Request-Id": given}
            answer = server.client.request(method, path, json=body, headers=headers)
            assert len(answer.headers.get_list("x-request-id")) == 1
            assert (answer.headers["x-request-id"] == given) is (given == "my-id")
            ids.add(answer.headers["x-request-id"])
        assert len(ids) == 5


def test_trailers_are_no_headers(server: RunningServer) -> None:
    body = json.dumps(chat_body("x")).encode()
    url = httpx.URL(server.url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nTransfer-Encoding: chunked\r\n"
    head += "Connection: close\r\nTrailer: Host\r\n\r\n"
    trailers = b"Host: evil.example\r\nContent-Encoding: gzip\r\n"
    with socket.create_connection((url.host, url.port or 80), timeout=GUARD_S) as link:
        link.sendall(head.encode() + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers))
        assert link.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_audio_is_refused_by_name(server: RunningServer) -> None:
    for kind in ("input_audio", "audio_url"):
        content = [{"type": kind, kind: {"data": "x"}}]
        refused = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
        assert refused.status_code == 400 and "audio is not supported" in refused.json()["error"]["message"]


def test_unknown_fields_are_ignored_with_one_warning(server: RunningServer) -> None:
    for name in ("surprise_field", "surprise_field", "later_surprise"):
        assert server.chat("x", **{name: 1}, user="me", metadata={}).status_code == 200
    wait_until(lambda: any("later_surprise" in line for line in server.log), 30)  # lines come in order
    assert sum("surprise_field" in line for line in server.log) == 1


@pytest.mark.parametrize("priority", [NAN, BREAK])
def test_a_broken_request_fails_alone(server: RunningServer, client: OpenAI, priority: int) -> None:
    assert server.chat("x", priority=priority).status_code == 500
    with pytest.raises(APIError, match="NaN"):
        list(say(client, "x", stream=True, extra_body={"priority": priority}))
    assert say(client, "fine").choices[0].message.content == "fine"


# -- around generation -----------------------------------------------------------------------------------------------


def test_models_and_state(server: RunningServer, client: OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["weft-mini", "other-name"]
    assert server.chat("x", model="other-name").json()["model"] == "other-name"
    assert client.models.retrieve("weft-mini").model_extra["max_model_len"] == 4096
    for path in ("/health", "/ready", "/load", "/version", "/tokenizer_info", "/openapi.json"):
        assert server.client.get(path).status_code == 200, path
    assert server.client.get("/load").json()["limit"] == 48
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "messages" in info["chat_template"]  # lm-eval reads both


def test_tokenize_there_and_back(server: RunningServer) -> None:
    answer = server.client.post("/tokenize", json={"prompt": UNICODE, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert server.client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": UNICODE}
    chat = server.client.post("/tokenize", json=chat_body("x")).json()["count"]
    assert chat == server.chat("x").json()["usage"]["prompt_tokens"]
    assert server.client.post("/detokenize", json={"tokens": [2048]}).json()["error"]["param"] == "tokens"


def test_metrics(server: RunningServer) -> None:
    server.chat("count me", priority=CUT, max_tokens=3)
    text = server.client.get("/metrics").text
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:time_to_first_token_seconds_bucket"):
        assert f'{name}{{engine="0",' in text
    assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="weft-mini"}' in text
    assert 'weft:http_responses_total{path="/v1/chat/completions",status="200"}' in text
    assert "weft:engine_up 1.0" in text
    assert 'weft:stalls_total{engine="0",model_name="weft-mini"} 0.0' in text
    assert 'weft:graph_profile_info{engine="0",mode="NONE",model_name="weft-mini",profile="none"} 1.0' in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_is_no_fault(server: RunningServer, stream: bool) -> None:
    """Also with a request behind the one that is answered."""
    server.chat("x", **{f"from_here_{stream}": 1})  # named in the log behind all that other tests have caused
    wait_until(lambda: any(f"from_here_{stream}" in line for line in server.log), 30)
    content = json.dumps(chat_body("x" * 400, priority=SLOW, stream=stream))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.client.base_url.port)) as caller:
        caller.sendall(2 * (head + content).encode())
        wait_until(lambda: server.client.get("/load").json()["num_running"] > 0, 30)
        num_lines = len(server.log)
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, 30)
    server.chat("x")
    wait_until(lambda: any("completion_tokens=2 " in line for line in server.log[num_lines:]), 30)
    assert not [line for line in server.log[num_lines:] if " error " in line]


def test_nothing_is_left_open(server: RunningServer) -> None:
    """A client may have its last byte a moment before the server has forgotten the request."""
    wait_until(lambda: server.client.get("/load").json()["server_load"] == 0, 30)
