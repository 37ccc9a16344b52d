"""``weft bench scaling``: tiny, end to end, and what it refuses."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import RunWeft
from tests.server.fake_engine import CAPACITY
from tests.whole import takes_long
from weft.bench import scaling
from weft.cli import bench_scaling
from weft.errors import EngineDeadError


@takes_long
def test_scaling(run_weft: RunWeft, tmp_path: Path) -> None:
    target = tmp_path / "scaling.json"
    small = ["--num-prompts", 3, "--queue-len", 2, 5, "--batch-sizes", 1, 2, "--prompt-len", 5, "--output-len", 3]
    few = ["--warmups", 0, "--repeats", 1, "--device", "cpu", "--cpu-cache-gib", 0.05, "--max-num-seqs", 4]
    result = run_weft("bench", "scaling", "--sizes", "1x1", "1x2", *small, *few, "--json", target)
    assert result.status == 0 and "replicas" in result.out
    figures = json.loads(target.read_text())
    rows = figures["results"]
    assert [(row["tensor_parallel_size"], row["data_parallel_size"]) for row in rows] == [(1, 1), (1, 2)]
    assert all(row["output_tokens_per_s"] > 0 and set(row["decode_ms"]) == {"1", "2"} for row in rows)
    assert rows[0]["throughput_gain"] == 1.0 and {"device", "command", "date", "config"} <= set(figures)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tp", 2], "--tensor-parallel-size is what this benchmark varies; use --sizes"),
        (["--queue-len", 5, 2], "--queue-len 5 2: give MIN and MAX"),
        (["--sizes", "2"], "--sizes 2: give GPUs of a replica x replicas, like 2x1"),
        (["--batch-sizes", 0], "--batch-sizes 0: give 1 or more"),
        (["--batch-sizes", 1, 9, "--max-num-seqs", 8], "--batch-sizes 9: --max-num-seqs 8 run at a time in a replica"),
        (["--sizes", "1x2", "--batch-sizes", 9, "--max-num-seqs", 4], "in a replica, and one of --sizes has 2; give"),
    ],
)
def test_refusals(flags: list[object], message: str, run_weft: RunWeft) -> None:
    result = run_weft("bench", "scaling", *flags)
    assert result.status == 2 and message in result.err


def test_replicas_share_a_batch() -> None:
    parser = argparse.ArgumentParser()
    bench_scaling.add_parser(parser.add_subparsers())
    flags = ["scaling", "--sizes", "1x2", "1x3", "--batch-sizes", "8", "--max-num-seqs", "4"]
    bench_scaling._check(parser.parse_args(flags))


@takes_long
@pytest.mark.parametrize(
    ("whole_set", "message"), [(True, "the engine process ended unexpectedly"), (False, "a request failed")]
)
def test_an_engine_that_dies_ends_the_benchmark(whole_set: bool, message: str) -> None:
    """All replicas at once, and one that had begun to answer: its requests cannot start again elsewhere."""

    async def main() -> None:
        engines = scaling.Engines({"device": "cpu"}, "tests.server.fake_engine")
        try:
            await engines.ready()
            length = CAPACITY.max_model_len - 1
            run = asyncio.create_task(engines.run([[1] * length] * 3, [length] * 3, 0.0))
            while not any(entry.is_seen for entry in engines._set._open.values()):
                await asyncio.sleep(0)
            process = engines._set.members[0].process
            assert process is not None
            (engines._set if whole_set else process).kill()
            await run
        finally:
            await engines.close()

    with pytest.raises(EngineDeadError, match=message):
        asyncio.run(main())
