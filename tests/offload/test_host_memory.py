"""The memory of the tier on the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from weft.messages import FileOrder, SchedulerOutput
from weft.runner.host_memory import Transfers
from weft.runner.pinned_memory import allocate_host


def flags_of(address: int) -> list[str]:
    """The flags that Linux shows for the mapping that holds an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            is_inside = begin <= address < end
        elif is_inside and name == "VmFlags:":
            return rest.split()
    raise AssertionError("the memory is not mapped")


def test_forked_processes_do_not_copy_the_memory() -> None:
    """Linux copies pinned pages at every fork. With 13 GiB the first start of a GPU took a minute longer."""
    owner = object()
    memory = allocate_host(2**20, "a test", pin=False, owner=owner)
    assert "dc" in flags_of(memory.data_ptr()), "the flag of MADV_DONTFORK"


def test_files_of_several_ranks_wait_for_earlier_copies() -> None:
    """Rank 0 knows the ends of its own copies alone. A step may have files and no restore."""
    begun = list[list[str]]()
    link = SimpleNamespace(wait_for=lambda numbers: None, mark=lambda: ["ends"])
    for has_ranks in (True, False):
        files = SimpleNamespace(begin=lambda orders, earlier: begun.append(earlier))
        transfers: Any = SimpleNamespace(_link=link, _host=SimpleNamespace(has_ranks=has_ranks, files=files))
        Transfers.begin(transfers, SchedulerOutput(1, [], files=[FileOrder(1, "save", "name", 0)]))
    assert begun == [["ends"], []]
