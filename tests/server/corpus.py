"""Hostile inputs, shaped like the known vulnerabilities of servers of language models.

Each input is a ``Case``: what is sent, and what the refusal must say. Families make the cases:

- values out of range and of the wrong type in every field, and numbers that JSON or 64 bits do not hold
- deep nesting, huge enums, expressions and grammars that explode, and duplicate keys
- token ids that the model does not have, and huge bodies and prompts
- tricks with paths, headers and the framing of HTTP
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "x"}]
BASES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 3},
    COMPLETIONS: {"prompt": "x", "max_tokens": 3},
    RESPONSES: {"input": "x", "max_output_tokens": 3},
    MESSAGES: {"messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": USER},
    "/tokenize": {"messages": USER},
    "/detokenize": {"tokens": [5]},
}
"""A body that is answered with 200, by path."""

FIELDS = sorted({
    "messages", "prompt", "model", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "logit_bias",
    "seed", "frequency_penalty", "repetition_penalty", "stop", "max_tokens", "max_completion_tokens", "logprobs",
    "top_logprobs", "stream_options", "tools", "tool_choice", "response_format", "chat_template_kwargs", "echo",
    "bad_words", "min_tokens", "stop_token_ids", "allowed_token_ids", "prompt_logprobs", "priority", "request_id",
    "cache_salt", "guided_json", "guided_regex", "guided_grammar", "guided_choice", "structured_outputs", "input",
    "instructions", "text", "system", "stop_sequences", "thinking", "return_token_ids", "continue_final_message",
    "add_generation_prompt", "metadata", "skip_special_tokens", "include_stop_str_in_output", "ignore_eos",
    "reasoning_effort", "tokens", "surprise", "stream", "best_of", "suffix", "parallel_tool_calls", "include_reasoning",
})  # fmt: skip
VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**63, 2**64, -(2**65), 10**300, 1e308, 0.1, "", "x" * 3000, "\x00", "\ud83d", "\u202e",
    "{{ 7 * 7 }}", "{% for i in range(99999999) %}{% endfor %}", "<|im_end|>", "<|im_start|>system\n", "<think>",
    [], {}, [[]], [None], [{}], {"": None}, {"__class__": "x"}, {"__proto__": {}}, [1] * 3000, ["a"] * 40,
    {"type": "json_schema", "json_schema": {}}, {"type": "object"}, {"type": "json_object"}, {"role": "user"},
    [{"role": "user", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": [{}]}], [{"role": []}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": "http://169.254.169.254/latest/meta-data"}]}],
    [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "%%%"}}, {"type": "text"}]}],
    [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,,", "fps": []}}]}],
    [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": {}}]}],
    [{"role": "user", "content": [{"type": "video", "video": [[], {}]}, {"type": "image", "image": {"url": {}}}]}],
    [{"role": "tool", "content": "x", "tool_call_id": {}}], [{"role": "x" * 500, "content": "x"}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}], {"include_usage": 1},
    [{"type": "function", "name": "f\"'\n<tool_call>", "parameters": {"$ref": "file:///etc/passwd"}}],
    [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"pattern": "(a+)+$"}}}}],
    "(a+)+$", "[", "start: start", {"$ref": "#"}, {"enum": list(range(500))}, "required", {"function": {"name": 5}},
    {"type": "string", "format": "nonsense"}, {"not": {}}, {"patternProperties": {"(": {}}}, {"minimum": "a"},
    {"5": 1.0, "99999999": 1.0}, {"-1": 1}, {"1e3": 1}, {"5": 1e9}, [-1], [2**40], [1.5], ["5"],
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Case:
    """One input.

    Attributes:
        family: for the report.
        path, method, headers, body: what is sent.
        raw: bytes to be sent as they are, in place of all that.
        param: the field that the refusal must blame; None: any.
        says: what its message must hold, such as the limit.
        refused: it must not be answered with 200.
        with_key: the API key is sent.
    """

    family: str
    path: str = CHAT
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    raw: bytes | None = None
    param: str | None = None
    says: str = ""
    refused: bool = False
    with_key: bool = True


Family = Callable[[random.Random], Case]


def cases(rng: random.Random) -> Iterator[Case]:
    """Yield cases without end. Families that are slow to send or to refuse are chosen rarely."""
    families, weights = list(FAMILIES), list(FAMILIES.values())
    while True:
        yield rng.choices(families, weights)[0](rng)


def fields(rng: random.Random) -> Case:
    """One to three fields with a value that does not belong there."""
    path = rng.choice(sorted(BASES))
    odd = {rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}
    body = BASES[path] | odd | ({"stream": True} if rng.random() < 0.3 else {})
    return Case("fields", path, body=json.dumps(body).encode())


def numbers(rng: random.Random) -> Case:
    """Numbers that are none, or too many."""
    name, values, limit = rng.choice(
        [
            ("n", ["1000000000", "129", "0", "-5", "9223372036854775808", "1e30", '"999"', "NaN"], ""),
            ("temperature", ["NaN", "Infinity", "-Infinity", "1e999", "-1", "101", '"hot"'], ""),
            ("top_p", ["NaN", "1.1", "0", "-0.5", "1e-400"], ""),
            ("logprobs", ["9999", "-1", "1e9", "NaN"], ""),
            ("max_tokens", ["-1", "0", "1.5", "1e30", "Infinity"], ""),
            ("seed", ["18446744073709551616", "1e40", "-9223372036854775809"], ""),
            ("repetition_penalty", ["0", "-1", "1e309", "NaN"], ""),
            ("logit_bias", ['{"5": NaN}', '{"5": 101}', '{"a": 1}', '{"5": "x"}', "[]"], ""),
            ("priority", ["4294967296", "1.5", '"high"'], ""),
        ]
    )
    value = rng.choice(values)
    body = f'{{"prompt": "x", "max_tokens": 3, "{name}": {value}}}'
    is_json = not any(word in value for word in ("NaN", "Infinity", "e999", "1e309"))
    return Case("numbers", COMPLETIONS, body=body.encode(), param=name if is_json else None, refused=True, says=limit)


LIMITS: list[tuple[str, dict[str, Any], str, str]] = [
    (COMPLETIONS, {"n": 65}, "n", "64"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", "20"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    (COMPLETIONS, {"stop": ["a"] * 17}, "stop", "16"),
    (COMPLETIONS, {"prompt": ["a"] * 1025}, "prompt", "1024"),
    (COMPLETIONS, {"temperature": 100.5}, "temperature", "100"),
    (COMPLETIONS, {"presence_penalty": 2.5}, "presence_penalty", "2"),
    (COMPLETIONS, {"prompt": "a " * 5000}, "prompt", "95"),
    (CHAT, {"messages": [{"role": "user", "content": "a " * 5000}]}, "prompt", "95"),
    (COMPLETIONS, {"guided_regex": "a" * 300_000}, "guided_regex", "262,144"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 300_000]}}}},
     "response_format", "262,144"),
    (COMPLETIONS, {"prompt": [5, 2048]}, "prompt_token_ids", "2047"),
    ("/detokenize", {"tokens": [2048]}, "tokens", "2047"),
    (COMPLETIONS, {"allowed_token_ids": [5, 99999]}, "allowed_token_ids", "2047"),
    (COMPLETIONS, {"request_id": "x" * 129}, "request_id", "128"),
]  # fmt: skip


def limits(rng: random.Random) -> Case:
    """Just beyond a limit: the refusal names it."""
    path, odd, param, limit = rng.choice(LIMITS)
    return Case("limits", path, body=json.dumps(BASES[path] | odd).encode(), param=param, says=limit, refused=True)


def tokens(rng: random.Random) -> Case:
    """Token ids of another model, or of none."""
    strange = rng.choice([2048, 151_643, 151_645, -1, 2**31, 2**63, 2**70])
    name = rng.choice(["prompt", "allowed_token_ids", "stop_token_ids", "logit_bias"])
    value: Any = {str(strange): 5} if name == "logit_bias" else [5, strange]
    body = BASES[COMPLETIONS] | {name: value}
    return Case("tokens", COMPLETIONS, body=json.dumps(body).encode(), refused=True, says="")


def nesting(rng: random.Random) -> Case:
    """Arrays and objects within one another, deeper than any stack."""
    depth = rng.choice([50, 500, 5_000, 100_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    deep = opening * depth + "1" + closing * depth
    name = rng.choice(
        ["messages", "metadata", "tools", "guided_json", "logit_bias", "surprise", "chat_template_kwargs"]
    )
    return Case("nesting", CHAT, body=f'{{"messages": {json.dumps(USER)}, "max_tokens": 3, "{name}": {deep}}}'.encode())


def unfinished(rng: random.Random) -> Case:
    """Bodies that are cut off, damaged, or no JSON."""
    path = rng.choice(sorted(BASES))
    body = bytearray(json.dumps(BASES[path] | {"stop": "\u6771\U0001f600"}, ensure_ascii=rng.random() < 0.5).encode())
    for _ in range(rng.randint(1, 4)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    cut = rng.choice([len(body), rng.randrange(len(body))])
    return Case("unfinished", path, body=bytes(body[:cut]))


def duplicates(rng: random.Random) -> Case:
    """The same key twice: what is checked must be what is used."""
    name, good, bad = rng.choice(
        [("n", "1", "1000000"), ("max_tokens", "3", "-1"), ("model", '"weft-mini"', '"other"'), ("stop", '"a"', "[5]")]
    )
    return Case("duplicates", COMPLETIONS, body=f'{{"prompt": "x", "{name}": {good}, "{name}": {bad}}}'.encode(),
                param=name, refused=True)  # fmt: skip


def grammars(rng: random.Random) -> Case:
    """Schemas, expressions and grammars that explode when they are compiled."""
    size = rng.randint(100, 3000)
    schema: Any = rng.choice(
        [
            {"enum": [f"{rng.random()}" for _ in range(size * 5)]},
            {"type": "array", "minItems": size * 1000, "maxItems": size * 10_000, "items": {"type": "integer"}},
            {"allOf": [{"anyOf": [{"const": i + j} for j in range(40)]} for i in range(size // 20)]},
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"type": "string", "pattern": f"^(a?){{{size}}}(a){{{size}}}$"},
            {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(size)}},
        ]
    )
    expression = rng.choice([f"(a{{1,{size}}}){{1,{size}}}", f"((a+)+)+{size}", f"(?=a){size}",
                             f"[\\u{{{size:x}}}]{{99}}",
                             "(" * size, f"(.*a){{{size}}}", "\\" * (size | 1)])  # fmt: skip
    grammar = rng.choice([f"start: {'start ' * size}", "start: " + "(" * size, f"start: /(a|b)*c(a|b){{{size}}}/",
                          "start: %json {", f"start: x{size}", 'start: "a"~1..999999999'])  # fmt: skip
    odd = rng.choice([
        {"guided_json": schema}, {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"guided_regex": expression}, {"structured_outputs": {"regex": expression}}, {"guided_grammar": grammar},
        {"structured_outputs": {"choice": [str(i) * 9 for i in range(size)]}},
    ])  # fmt: skip
    return Case("grammars", CHAT, body=json.dumps(BASES[CHAT] | odd).encode())


def prompts(rng: random.Random) -> Case:
    """Long and strange texts."""
    text = rng.choice(["a", "\u0300", "\U0001f468\u200d", "<|im_end|>", " \n", "\x00", "{{", "\u202e\ufeff"])
    text *= rng.choice([1, 90, 10_000, 200_000])
    path = rng.choice([CHAT, COMPLETIONS, "/tokenize", MESSAGES])
    name = "prompt" if path == COMPLETIONS else "messages"
    value = text if name == "prompt" else [{"role": "user", "content": text}]
    return Case("prompts", path, body=json.dumps(BASES[path] | {name: value}).encode())


def large(rng: random.Random) -> Case:
    """27 MB, as text, as numbers, or compressed; announced or in chunks of HTTP."""
    filling = rng.choice([b"x", b"[", b'"', b"1,", b"\x1f\x8b"])
    body = b'{"messages": "' + filling * (27_000_000 // len(filling))
    headers = rng.choice([{}, {"Content-Encoding": "gzip"}, {"Transfer-Encoding": "chunked"}])
    return Case("large", rng.choice(sorted(BASES)), headers=headers, body=body, says="8,388,608", refused=True)


PATHS = [
    "/v1//models", "//v1/models", "/v1/models/", "/v1/models/%2e%2e/models", "/V1/MODELS", "/v1/models;x",
    "/v1/%6dodels", "/v1/models%00", "/v1/models?api_key=x", "/health/../metrics", "/health/%2e%2e/metrics",
    "/health;/metrics",
    "/health%2f..%2fmetrics", "/ready/../inspect", "/../../etc/passwd", "/app.js/../../server/settings.py", "/static/",
    "/%ff%fe", "/" + "a" * 5000, "/v1/models/" + "%41" * 3000, "/inspect?tokens_per_node=-1", "/inspect?x=%00",
    "/\\evil", "/v1/models#x", "/.git/config", "/openapi.json/", "/metrics/", "/docs", "/v1/models/..%2f..%2fetc",
]  # fmt: skip
OPEN = {"/health", "/ready", "/", "/index.html"}
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECTED", "G" * 100]


def paths(rng: random.Random) -> Case:
    """Paths that lead elsewhere, with and without a key: none opens a door."""
    with_key = rng.random() < 0.5
    path = rng.choice(PATHS)
    return Case("paths", path, rng.choice(METHODS), with_key=with_key, refused=not with_key)


HEADERS = [
    {"Host": "evil.example"}, {"Host": ""}, {"Host": "localhost:99999999"}, {"Host": "localhost, evil"},
    {"X-Forwarded-Host": "evil"}, {"X-Original-URL": "/metrics"}, {"X-HTTP-Method-Override": "DELETE"},
    {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data; boundary=" + "x" * 5000},
    {"Content-Type": "application/json; charset=utf-7"}, {"Content-Encoding": "gzip"}, {"Accept": "x" * 9000},
    {"traceparent": "00-" + "0" * 5000}, {"traceparent": "00-%n%n-%s-01"}, {"tracestate": "a=" * 4000},
    {"Cookie": "a=b; " * 2000}, {"Range": "bytes=0-,-1,0-0"}, {"Connection": "close, Upgrade", "Upgrade": "websocket"},
    {"Upgrade": "h2c"}, {"Expect": "nonsense"}, {"X-Request-Id": "x\ty"}, {"Origin": "null"},
    {"anthropic-version": "\xff"},
    {"Authorization": "Bearer "}, {"Authorization": "Basic eDp5"}, {"Authorization": "Bearer " + "\xe9" * 500},
    {"x-api-key": "' OR 1=1 --"},
]  # fmt: skip


def headers(rng: random.Random) -> Case:
    """Headers that lie, or are too long."""
    path = rng.choice(sorted(BASES))
    odd = rng.choice(HEADERS)
    return Case("headers", path, headers=odd, body=json.dumps(BASES[path]).encode(), with_key=rng.random() < 0.7)


BODY = json.dumps(BASES[COMPLETIONS]).encode()
HOST = b"Host: localhost\r\nConnection: close\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked"
RAW = [
    b"GET http://evil.example/v1/models HTTP/1.1\r\n" + HOST + b"\r\n",
    b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nConnection: close\r\n\r\n",
    b"GET /v1/models HTTP/1.0\r\n\r\n",
    b"GET /v1/models HTTP/9.9\r\n" + HOST + b"\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /v1/models\x00 HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/mo dels HTTP/1.1\r\n" + HOST + b"\r\n",
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"A: b\r\n c: folded\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X: " + b"x" * 200_000 + b"\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 3000 + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: -5\r\n\r\n" + BODY,
    b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nContent-Length: 50\r\n\r\n" + BODY,
    CHUNKED + b"\r\nContent-Length: 3\r\n\r\n0\r\n\r\n" + BODY,
    CHUNKED + b"\r\n\r\nZZ\r\n" + BODY,
    CHUNKED + b", identity\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    CHUNKED + b"\r\n\r\nffffffffffffffff\r\n" + BODY,
    b"\r\n\r\n\r\n",
]  # fmt: skip


def raw(rng: random.Random) -> Case:
    """Bytes that are almost HTTP, damaged in places; never with a key, so never answered with 200."""
    data = bytearray(rng.choice(RAW))
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
    return Case("raw", raw=bytes(data), with_key=False)


FAMILIES: dict[Family, float] = {
    fields: 40, numbers: 10, limits: 8, tokens: 5, nesting: 5, unfinished: 10, duplicates: 3, grammars: 1.5, prompts: 3,
    large: 0.5, paths: 6, headers: 5, raw: 3,
}  # fmt: skip
"""With weights."""
