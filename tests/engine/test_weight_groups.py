"""Weights between processes: a trainer broadcasts them through a group on the CPU."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.test_weight_updates import HYBRID, answers, engine, tensors_of
from tests.patience import GUARD_S
from tests.ranks import fork_ranks
from tests.tiny import make_checkpoint
from tests.whole import takes_long, unless_long
from weft.errors import ConfigError, WeightsError
from weft.weights import shared
from weft.weights.group import WeightGroup
from weft.weights.shared import share_weights


@pytest.fixture(autouse=True)
def _forks() -> Iterator[None]:
    with fork_ranks():
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    old, new = (make_checkpoint(HYBRID, tmp_path_factory.mktemp("hybrid"), seed) for seed in (0, 1))
    return old, new


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def train(folder: Path, port: int, world_size: int, rounds: int) -> None:
    """The trainer's process."""
    torch.set_num_threads(1)
    group = WeightGroup("127.0.0.1", port, 0, world_size, "gloo")
    for _ in range(rounds):
        for tensor in load_file(folder / "model.safetensors").values():
            group.broadcast(tensor.contiguous())


def described(folder: Path) -> dict[str, Any]:
    tensors = load_file(folder / "model.safetensors")
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


@pytest.mark.parametrize("tp", unless_long([1], [1, 2]))
def test_a_trainer_broadcasts(tp: int, pair: tuple[Path, Path]) -> None:
    with engine(pair[1]) as fresh:
        want = answers(fresh)
    port, given = free_port(), described(pair[1])
    trainer = multiprocessing.get_context("forkserver").Process(target=train, args=(pair[1], port, 1 + tp, 2))
    trainer.start()
    with engine(pair[0], tensor_parallel_size=tp) as llm:
        before = answers(llm)
        llm.init_weights_update_group("127.0.0.1", port, 1, 1 + tp)
        with pytest.raises(WeightsError, match=r"1 unexpected: model.foo. .*nothing was changed"):
            llm.update_weights_from_distributed(**given | {"names": ["model.foo", *given["names"][1:]]})
        assert answers(llm) == before
        assert llm.update_weights_from_distributed(**given) == 1
        assert answers(llm) == want or tp == 2
        llm.destroy_weights_update_group()
    trainer.join(GUARD_S)
    assert trainer.exitcode == 0


def send_half(folder: Path, port: int) -> None:
    """A trainer that ends in the middle of an update."""
    group = WeightGroup("127.0.0.1", port, 0, 2, "gloo")
    tensors = list(load_file(folder / "model.safetensors").values())
    for tensor in tensors[: len(tensors) // 2]:
        group.broadcast(tensor.contiguous())


@takes_long
def test_a_trainer_dies_in_the_middle(pair: tuple[Path, Path]) -> None:
    port, given = free_port(), described(pair[1])
    trainer = multiprocessing.get_context("forkserver").Process(target=send_half, args=(pair[1], port))
    trainer.start()
    with engine(pair[0]) as llm:
        before = answers(llm)
        llm.init_weights_update_group("127.0.0.1", port, 1, 2)
        with pytest.raises(WeightsError, match="the old weights were written back"):
            llm.update_weights_from_distributed(**given)
        assert answers(llm) == before and llm.weight_version == 0
        llm.destroy_weights_update_group()
    trainer.join(GUARD_S)


def test_bad_groups(pair: tuple[Path, Path]) -> None:
    given = described(pair[0])
    with engine(pair[0]) as llm:
        with pytest.raises(ConfigError, match="there is no group 'weft'; call init_weights_update_group"):
            llm.update_weights_from_distributed(**given)
        for offset, size in ((0, 2), (1, 1), (2, 2)):
            with pytest.raises(ConfigError, match="leave no room for the trainer"):
                llm.init_weights_update_group("127.0.0.1", free_port(), offset, size)
        with pytest.raises(ConfigError, match="backend='mpi' is not valid"):
            llm.init_weights_update_group("127.0.0.1", free_port(), 1, 2, backend="mpi")
        with pytest.raises(ConfigError, match="there is no group"):
            llm.destroy_weights_update_group()


def test_handles_need_a_gpu(pair: tuple[Path, Path]) -> None:
    with pytest.raises(WeightsError, match="only CUDA tensors have handles"):
        share_weights(tensors_of(pair[0]))
    with engine(pair[0]) as llm:
        for content, message in ((b"\x90", "need an engine on a GPU"), (b"\xc1", "not those of share_weights")):
            with pytest.raises(WeightsError, match=message):
                llm.update_weights_from_ipc(content)


def test_views_of_one_storage_are_shared_and_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages stay open until the last tensor is read, since closing one waits for the copies."""
    base, alone = torch.arange(24.0), torch.ones(3)
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in (base, alone)}
    numbers = {address: number for number, address in enumerate(memory)}
    counts = {"shared": 0, "opened": 0}

    class Storage:
        """A storage as if on a GPU. ``_share_cuda_`` returns another reference counter each time."""

        def __init__(self, address: int) -> None:
            self._address = address

        def data_ptr(self) -> int:
            return self._address

        def _share_cuda_(self) -> tuple[Any, ...]:
            counts["shared"] += 1
            return 0, bytes([numbers[self._address]]), 96, 0, b"", counts["shared"], None, False

    def on_gpu(tensor: torch.Tensor) -> Any:
        facts = {name: getattr(tensor, name) for name in ("shape", "dtype", "stride", "storage_offset")}
        storage = Storage(tensor.untyped_storage().data_ptr())
        given = SimpleNamespace(**facts, device=SimpleNamespace(type="cuda", index=0), untyped_storage=lambda: storage)
        given.detach = lambda: given
        return given

    def opened(device: int, handle: bytes, size: int, offset: int, counter: bytes, place: int, *event: Any) -> Any:
        assert event == (b"", False)  # the sender has waited
        counts["opened"] += 1
        return list(memory.values())[handle[0]]

    monkeypatch.setattr(shared, "_uuid", lambda device: "GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened, raising=False)
    tensors = {"a": base[:12].view(3, 4), "b": base[12:].view(4, 3).t(), "c": alone, "d": base[5:9]}
    description = share_weights((name, on_gpu(tensor)) for name, tensor in tensors.items())
    found = {offered.name: read(...) for offered, read in shared.Handles([description], torch.device("cpu"))}
    assert counts == {"shared": 2, "opened": 2}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items()) and len(found) == 4
