"""Hostile inputs at the real server: ``python -m tests.server.fuzz --inputs 20000 [--json FILE]`` (``make fuzz``).

Half of the inputs come from schemathesis, which makes valid and invalid bodies from the served OpenAPI document. The
other half comes from ``corpus.py``. Each input must be answered with a status below 500, and each refusal must have the
shape of the OpenAI API's errors. A control request must get the same answer to the end, from the same engine process.
The process must then be as idle as before.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from tests.patience import stretched
from tests.server.corpus import OPEN, Case, cases
from tests.server.running import RunningServer, wait_until
from weft.bench import report

KEY = "the-fuzz-key"
FLAGS = ("--max-model-len", "96", "--cpu-cache-gib", "0.05", "--max-num-seqs", "16", "--api-key", KEY)
THREADS = 4
SLOW_S = 20.0
"""Longest time of an answer on an idle machine."""

EXAMPLES = 50
"""Inputs that schemathesis makes of one operation at a time."""

AUTHORIZED = {"Authorization": f"Bearer {KEY}"}


@dataclass(slots=True)
class Answer:
    """``status`` is None if the connection was closed without one."""

    status: int | None
    content_type: str
    body: bytes


@dataclass(slots=True)
class Findings:
    """Counts, and what went wrong."""

    inputs: int = 0
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    families: collections.Counter[str] = field(default_factory=collections.Counter)
    problems: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""


Input = tuple[str, Callable[[], Answer], Callable[[Answer], str | None]]
"""Family, how it is sent, and what is wrong with its answer."""


class Fuzzer:
    """Sends inputs to one server."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._lock = threading.Lock()
        self.findings = Findings()
        server.client.headers.update(AUTHORIZED)
        self._document = server.client.get("/openapi.json").json()

    def run(self, num_inputs: int, seed: int, deadline: float = math.inf) -> Findings:
        """Send so many inputs, or as many as fit until ``deadline``; ``Findings.problems`` is empty if all is well."""
        control, engine = self._control(), self._server.engine_pid
        inputs = itertools.islice(_alternate(self._from_corpus(seed), self._from_document(seed)), num_inputs)
        with ThreadPoolExecutor(THREADS) as pool:
            for batch in iter(lambda: list(itertools.islice(inputs, 500)), []):
                list(pool.map(self._try, batch))
                self._check_control(control, engine)
                if time.monotonic() > deadline:
                    break
        wait_until(self._is_idle, 2.0)
        return self.findings

    def _control(self) -> Any:
        answer = self._server.chat("What is 12 + 30?", temperature=0, max_tokens=40, logprobs=True)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], [round(e["logprob"], 3) for e in choice["logprobs"]["content"]]

    def _check_control(self, control: Any, engine: int) -> None:
        if self._server.process.poll() is not None or self._server.engine_pid != engine:
            raise AssertionError("the server or its engine has died:\n" + "".join(self._server.log[-30:]))
        if (now := self._control()) != control:
            self.findings.problems.append(f"the control request was answered {now}, before {control}")

    def _is_idle(self) -> bool:
        load = self._server.client.get("/load").json()
        return (load["server_load"], load["num_running"], load["num_waiting"]) == (0, 0, 0)

    def _try(self, given: Input) -> None:
        family, send, judge = given
        began = time.monotonic()
        answer = send()
        seconds = time.monotonic() - began
        problem = judge(answer) or (f"it took {seconds:.1f} s" if seconds > stretched(SLOW_S) else None)
        with self._lock:
            findings = self.findings
            findings.inputs += 1
            findings.statuses[str(answer.status)] += 1
            findings.families[family] += 1
            if seconds > findings.slowest_s:
                findings.slowest_s, findings.slowest = seconds, family
            if problem is not None:
                findings.problems.append(f"{problem}: {answer.status} {answer.body[:300]!r}")

    # -- from the corpus -----------------------------------------------------------------------------------------

    def _from_corpus(self, seed: int) -> Iterator[Input]:
        for case in cases(random.Random(seed)):
            yield case.family, lambda case=case: self._send(case), lambda answer, case=case: judge(case, answer)

    def _send(self, case: Case) -> Answer:
        """On a connection of its own, as bytes: a client library would refuse to send most of this."""
        url, received = httpx.URL(self._server.url), b""
        with socket.create_connection((url.host, url.port or 80), timeout=60 if case.raw is None else 2) as connection:
            # A refusal may come, and the connection be closed, before everything is sent.
            with contextlib.suppress(OSError):
                for piece in _encoded(case):
                    connection.sendall(piece)
                if case.raw is not None:
                    connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                while chunk := connection.recv(65536):
                    received += chunk
        head, _, body = received.partition(b"\r\n\r\n")
        status = int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else None
        return Answer(status, "application/json" if b"application/json" in head else "", body)

    # -- from the OpenAPI document -------------------------------------------------------------------------------

    def _from_document(self, seed: int) -> Iterator[Input]:
        schema = schemathesis.openapi.from_dict(self._document)
        posts = [path for path, item in self._document["paths"].items() if "post" in item]
        kinds = [(schema[path]["POST"], mode) for path in posts for mode in GenerationMode]
        kinds += [(schema["/v1/models/{name}"]["GET"], GenerationMode.POSITIVE)]
        kinds += [(schema["/inspect"]["GET"], mode) for mode in GenerationMode]
        for round in itertools.count():
            for i, (operation, mode) in enumerate(kinds):
                for case in _examples(operation, mode, seed * 1_000_003 + round * 101 + i):
                    yield f"schemathesis {mode.value}", lambda case=case: self._call(case), _judge_any

    def _call(self, case: Any) -> Answer:
        answer = case.call(base_url=self._server.url, headers=AUTHORIZED, timeout=60)
        return Answer(answer.status_code, answer.headers.get("content-type", [""])[0], answer.content or b"")


def _alternate(first: Iterator[Input], second: Iterator[Input]) -> Iterator[Input]:
    for pair in zip(first, second, strict=False):
        yield from pair


def _examples(operation: Any, mode: GenerationMode, number: int) -> list[Any]:
    """Inputs for one operation."""
    found: list[Any] = []

    @seed(number)
    @settings(
        max_examples=EXAMPLES, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        found.append(case)

    collect()
    return found


def _encoded(case: Case) -> Iterator[bytes]:
    """The request as it goes over the wire."""
    if case.raw is not None:
        yield case.raw
        return
    headers = {"Host": "localhost", "Connection": "close"} | (AUTHORIZED if case.with_key else {}) | case.headers
    is_chunked = "Transfer-Encoding" in headers
    if not is_chunked:
        headers["Content-Length"] = str(len(case.body))
    lines = [f"{case.method} {case.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    yield "\r\n".join([*lines, "", ""]).encode("latin-1")
    for start in range(0, len(case.body), 1 << 20):
        piece = case.body[start : start + (1 << 20)]
        yield b"%x\r\n%b\r\n" % (len(piece), piece) if is_chunked else piece
    if is_chunked:
        yield b"0\r\n\r\n"


def judge(case: Case, answer: Answer) -> str | None:
    """Return what is wrong with the answer, or None."""
    problem = _judge_any(answer, is_head=case.method == "HEAD")
    if problem is None and answer.status == 200:
        is_open = case.path.split("?")[0] in OPEN
        problem = "accepted" if case.refused or not (case.with_key or is_open) else None
    if problem is None and answer.status is None and case.raw is None and case.family != "large":
        problem = "no answer"
    if problem is None and (answer.status == 400 or answer.status == 413) and (case.param or case.says):
        error = json.loads(answer.body)["error"]
        if case.param and error["param"] != case.param:
            problem = f"param should be {case.param}"
        if case.says and case.says not in error["message"]:
            problem = f"the limit {case.says} is not named"
    return (
        None
        if problem is None
        else f"{case.family} {case.method} {case.path[:80]} {(case.raw or case.body)[:300]!r} {problem}"
    )


def _judge_any(answer: Answer, *, is_head: bool = False) -> str | None:
    if answer.status is None or answer.status == 200:
        return "a stream broke" if b'"server_error"' in answer.body else None
    if answer.status >= 500:
        return "5xx"
    if is_head or (answer.status == 400 and not answer.content_type and answer.body.startswith(b"Invalid HTTP")):
        return None  # no body; or not HTTP at all, which the layer below refuses
    try:
        error = json.loads(answer.body)["error"]
        is_well = bool(error["message"] and error["type"]) and {"param", "code"} <= set(error)
    except (ValueError, TypeError, KeyError):
        is_well = False
    return None if is_well else "not an error in the shape of the OpenAI API"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=20_000, metavar="N")
    parser.add_argument("--seconds", type=float, default=math.inf, metavar="X", help="send nothing after this time")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", metavar="FILE", help="write the findings there")
    args = parser.parse_args()
    path = report.open_json(args.json)
    server = RunningServer(*FLAGS, module="weft")
    began = time.monotonic()
    try:
        findings = Fuzzer(server.wait_ready()).run(args.inputs, args.seed, began + args.seconds)
    finally:
        server.close()
    figures = {
        "suite": "fuzz-server", "seed": args.seed, "inputs": findings.inputs, "load": os.getloadavg()[1],
        "seconds": round(time.monotonic() - began, 1), "statuses": dict(sorted(findings.statuses.items())),
        "families": dict(findings.families.most_common()), "slowest_s": round(findings.slowest_s, 2),
        "slowest": findings.slowest, "problems": findings.problems[:100],
        "clients": {name: version(name) for name in ("schemathesis", "hypothesis", "httpx")},
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    report.write_json(path, figures | report.provenance("cpu"))
    return 1 if findings.problems else 0


if __name__ == "__main__":
    sys.exit(main())
