"""Traces of agents: their format, the theoretical hit rate, the generator, and a replay at a real server."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.running import RunningServer
from weft.bench.agent_trace import AgentTrace, requests_of, write_trace
from weft.bench.http_client import Target
from weft.bench.trace import Replay, measure, prompt_of, read_trace, reusable_tokens, sessions_of, with_appended_blocks
from weft.cli import main
from weft.errors import ConfigError


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    running = RunningServer(module="weft")
    try:
        yield running.wait_ready()
    finally:
        running.close()


def line(**fields: Any) -> str:
    return json.dumps({"input_length": 10, "output_length": 3, "hash_ids": [1, 2, 3]} | fields)


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_a_trace_is_read_in_the_order_of_arrival(tmp_path: Path) -> None:
    second = [line(timestamp=7500, session_id="a"), line(session_id="a", delay=250, timestamp=8000)]
    file = write(tmp_path, line(timestamp=9000), "", *second)
    requests = read_trace(file, scale=0.5)
    assert [(r.start_s, r.input_length, r.output_length, r.think_s) for r in requests] == [
        (0.0, 5, 2, None), (0.5, 5, 2, 0.25), (1.5, 5, 2, None)
    ]  # fmt: skip
    assert [len(session) for session in sessions_of(requests)] == [2, 1]
    assert [r.session for r in requests] == ["a", "a", "line 1"]


def test_turns_without_timestamps_stay_in_their_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    write_trace(file, AgentTrace(sessions=6, turns=5))
    made: dict[str, list[tuple[int, ...]]] = {}
    for each in requests_of(AgentTrace(sessions=6, turns=5)):
        made.setdefault(each["session_id"], []).append(tuple(each["hash_ids"]))
    sessions = sessions_of(read_trace(file))
    assert {session[0].session: [r.hash_ids for r in session] for session in sessions} == made
    assert sorted({session[0].start_s for session in sessions}) == [session[0].start_s for session in sessions]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (line(), "timestamp"), (line(timestamp=1, input_length=0), "lengths"), ("{", "line 2"),
        ('{"timestamp": 1, "input_length": 3, "output_length": 2}', "hash_ids"), ("[]", "line 2"),
        (line(timestamp="soon"), "soon"),
    ],
)  # fmt: skip
def test_a_trace_that_cannot_be_read_names_the_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read_trace(write(tmp_path, line(timestamp=1), text))
    assert "line 2" in str(caught.value)
    with pytest.raises(ConfigError, match="no request"):
        read_trace(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="absent"):
        read_trace(tmp_path / "absent")


def test_reusable_tokens_are_those_of_the_longest_prefix_of_blocks(tmp_path: Path) -> None:
    lines = [
        line(timestamp=0, hash_ids=[1, 2, 3], input_length=12),
        line(timestamp=1, hash_ids=[1, 2, 9], input_length=11),  # two blocks
        line(timestamp=2, hash_ids=[2, 3, 9], input_length=12),  # known blocks in another place: none
        line(timestamp=3, hash_ids=[1, 2, 3], input_length=12),  # all but the last token
        line(timestamp=4, hash_ids=[1, 7, 3], input_length=12),  # one block, whatever follows
    ]
    assert reusable_tokens(read_trace(write(tmp_path, *lines)), block_size=4) == 8 + 0 + 11 + 4


def test_a_cut_block_is_the_beginning_of_the_block_that_the_session_appends(tmp_path: Path) -> None:
    lines = [
        line(session_id="a", timestamp=0, input_length=10, hash_ids=[1, 2, 3]),
        line(session_id="a", delay=1, input_length=14, hash_ids=[1, 2, 4, 5]),
        line(session_id="a", delay=1, input_length=9, hash_ids=[1, 8, 9]),  # does not append
    ]
    requests = with_appended_blocks(read_trace(write(tmp_path, *lines)), block_size=4)
    assert [request.hash_ids for request in requests] == [(1, 2, 4), (1, 2, 4, 5), (1, 8, 9)]
    assert reusable_tokens(requests, block_size=4) == 10 + 4
    first, second = (prompt_of(request, 0, Replay(4, 50)) for request in requests[:2])
    assert second[:10] == first


def test_prompts_share_the_tokens_of_equal_blocks_alone(tmp_path: Path) -> None:
    prompts = [([5, 6], 8), ([5, 7], 14), ([5, 6], 14)]
    lines = [line(timestamp=i, hash_ids=ids, input_length=n) for i, (ids, n) in enumerate(prompts)]
    replay = Replay(block_size=4, vocab_size=50)
    a, b, c = (prompt_of(request, number, replay) for number, request in enumerate(read_trace(write(tmp_path, *lines))))
    assert (len(a), len(b), len(c)) == (8, 14, 14) and max(a + b + c) < 50
    assert a[:4] == b[:4] and a[4:] != b[4:8] and a == c[:8]
    assert b[8:] != c[8:], "tokens beyond the blocks belong to one request"


def test_the_generator_draws_what_agents_send() -> None:
    trace = AgentTrace(sessions=24, seed=3)
    lines = list(requests_of(trace))
    assert lines == list(requests_of(trace)) != list(requests_of(AgentTrace(sessions=24, seed=4)))
    lengths = [line["input_length"] for line in lines]
    assert min(lengths) > 18_000 and max(lengths) <= 150_000
    assert 15 < len(lines) / 24 < 60
    requests = [r for line in lines for r in [line["hash_ids"]]]
    assert all(len(ids) == -(-n // 512) for ids, n in zip(requests, lengths, strict=True))


def test_contexts_of_the_generator_are_nearly_all_reusable(tmp_path: Path) -> None:
    write_trace(tmp_path / "t", AgentTrace(sessions=24, seed=3))
    requests = read_trace(tmp_path / "t")
    share = reusable_tokens(requests, 512) / sum(request.input_length for request in requests)
    assert 0.93 < share < 0.98


def test_a_replay_reuses_what_the_theory_says(server: RunningServer, tmp_path: Path) -> None:
    lines = [
        line(session_id="a", timestamp=0, input_length=40, hash_ids=[1, 2]),
        line(session_id="a", delay=10, input_length=70, hash_ids=[1, 2, 3, 4, 9]),
        line(session_id="a", delay=10, input_length=90, hash_ids=[1, 2, 3, 4, 5, 6]),
        line(session_id="b", timestamp=0, input_length=48, hash_ids=[21, 22, 23]),
    ]
    requests = read_trace(write(tmp_path, *lines))
    figures = measure(Target.parse(f"{server.url}/v1"), None, requests, Replay(block_size=16, vocab_size=400))
    assert figures["failed"] == 0, figures["errors"]
    assert figures["theoretical_hit_rate"] == round((40 + 70) / 248, 4)
    assert figures["hit_rate"] == pytest.approx(figures["theoretical_hit_rate"], abs=0.01)
    assert len(figures["rows"]) == 4 and sum(row[2] for row in figures["rows"]) == 248
    assert figures["output_tokens_per_s"] * figures["seconds"] == pytest.approx(12, rel=0.02)


def test_sessions_at_a_time_and_the_rate_are_kept(server: RunningServer, tmp_path: Path) -> None:
    lines = [line(session_id=name, timestamp=0, hash_ids=[]) for name in "abc"]
    lines += [line(session_id=name, delay=400, hash_ids=[]) for name in "abc"]
    requests, target = read_trace(write(tmp_path, *lines)), Target.parse(f"{server.url}/v1")
    one_by_one = measure(target, None, requests, Replay(vocab_size=400, rate=2.0, sessions=1))
    assert one_by_one["failed"] == 0 and one_by_one["seconds"] >= 3 * 0.2
    starts = sorted(row[0] for row in one_by_one["rows"])
    assert all(later - earlier >= 0.19 for earlier, later in zip(starts[::2], starts[1::2], strict=True))


def test_the_command_writes_json_and_a_picture(server: RunningServer, tmp_path: Path, capsys: Any) -> None:
    file, figures, plot = tmp_path / "t.jsonl", tmp_path / "f.json", tmp_path / "p.svg"
    assert main(["bench", "trace", str(file), "--generate", "2", "--turns", "2", "--max-context", "30000"]) == 0
    flags = ["--base-url", f"{server.url}/v1", "--scale", "0.004", "--rate", "100", "--vocab-size", "400"]
    assert main(["bench", "trace", str(file), *flags, "--json", str(figures), "--plot", str(plot)]) == 0
    found = json.loads(figures.read_text())
    assert found["benchmark"] == "trace" and found["replay"]["block_size"] == 2 and found["results"]["failed"] == 0
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    assert "reusable with an unbounded cache" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--rate", "0"], ["--scale", "-1"], ["--sessions", "0"], ["--block-size", "0"]])
def test_flags_out_of_range_are_named(tmp_path: Path, capsys: Any, flags: list[str]) -> None:
    assert main(["bench", "trace", str(write(tmp_path, line(timestamp=0))), *flags]) != 0
    assert flags[0] in capsys.readouterr().err
