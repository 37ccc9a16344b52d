"""Files of the disk tier: torn, changed or foreign files, a full disk, restarts (also by SIGKILL), bounds, the verb."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.offload.always import AlwaysRestore
from tests.offload.fake_host import request
from tests.offload.test_engine import PROMPTS, TINY, serve
from tests.offload.test_tier import PROMPT, House
from tests.whole import RUNS_LONG, takes_long
from weft import LLM
from weft.cli import main
from weft.config import resolve
from weft.errors import ConfigError
from weft.offload import disk
from weft.offload.disk_tier import DiskTier, entry_of, name_of
from weft.offload.store import Entry

KEY = bytes(range(16))
NAME = f"{KEY.hex()}.page"
CONTENT = memoryview(bytes(i % 256 for i in range(5000)))


def written(folder: Path, name: str = NAME) -> Path:
    disk.write(folder, "f", name, CONTENT)
    return disk.path_of(folder, "f", name)


def read(folder: Path, name: str = NAME, fingerprint: str = "f", size: int = 5000) -> memoryview:
    content = memoryview(bytearray(size))
    disk.read(folder, fingerprint, name, content)
    return content


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read(tmp_path) == CONTENT
    disk.check(path)


def test_the_system_may_copy_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system cuts transfers of 2 GiB or more. Here each call copies at most 1500 bytes."""
    writev, preadv = os.writev, os.preadv

    def first(buffers: list[Any]) -> list[memoryview]:
        left, views = 1500, list[memoryview]()
        for buffer in buffers:
            views.append(memoryview(buffer)[:left])
            left -= len(views[-1])
        return views

    monkeypatch.setattr(os, "writev", lambda file, buffers: writev(file, first(buffers)))
    written(tmp_path)
    monkeypatch.undo()
    assert read(tmp_path) == CONTENT
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, first(buffers), at))
    assert read(tmp_path) == CONTENT


def test_every_flipped_bit_and_every_torn_end_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole, rng = path.read_bytes(), random.Random(0)
    for position in [*range(160), *rng.sample(range(len(whole)), 100)]:
        changed = bytearray(whole)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        with pytest.raises(disk.RejectedFile):
            read(tmp_path)
    for length in [0, 1, 19, 20, 60, *rng.sample(range(len(whole)), 50)]:
        path.write_bytes(whole[:length])
        with pytest.raises(disk.RejectedFile):
            read(tmp_path)


def test_foreign_files_are_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    other = disk.path_of(tmp_path, "f", f"{KEY[::-1].hex()}.page")
    other.parent.mkdir(parents=True, exist_ok=True)
    path.rename(other)
    with pytest.raises(disk.RejectedFile, match="it holds something else"):
        read(tmp_path, other.name)
    with pytest.raises(disk.RejectedFile, match="cannot be read"):
        read(tmp_path)
    path = written(tmp_path)
    with pytest.raises(disk.RejectedFile, match="5000 bytes of content instead of 4999"):
        read(tmp_path, size=4999)
    foreign = disk.path_of(tmp_path, "g", NAME)
    foreign.parent.mkdir(parents=True)
    path.rename(foreign)
    with pytest.raises(disk.RejectedFile, match="it holds something else"):
        read(tmp_path, fingerprint="g")


def test_names_describe_entries() -> None:
    page, state = Entry(KEY, 0), Entry(KEY, 0, prefix=KEY[::-1], tail=5, kind="boundary")
    assert entry_of(name_of(page)).key == KEY and not entry_of(name_of(page)).prefix
    found = entry_of(name_of(state))
    assert (found.key, found.prefix, found.tail, found.kind) == (KEY, KEY[::-1], 5, "boundary")
    with pytest.raises(ValueError, match="no name"):
        entry_of("x.y")
    with pytest.raises(ValueError, match="is no name of a tier's file"):
        entry_of(name_of(state).replace(f".{state.kind}.", ".another."))


def test_bounds_on_bytes_and_age(tmp_path: Path) -> None:
    for number in range(5):
        path = written(tmp_path, f"{number:032x}.page")
        os.utime(path, (time.time(), time.time() - 1000 * (5 - number)))
    size = path.stat().st_size
    tier = DiskTier(tmp_path, "f", max_bytes=3 * size, max_age_s=2500)
    assert len(tier) == 2 and tier.num_bytes == 2 * size  # three are too old, of which two are too many as well
    assert [order.kind for order in tier.take_orders()] == ["drop"] * 3


def test_a_cleared_tier_drops_what_is_being_written(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, "f", 10**6, 1e6)
    assert tier.save(Entry(KEY, 0))
    (order,) = tier.take_orders()
    tier.clear()
    assert tier.saved(order.number, 5000, "") is not None and len(tier) == 0
    assert [order.kind for order in tier.take_orders()] == ["drop"]


def engine(folder: Path, **more: Any) -> LLM:
    return LLM(**(TINY | {"kv_offloading_size": 0.1, "kv_offloading_dir": str(folder)} | more))


def always_restores(llm: LLM) -> LLM:
    restores = llm._core.scheduler.restores
    assert restores is not None
    restores.tier.costs = AlwaysRestore()
    return llm


def test_a_restarted_engine_is_warm(tmp_path: Path) -> None:
    with engine(tmp_path) as llm:
        first = [serve(llm, index) for index in range(4)]
    with always_restores(engine(tmp_path)) as llm:
        again = [serve(llm, index) for index in range(4)]
        stats = llm.stats()
        llm._core.scheduler.check()
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first]
    assert all(num_cached == 149 for *_, num_cached in again), again
    assert again[0][1].startswith("KV and state of 149 tokens restored from disk in ")
    assert stats.num_disk_loads and not stats.num_rejected_files
    with engine(tmp_path, kv_offloading_dir=str(tmp_path), mamba_ssm_dtype="bfloat16") as llm:
        assert serve(llm, 0)[2] == 0, "files of other settings are not looked at"


def test_changed_files_are_misses(tmp_path: Path) -> None:
    with engine(tmp_path) as llm:
        first = [serve(llm, index) for index in range(4)]
    rng = random.Random(0)
    for path in sorted(tmp_path.glob("*/*/*.*")):
        content = bytearray(path.read_bytes())
        match rng.randrange(4):
            case 0:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            case 1:
                del content[rng.randrange(len(content)) :]
        path.write_bytes(content)
    with always_restores(engine(tmp_path)) as llm:
        again = [serve(llm, index) for _ in range(2) for index in range(4)]
        stats = llm.stats()
        llm._core.scheduler.check()
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first] * 2
    assert stats.num_rejected_files


def test_a_full_disk_loses_the_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = disk.write

    def full(folder: Path, fingerprint: str, name: str, content: Any) -> None:
        if int(name[:2], 16) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, fingerprint, name, content)

    monkeypatch.setattr(disk, "write", full)
    with engine(tmp_path) as llm:
        first = [serve(llm, index) for index in range(4)]
        again = [serve(llm, index) for index in range(4)]
        stats = llm.stats()
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first]
    assert stats.num_failed_saves and stats.num_external_hit_tokens


def kill_while_it_writes(code: str, folder: Path, num_lines: int, num_files: int) -> None:
    """Run a program and kill it after so many lines of output, when it has written so many files."""
    process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while num_lines > 0 or len(list(folder.glob("*/*/*"))) < num_files:
        assert process.stdout.readline(), "it ended by itself"
        num_lines -= 1
    process.send_signal(signal.SIGKILL)
    process.wait()


@takes_long
def test_a_killed_process_leaves_a_folder_that_can_be_used(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.offload.test_disk import engine, serve\n"
        "llm = engine(Path(sys.argv[1]))\n"
        "while True:\n    for index in range(4): print(serve(llm, index)[0], flush=True)\n"
    )
    for seed in range(2 if RUNS_LONG else 1):
        kill_while_it_writes(code, tmp_path, 5 + 3 * seed, 25)
    with LLM(**TINY) as llm:
        expected = [serve(llm, index)[0] for index in range(4)]
    with always_restores(engine(tmp_path)) as llm:
        found = [serve(llm, index) for index in range(4)]
        assert llm.stats().num_disk_loads
    assert [tokens for tokens, *_ in found] == expected
    assert len(PROMPTS) == 4


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    written(tmp_path, f"{KEY.hex()}.{KEY.hex()}.3.end.state")
    assert main(["cache", "list", str(tmp_path)]) == 0
    assert "f: 1 pages, 1 states, 0.00 GiB" in capsys.readouterr().out
    assert main(["cache", "verify", str(tmp_path)]) == 0
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert "removed, because it ends too early" in capsys.readouterr().out
    assert main(["cache", "empty", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("*/*/*"))
    assert main(["cache", "list", str(tmp_path / "no")]) == 2


def test_refused_settings(tmp_path: Path) -> None:
    folder = {"device": "cpu", "kv_offloading_dir": str(tmp_path)}
    with pytest.raises(ConfigError, match="has no effect without kv_offloading_size"):
        resolve(**folder)
    with pytest.raises(ConfigError, match="has no effect without kv_offloading_dir"):
        resolve(device="cpu", kv_offloading_size=1, kv_offloading_disk_size=2)
    assert resolve(**folder, kv_offloading_size=2).kv_offloading_disk_size == 8


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    written(tmp_path)
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        disk.write(tmp_path, "f", NAME, CONTENT[:100])
    assert read(tmp_path) == CONTENT and len(list(tmp_path.glob("*/*/*"))) == 1


def with_files(folder: Path) -> House:
    """A house whose tier has ``PROMPT`` in files alone."""
    house = House()
    house.serve(PROMPT)
    house.evict()
    house.tier.disk = house.tier.index.disk = tier = DiskTier(folder, "f", 10**9, 1e9)
    for store in (house.tier.pages, house.tier.states):
        for entry in store.entries():
            tier._add(entry_of(name_of(entry)), 10, time.time())
            store.drop(entry)
    assert house.found([*PROMPT, 1]) == 22
    return house


def test_a_rejected_file_is_not_used(tmp_path: Path) -> None:
    house = with_files(tmp_path)
    tier = house.tier.disk
    assert tier is not None
    assert house.restores.restore_first(request("r", PROMPT), house.manager.match([*PROMPT, 1]), 0)
    loads = tier.take_orders()
    house.restores.files_done([(order.number, 10, "" if place else "torn") for place, order in enumerate(loads)])
    assert house.found([*PROMPT, 1]) == 0 and len(tier) == 6


def test_a_request_waits_for_files_no_longer_than_computing_takes(tmp_path: Path) -> None:
    house = with_files(tmp_path)
    house.tier.costs.flops_per_s = 1e30
    late, other = request("r", PROMPT), request("other", PROMPT)
    assert not house.restores.restore_first(late, house.manager.match([*PROMPT, 1]), 0)
    house.tier.costs.flops_per_s = None
    assert house.restores.restore_first(other, house.manager.match([*PROMPT, 1]), 0)
    assert house.restores.still_waits(other)
    house.restores._deadlines["other"] = time.monotonic()
    assert not house.restores.still_waits(other)
    assert not house.restores.restore_first(other, house.manager.match([*PROMPT, 1]), 0)
    house.restores.files_done([(order.number, 10, "") for order in house.restores.take_file_orders()])
    assert house.found([*PROMPT, 1]) == 22, "the files were read for others"
