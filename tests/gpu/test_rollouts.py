"""Updates, handles and sleep on a GPU: real graphs stay valid, and answers are those of a fresh engine."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.test_weight_groups import described, free_port
from tests.engine.test_weight_updates import HYBRID, MOE, answers, tensors_of
from tests.patience import GUARD_S
from tests.tiny import make_checkpoint
from weft import LLM
from weft.errors import WeightsError
from weft.weights.group import WeightGroup
from weft.weights.shared import share_weights

pytestmark = pytest.mark.gpu

WIDTHS: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": (HYBRID, {"cuda_graph_mode": "FULL", "dtype": "float32"}),
    "bf16": (HYBRID, {"cuda_graph_mode": "FULL"}),
    "pieces": (HYBRID, {"cuda_graph_mode": "FULL_AND_PIECEWISE", "piecewise_cuda_graph_tokens": (4, 128)}),
    "int4": (MOE, {"cuda_graph_mode": "FULL", "quantization": "int4"}),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    made = {}
    for arch in (HYBRID, MOE):
        old, new = (make_checkpoint(arch, tmp_path_factory.mktemp(arch), seed, **WIDTHS) for seed in (0, 1))
        made[arch] = old, new
    return made


def engine(folder: Path, **settings: Any) -> LLM:
    sizes: dict[str, Any] = {"num_kv_pages": 200, "num_state_slots": 12, "max_num_seqs": 4, "max_model_len": 256}
    return LLM(str(folder), skip_tokenizer_init=True, cuda_graph_bs=(1, 4), **sizes | {"dtype": "bfloat16"} | settings)


def gives_memory_back(llm: LLM) -> bool:
    """Sleep and wake up until the GPU had more memory meanwhile. Other processes of the tier take memory too."""
    until, more = time.monotonic() + GUARD_S / 4, False
    while not more and time.monotonic() < until:
        free = torch.cuda.mem_get_info()[0]
        llm.sleep()
        more = torch.cuda.mem_get_info()[0] > free
        llm.wake_up()
    return more


@pytest.mark.parametrize("way", WAYS)
def test_update_sleep_and_wake(way: str, pairs: dict[str, tuple[Path, Path]]) -> None:
    arch, settings = WAYS[way]
    old, new = pairs[arch]
    with engine(new, **settings) as fresh:
        want = answers(fresh)
    with engine(old, **settings, enable_sleep_mode=True) as llm:
        before = answers(llm)
        llm.update_weights({name: tensor.cuda() for name, tensor in tensors_of(new).items()})
        assert answers(llm) == want != before
        assert gives_memory_back(llm)
        assert answers(llm) == want
        llm.sleep(2)
        llm.wake_up(["weights"])
        llm.update_weights_from_path(old)
        llm.wake_up(["kv_cache"])
        assert answers(llm) == before


def share(link: Connection, folder: Path) -> None:
    """Another process on this GPU."""
    tensors = {name: tensor.cuda() for name, tensor in load_file(folder / "model.safetensors").items()}
    link.send_bytes(share_weights(tensors))
    link.recv()


def test_tensors_of_another_process(pairs: dict[str, tuple[Path, Path]]) -> None:
    old, new = pairs[HYBRID]
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    other = context.Process(target=share, args=(theirs, new), daemon=True)
    other.start()
    with engine(new) as fresh:
        want = answers(fresh)
    with engine(old) as llm:
        assert answers(llm) != want
        with pytest.raises(WeightsError, match="nothing was changed"):
            llm.update_weights_from_ipc(share_weights({"model.foo": torch.zeros(1, device="cuda")}))
        llm.update_weights_from_ipc(link.recv_bytes())
        assert answers(llm) == want
    link.send(None)
    other.join(GUARD_S)
    assert other.exitcode == 0


def send(link: Connection, folder: Path, port: int) -> None:
    """A trainer on the second GPU."""
    torch.cuda.set_device(1)
    group = WeightGroup("127.0.0.1", port, 0, 2, "nccl")
    tensors = {name: tensor.cuda() for name, tensor in load_file(folder / "model.safetensors").items()}
    while link.recv():
        for tensor in tensors.values():
            group.broadcast(tensor.contiguous())
    torch.cuda.synchronize()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="the trainer and the engine need a GPU each")
@pytest.mark.parametrize("arch", [HYBRID, MOE])
def test_a_trainer_on_another_gpu_broadcasts(arch: str, pairs: dict[str, tuple[Path, Path]]) -> None:
    old, new = pairs[arch]
    context, port, given = multiprocessing.get_context("spawn"), free_port(), described(new)
    link, theirs = context.Pipe()
    other = context.Process(target=send, args=(theirs, new, port), daemon=True)
    other.start()
    with engine(new) as fresh:
        want = answers(fresh)
    with engine(old) as llm:
        before = answers(llm)
        llm.init_weights_update_group("127.0.0.1", port, 1, 2)
        link.send(True)
        with pytest.raises(WeightsError, match=r"1 unexpected: model.foo. .*nothing was changed"):
            llm.update_weights_from_distributed(**given | {"names": ["model.foo", *given["names"][1:]]})
        assert answers(llm) == before
        link.send(True)
        assert llm.update_weights_from_distributed(**given) == 1
        assert answers(llm) == want != before
        llm.destroy_weights_update_group()
    link.send(False)
    other.join(GUARD_S)
    assert other.exitcode == 0
