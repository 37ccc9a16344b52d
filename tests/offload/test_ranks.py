"""Files of several ranks: each rank stores a share of every entry. An entry exists if all ranks have their shares."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.offload.test_disk import always_restores, engine, kill_while_it_writes
from tests.offload.test_engine import TINY, serve
from tests.ranks import fork_ranks
from tests.whole import takes_long
from weft import LLM
from weft.cli import main
from weft.offload import disk
from weft.offload.disk_tier import DiskTier

RANKS = {"tensor_parallel_size": 2}


@pytest.fixture(autouse=True)
def _forks() -> Iterator[None]:
    with fork_ranks():
        yield


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Return the answers of an engine without a tier."""
    with LLM(**TINY) as llm:
        return [serve(llm, index)[0] for index in range(4)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the prefixes of all prompts, in files of two ranks."""
    folder = tmp_path_factory.mktemp("filled")
    with fork_ranks(), engine(folder, **RANKS) as llm:
        for index in range(4):
            serve(llm, index)
    return folder


@pytest.fixture
def folder(filled: Path, tmp_path: Path) -> Path:
    return shutil.copytree(filled, tmp_path / "copy")


def share(folder: Path, rank: int) -> Path:
    (found,) = folder.glob(f"*-{rank}of2")
    return found


def names(folder: Path, rank: int) -> set[str]:
    return {found.path.name for found in disk.files_of(share(folder, rank))}


def test_a_restarted_engine_is_warm(folder: Path, expected: list[list[int]]) -> None:
    assert names(folder, 0) and names(folder, 0) == names(folder, 1)
    with always_restores(engine(folder, **RANKS)) as llm:
        again = [serve(llm, index) for index in range(4)]
        stats, size = llm.stats(), llm.config.kv_offloading_disk_size
        assert size is not None and stats.disk_max_bytes == int(size * 2**30) // 2, "each rank has half"
    assert [tokens for tokens, *_ in again] == expected
    assert all(num_cached == 149 for *_, num_cached in again), again
    assert stats.num_disk_loads and not stats.num_rejected_files
    with always_restores(engine(folder)) as llm:
        assert serve(llm, 0)[2] == 0, "files of two ranks are of no use to one"


def test_a_changed_share_of_one_rank_is_a_miss_on_all(
    folder: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    for found in disk.files_of(share(folder, 1)):
        content = bytearray(found.path.read_bytes())
        content[-1] ^= 1
        found.path.write_bytes(content)
    with always_restores(engine(folder, **RANKS)) as llm:
        again = [serve(llm, index) for _ in range(2) for index in range(4)]
        stats = llm.stats()
    assert [tokens for tokens, *_ in again] == expected * 2
    assert stats.num_rejected_files and not stats.num_disk_loads
    assert "is rejected: on rank 1 its content does not match its checksum" in caplog.text


def test_an_entry_that_a_rank_lacks_is_no_entry(
    folder: Path, expected: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    rng, lost = random.Random(0), [set[str](), set[str]()]
    for rank in range(2):
        for found in list(disk.files_of(share(folder, rank))):
            if rng.random() < 0.2:
                found.path.unlink()
                lost[rank].add(found.path.name)
    with always_restores(engine(folder, **RANKS)) as llm:
        disk_tier = llm._core.scheduler.restores.tier.disk  # type: ignore[union-attr]
        assert disk_tier is not None and len(disk_tier) == len(names(folder, 0) - lost[1])
        again = [serve(llm, index) for index in range(4)]
    assert [tokens for tokens, *_ in again] == expected
    assert f"{len(lost[0] ^ lost[1])} entries are removed, because a rank has no file of them" in caplog.text
    assert names(folder, 0) == names(folder, 1)


def test_a_write_that_fails_on_one_rank_is_undone_on_all(
    tmp_path: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = disk.write

    def full(folder: Path, fingerprint: str, name: str, content: Any) -> None:
        if fingerprint.endswith("0of2") and int(name[:2], 16) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, fingerprint, name, content)

    monkeypatch.setattr(disk, "write", full)
    with engine(tmp_path, **RANKS) as llm:
        first = [serve(llm, index)[0] for _ in range(2) for index in range(4)]
        stats = llm.stats()
    assert first == expected * 2 and stats.num_failed_saves
    assert names(tmp_path, 0) == names(tmp_path, 1)


@takes_long
def test_killed_ranks_leave_a_folder_that_can_be_used(tmp_path: Path, expected: list[list[int]]) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom tests.offload.test_ranks import RANKS, engine, fork_ranks, serve\n"
        "with fork_ranks():\n    llm = engine(Path(sys.argv[1]), **RANKS)\n"
        "while True:\n    for index in range(4): print(serve(llm, index)[0], flush=True)\n"
    )
    kill_while_it_writes(code, tmp_path, 7, 50)
    with always_restores(engine(tmp_path, **RANKS)) as llm:
        found = [serve(llm, index)[0] for index in range(4)]
        assert llm.stats().num_disk_loads
    assert found == expected


def test_the_verb_knows_every_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = memoryview(bytes(1000))
    for rank in range(2):
        disk.write(tmp_path, disk.share_of("f", rank, 2), f"{rank:032x}.page", content)
        disk.write(tmp_path, disk.share_of("f", rank, 2), f"{7:032x}.page", content)
    tier = DiskTier(tmp_path, "f", 10**6, 1e6, num_ranks=2)
    assert len(tier) == 1 and sorted(order.kind for order in tier.take_orders()) == ["drop"] * 2
    assert main(["cache", "list", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "f-0of2: 2 pages" in listed and "f-1of2: 2 pages" in listed
    path = disk.path_of(tmp_path, "f-1of2", f"{7:032x}.page")
    path.write_bytes(disk.path_of(tmp_path, "f-0of2", path.name).read_bytes())
    assert main(["cache", "verify", str(tmp_path)]) == 1
    assert f"f-1of2/00/{path.name}: removed, because it holds something else" in capsys.readouterr().out
    assert main(["cache", "empty", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("*/*/*"))
