"""Weights: broken files and folders get a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny import make_checkpoint
from tests.weights.test_weights import build, load, rewrite
from weft.config.checkpoint import read_checkpoint_config
from weft.errors import WeftError, WeightsError
from weft.weights import load_weights


@pytest.fixture
def next_moe(tmp_path: Path) -> Path:
    return make_checkpoint("Qwen3NextForCausalLM", tmp_path)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickle_files_are_refused(next_moe: Path, pickle: str) -> None:
    (next_moe / "model.safetensors").rename(next_moe / pickle)
    with pytest.raises(WeightsError, match=f"{pickle} .*pickle files.*convert them"):
        load(next_moe)


def test_pickle_files_beside_safetensors_do_not_matter(next_moe: Path) -> None:
    (next_moe / "pytorch_model.bin").write_bytes(b"never opened")
    load(next_moe)


def test_an_index_beside_the_one_file_does_not_matter(next_moe: Path) -> None:
    (next_moe / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "gone.safetensors"}}')
    load(next_moe)


def test_a_file_that_the_machine_cannot_read_is_not_called_broken(
    next_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("weft.weights.safetensors_folder.safe_open", fail)
    with pytest.raises(WeftError, match=r"model.safetensors cannot be read: .*Input/output error") as error:
        load(next_moe)
    assert not isinstance(error.value, WeightsError)


def test_folder_without_weights(next_moe: Path) -> None:
    (next_moe / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"holds no .*safetensors files; .*dummy"):
        load(next_moe)


def test_not_a_folder(next_moe: Path) -> None:
    with pytest.raises(WeightsError, match="is not a folder"):
        load_weights(build(next_moe), read_checkpoint_config(next_moe), next_moe / "absent", "auto", 0)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(next_moe: Path, keep: int) -> None:
    path = next_moe / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match=r"model.safetensors is truncated or not a safetensors file"):
        load(next_moe)


def test_foreign_file(next_moe: Path) -> None:
    (next_moe / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(range(256)) * 20)
    with pytest.raises(WeightsError, match="truncated or not a safetensors file"):
        load(next_moe)


def shard(folder: Path) -> tuple[Path, dict[str, Any]]:
    make_checkpoint("Qwen3ForCausalLM", folder, save_options={"max_shard_size": "40KB"})
    index = folder / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


def test_index_naming_an_absent_file(tmp_path: Path) -> None:
    _, content = shard(tmp_path)
    file = content["weight_map"]["model.norm.weight"]
    (tmp_path / file).unlink()
    with pytest.raises(WeightsError, match=f"names files that are not there: {file}"):
        load(tmp_path)


def test_index_naming_an_absent_tensor(tmp_path: Path) -> None:
    index, content = shard(tmp_path)
    content["weight_map"]["model.extra.weight"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(WeightsError, match=r"names tensors that its files do not hold: model.extra.weight"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "\x00\xff"])
def test_broken_index(tmp_path: Path, text: str) -> None:
    index, _ = shard(tmp_path)
    index.write_bytes(text.encode("latin-1"))
    with pytest.raises(WeightsError, match="is not a safetensors index"):
        load(tmp_path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    _, content = shard(tmp_path)
    target = tmp_path / content["weight_map"]["lm_head.weight"]
    other = load_file(tmp_path / content["weight_map"]["model.norm.weight"])
    save_file(load_file(target) | {"model.norm.weight": other["model.norm.weight"]}, target)
    with pytest.raises(WeightsError, match=r"tensor model.norm.weight is in .* and in another file"):
        load(tmp_path)


def test_quantised_tensors_are_refused(next_moe: Path) -> None:
    rewrite(next_moe, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}))
    with pytest.raises(WeightsError, match=r"lm_head.weight has dtype I8; supported are"):
        load(next_moe)
