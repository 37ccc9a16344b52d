"""Fields, shapes and metrics beyond OpenAI's that programs made for vLLM use."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.fake_engine import CUT
from tests.server.running import RunningServer, chat_body, wait_until
from tests.whole import takes_long
from weft.errors import RequestError
from weft.server.chat import check_special_tokens
from weft.server.metrics import _drafts
from weft.stats import EngineStats

TEXT = "one two three"


def post(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


def deltas(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    text = server.client.post("/v1/chat/completions", json=body | {"stream": True}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    return [choice["delta"] for event in events for choice in event["choices"]]


def test_a_model_says_where_it_comes_from(server: RunningServer) -> None:
    model = server.client.get("/v1/models").json()["data"][0]
    assert model["root"].endswith("weft-mini") and model["parent"] is None and model["id"] == "weft-mini"


def test_a_message_has_its_keys_even_if_they_are_null(server: RunningServer) -> None:
    message = server.chat(TEXT).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": TEXT, "refusal": None, "reasoning": None}
    assert server.chat(TEXT).json()["prompt_logprobs"] is None
    choice = post(server, "/v1/completions", prompt=TEXT, max_tokens=1)["choices"][0]
    for name in ("prompt_logprobs", "logprobs", "stop_reason", "token_ids", "prompt_token_ids"):
        assert choice[name] is None
    chat = server.chat(TEXT).json()
    assert chat["prompt_token_ids"] is None and chat["choices"][0]["token_ids"] is None
    message = server.chat("<think>hm</think>ok").json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", "ok")


@pytest.mark.parametrize(
    "content",
    ["An apple a day", [{"type": "text", "text": "An apple"}, {"type": "refusal", "refusal": " a day", "text": 5}],
     ["An apple", " a day"]],
)  # fmt: skip
@pytest.mark.parametrize("echo", [True, False])
def test_echo_puts_the_message_that_goes_on_before_the_answer(server: RunningServer, echo: bool, content: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}],
        "continue_final_message": True, "echo": echo, "priority": CUT, "max_tokens": 4,
    }  # fmt: skip
    whole = post(server, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    assert whole.startswith("An apple a day") is echo
    assert "".join(d.get("content") or "" for d in deltas(server, **body)) == whole


def test_echo_of_a_question_is_nothing(server: RunningServer) -> None:
    assert (
        post(server, "/v1/chat/completions", **chat_body(TEXT, echo=True))["choices"][0]["message"]["content"] == TEXT
    )


def test_tokens_of_log_probabilities_by_id(server: RunningServer) -> None:
    ids = post(server, "/tokenize", prompt=TEXT, add_special_tokens=False)["tokens"]
    named = [f"token_id:{token}" for token in ids]
    chat = chat_body(TEXT, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True)
    entries = post(server, "/v1/chat/completions", **chat)["choices"][0]["logprobs"]["content"]
    assert [e["token"] for e in entries][: len(ids)] == named
    assert entries[0]["top_logprobs"][0]["token"] == f"token_id:{ids[0] + 1}"
    assert bytes(b for e in entries[: len(ids)] for b in e["bytes"]).decode() == TEXT
    body = {"prompt": TEXT, "max_tokens": len(ids), "logprobs": 1, "echo": True, "return_tokens_as_token_ids": True}
    shown = post(server, "/v1/completions", **body)["choices"][0]["logprobs"]
    assert shown["tokens"] == named * 2 and shown["text_offset"][len(ids)] == len(TEXT)
    assert shown["top_logprobs"][0] is None and named[1] in shown["top_logprobs"][1]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("last", "every"), [(False, True), (True, True), (True, False), (False, False)])
def test_usage_in_every_event_comes_with_that_in_the_last(
    server: RunningServer, path: str, last: bool, every: bool
) -> None:
    asked = chat_body(TEXT) if "chat" in path else {"prompt": TEXT, "max_tokens": 3}
    options = {"include_usage": last, "continuous_usage_stats": every}
    text = server.client.post(path, json=asked | {"stream": True, "stream_options": options}).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    assert ("usage" in events[-1] and not events[-1]["choices"]) is last
    assert all(("usage" in event) is (last and every) for event in events if event["choices"])


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "logprobs", {"prompt": "x"}),
        ("/v1/completions", "prompt_logprobs", {"prompt": "x"}),
        ("/v1/chat/completions", "top_logprobs", chat_body("x", logprobs=True)),
    ],
)
def test_max_logprobs(server: RunningServer, path: str, field: str, body: dict[str, Any]) -> None:
    assert server.client.post(path, json=body | {field: 20}).status_code == 200
    for wanted in (21, -1):
        error = server.client.post(path, json=body | {field: wanted}).json()["error"]
        assert error["param"] == field and f"{field}={wanted} is more than the 20" in error["message"]
        assert "max_logprobs" in error["message"]


def samples(server: RunningServer) -> dict[str, float]:
    """By name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f" {v}" for v in labels.values())] = sample.value
    return found


def test_metrics_under_vllms_names() -> None:
    running = RunningServer()
    try:
        fresh = samples(running.wait_ready())
        assert fresh["weft:kv_pages_free"] == fresh["weft:kv_pages"] == 256 and fresh["weft:state_slots_free"] == 8
        assert fresh["vllm:kv_cache_usage_perc"] == 0
        num_prompt = running.chat(TEXT, priority=CUT, max_tokens=10, n=2).json()["usage"]["prompt_tokens"]
        wait_until(lambda: "vllm:request_params_n_count" in samples(running), 10)
        after = samples(running)
    finally:
        running.close()
    for name, value in {
        "vllm:request_params_n_sum": 2,
        "vllm:request_params_max_tokens_sum": 20,
        "vllm:request_inference_time_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:request_prefill_kv_computed_tokens_sum": 2 * num_prompt,
        "vllm:prompt_tokens_cached_total": 0,
        "vllm:corrupted_requests_total": 0,
        "vllm:num_requests_waiting_by_reason capacity": 0,
        "vllm:iteration_tokens_total_sum": 2 * num_prompt + 20,
    }.items():
        assert after[name] == value, name
    assert 1 <= after["vllm:iteration_tokens_total_count"] <= 20
    assert after["vllm:iteration_tokens_total_bucket +Inf"] == after["vllm:iteration_tokens_total_count"]
    # The fake engine gives four tokens at a time: gaps lie between messages.
    assert after["vllm:inter_token_latency_seconds_count"] == 4
    assert any(name.startswith("vllm:cache_config_info") and "4096" in name for name in after)


def test_drafts_under_vllms_names() -> None:
    stats = EngineStats(
        spec_decode_num_drafts=3,
        spec_decode_num_draft_tokens=6,
        spec_decode_num_accepted_tokens=4,
        spec_decode_num_accepted_tokens_per_pos={"0": 3, "1": 1},
    )
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in _drafts(stats, {"model_name": "m"})
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    name = "vllm:spec_decode_num"
    assert found == {
        (f"{name}_drafts_total", None): 3,
        (f"{name}_draft_tokens_total", None): 6,
        (f"{name}_accepted_tokens_total", None): 4,
        (f"{name}_accepted_tokens_per_pos_total", "0"): 3,
        (f"{name}_accepted_tokens_per_pos_total", "1"): 1,
    }


def test_all_wrong_keys_of_a_logit_bias_are_told(server: RunningServer) -> None:
    error = server.chat(TEXT, logit_bias={"bad1": 1, "2": 1, "bad2": 1}).json()["error"]
    assert error["message"].startswith("logit_bias has the keys 'bad1', 'bad2'; keys are token ids")
    message = server.chat(TEXT, logit_bias={str(k): 1 for k in range(10**12, 10**12 + 9)}).json()["error"]["message"]
    assert message.count("10000") == 5 and ", …;" in message
    assert "2049; the vocabulary has 2048 ids" in server.chat(TEXT, logit_bias={"2049": 1}).json()["error"]["message"]


@takes_long
def test_usage_in_every_event_and_tokens_by_id_if_the_operator_wants_it() -> None:
    running = RunningServer("--enable-force-include-usage", "--return-tokens-as-token-ids")
    try:
        running.wait_ready()
        bodies = {
            "/v1/chat/completions": chat_body(TEXT, stream=True),
            "/v1/completions": {"prompt": TEXT, "stream": True},
        }
        for path, body in bodies.items():
            text = running.client.post(path, json=body).text
            events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            assert len(events) > 1 and all(event["usage"]["prompt_tokens"] > 0 for event in events)
            assert events[-1]["choices"] == []
        for wanted in (None, False, True):
            body = {"prompt": TEXT, "max_tokens": 1, "logprobs": 1, "return_tokens_as_token_ids": wanted}
            shown = post(running, "/v1/completions", **body)["choices"][0]["logprobs"]
            assert shown["tokens"][0].startswith("token_id:") is (wanted is not False)
            assert next(iter(shown["top_logprobs"][0])) == shown["tokens"][0], "the chosen token goes first"
    finally:
        running.close()


def test_responses_take_the_fields_of_chats(server: RunningServer) -> None:
    body = {"input": TEXT, "priority": CUT, "max_output_tokens": 9, "request_id": "mine", "stop": " two"}
    answer = post(server, "/v1/responses", **body)
    assert answer["id"] == "resp-mine" and answer["output"][0]["content"][0]["text"] == "one"
    thinking = "<think>hm</think>ok"
    kinds = [item["type"] for item in post(server, "/v1/responses", input=thinking)["output"]]
    assert kinds == ["reasoning", "message"]
    hidden = post(server, "/v1/responses", input=thinking, include_reasoning=False)["output"]
    assert [item["type"] for item in hidden] == ["message"]
    for name in ("top_k", "seed"):
        wrong = server.client.post("/v1/responses", json={"input": TEXT, name: 10**30}).json()["error"]
        assert wrong["param"] == name


@pytest.mark.parametrize("hidden", [False, True])
def test_reasoning_tokens_of_responses_are_counted(server: RunningServer, hidden: bool) -> None:
    def count(text: str) -> int:
        return len(post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"])

    def usage(text: str, **fields: Any) -> Any:
        body = {"input": text, "include_reasoning": not hidden}
        return post(server, "/v1/responses", **body, **fields)["usage"]

    reasoning = "<think>let me see\nand see</think>"
    used = usage(f"{reasoning}It is so.")
    assert used["output_tokens_details"]["reasoning_tokens"] == count(reasoning) < used["output_tokens"]
    assert usage("It is so.")["output_tokens_details"]["reasoning_tokens"] == 0
    assert usage(f"{reasoning}It", max_output_tokens=4)["output_tokens_details"]["reasoning_tokens"] == 4


def test_tokenize_has_its_keys(server: RunningServer) -> None:
    plain = post(server, "/tokenize", **chat_body(TEXT))
    assert plain["token_strs"] is None
    assert post(server, "/tokenize", **chat_body(TEXT, add_special_tokens=True)) == plain, (
        "this tokenizer has none to add"
    )
    strs = post(server, "/tokenize", prompt="Grüße", return_token_strs=True)["token_strs"]
    assert not any("Ġ" in text for text in strs) and server.client.get("/tokenizer_info").json()["tokenizer_class"]


def test_special_tokens_on_top_of_a_template_are_refused() -> None:
    adds_bos: Any = SimpleNamespace(encode=lambda text: [1])
    for wanted in (None, False):
        check_special_tokens(adds_bos, wanted)
    with pytest.raises(RequestError, match="the chat template says"):
        check_special_tokens(adds_bos, True)
