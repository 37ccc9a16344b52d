"""Weights: every layout loads, every tensor and parameter is accounted for, every broken folder gets a clear error."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.harness import Harness, model_context, poison
from tests.tiny import ARCHITECTURES, make_checkpoint
from tests.whole import unless_long
from weft.config.checkpoint import read_checkpoint_config
from weft.errors import ConfigError, WeightsError
from weft.layers.linear import MergedReplicatedLinear
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.weights import LoadReport, load_weights, loader
from weft.weights.safetensors_folder import SafetensorsFolder
from weft.weights.update import ModelTensors


def build(folder: Path, dtype: torch.dtype = torch.float32, tp: Any = None) -> CausalLM:
    model = create_model(read_checkpoint_config(folder), model_context(dtype=dtype, tp=tp))
    poison(model)
    return model


def load(folder: Path, load_format: str = "auto", seed: int = 0, **kwargs: Any) -> tuple[CausalLM, LoadReport]:
    model = build(folder, **kwargs)
    return model, load_weights(model, read_checkpoint_config(folder), folder, load_format, seed)


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a single-file checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def remove(folder: Path, *names: str) -> None:
    def pop(tensors: dict[str, Tensor]) -> None:
        for name in names:
            del tensors[name]

    rewrite(folder, pop)


def padding_elements(model: CausalLM) -> int:
    """Elements of rows that pad a router's matrix, and its bias, up to aligned rows."""
    routers = [m for m in model.modules() if isinstance(m, MergedReplicatedLinear)]
    return sum(p[m.shard.num_filled :].numel() for m in routers for p in m.parameters())


def parameters(model: CausalLM) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def assert_same(a: CausalLM, b: CausalLM) -> None:
    for name, parameter in parameters(a).items():
        assert torch.equal(parameter, parameters(b)[name]), name


SOME = pytest.mark.parametrize("checkpoint", unless_long(ARCHITECTURES[::3], ARCHITECTURES), indirect=True)
"""Some checkpoints, for tests of code that one loader runs for every family."""


@pytest.fixture(params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_checkpoint(request.param, tmp_path)


@pytest.fixture
def next_moe(tmp_path: Path) -> Path:
    return make_checkpoint("Qwen3NextForCausalLM", tmp_path)


def test_every_parameter_is_filled_and_every_tensor_used(checkpoint: Path) -> None:
    model, report = load(checkpoint)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    stored = load_file(checkpoint / "model.safetensors")
    assert report.num_tensors + sum(report.ignored.values()) == len(stored)
    text = sum(t.numel() for name, t in stored.items() if "visual" not in name and t.is_floating_point())
    assert sum(p.numel() for p in model.parameters()) - padding_elements(model) == text
    assert report.num_bytes == 4 * (text + padding_elements(model))


@SOME
def test_sharded_index(checkpoint: Path, tmp_path: Path) -> None:
    arch = read_checkpoint_config(checkpoint).architecture
    sharded = make_checkpoint(arch, tmp_path / "sharded", save_options={"max_shard_size": "40KB"})
    assert len(list(sharded.glob("*.safetensors"))) > 2 and not (sharded / "model.safetensors").exists()
    assert_same(load(checkpoint)[0], load(sharded)[0])


def test_fused_experts_of_either_orientation(tmp_path: Path) -> None:
    """Qwen3-VL-MoE is published with inputs before outputs; transformers takes both, and saves the other."""
    arch = "Qwen3VLMoeForConditionalGeneration"
    saved, turned = (make_checkpoint(arch, tmp_path / name, moe_intermediate_size=20) for name in ("one", "other"))

    def turn(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()

    rewrite(turned, turn)
    assert_same(load(saved)[0], load(turned)[0])


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if ("Moe" in a and "VL" not in a) or "Next" in a])
def test_experts_fused_or_one_by_one(arch: str, tmp_path: Path) -> None:
    single = make_checkpoint(arch, tmp_path / "single")
    fused = make_checkpoint(arch, tmp_path / "fused")

    def fuse(tensors: dict[str, Tensor]) -> None:
        groups: dict[str, dict[str, list[Tensor]]] = {}
        for name in sorted(tensors):
            match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight", name)
            if match:
                part = {"w1": "gate", "w3": "up", "w2": "down"}.get(match[3], match[3].removesuffix("_proj"))
                groups.setdefault(match[1], {}).setdefault(part, []).append(tensors.pop(name))
        assert groups
        for prefix, parts in groups.items():
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([torch.stack(parts["gate"]), torch.stack(parts["up"])], dim=1)
            tensors[f"{prefix}.down_proj"] = torch.stack(parts["down"])

    rewrite(fused, fuse)
    model = load(fused)[0]
    assert_same(load(single)[0], model)
    pieces = ModelTensors(model, ties_head=False).pieces
    assert {len(pieces[n].copies) for n in pieces if n.endswith("gate_up_proj")} == {1}, "copied in parts"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_conversion(next_moe: Path, dtype: torch.dtype) -> None:
    full, converted = parameters(load(next_moe)[0]), parameters(load(next_moe, dtype=dtype)[0])
    for name, parameter in converted.items():
        keeps_float32 = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if keeps_float32 else dtype), name
        assert torch.equal(parameter, full[name].to(parameter.dtype)), name


def test_bfloat16_checkpoint_into_float32(next_moe: Path) -> None:
    full = parameters(load(next_moe)[0])
    rewrite(next_moe, lambda tensors: tensors.update({n: t.bfloat16() for n, t in tensors.items()}))
    for name, parameter in parameters(load(next_moe)[0]).items():
        assert torch.equal(parameter, full[name].bfloat16().float()), name


class Rank:
    """One rank of two, for looking at its shard."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def peer_memory(self, num_bytes: int) -> Tensor | None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shards_hold_half_the_rows_and_no_more(arch: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(arch, tmp_path, num_hidden_layers=4)
    whole, report = load(checkpoint)
    for rank in range(2):
        shard, shard_report = load(checkpoint, tp=Rank(rank))
        vocab_rows = 106 - rank  # of 211; the second shard has a padding row
        for name, parameter in shard.named_parameters():
            rows = vocab_rows if name in ("model.embed_tokens.weight", "lm_head.weight") else None
            assert parameter[:rows].isfinite().all(), name
        assert shard_report.num_tensors == report.num_tensors
        name = [n for n in parameters(whole) if n.endswith((".self_attn.o_proj.weight", ".self_attn.out_proj.weight"))][
            -1
        ]
        full = parameters(whole)[name]
        half = full.shape[1] // 2
        got = parameters(shard)[name]
        assert torch.equal(got, full[:, rank * half : (rank + 1) * half])
    share = 0.7 if arch.startswith("Qwen4") else 0.6  # the mixers of its streams are on every rank
    assert shard_report.num_bytes < share * report.num_bytes


def test_a_tensor_of_many_single_rows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zamba's input projections, whose x and gate alternate row by row; the values are those of row-by-row reads."""
    folder = make_checkpoint("ZambaForCausalLM", tmp_path, mamba_expand=6)
    expected = parameters(load(folder)[0])
    reads: Counter[str] = Counter()
    read = SafetensorsFolder.read

    def counted(self: SafetensorsFolder, name: str, source: tuple[slice, ...]) -> Tensor:
        reads[name] += 1
        return read(self, name, source)

    monkeypatch.setattr(SafetensorsFolder, "read", counted)
    assert load(folder) and reads["model.layers.0.mamba.in_proj.weight"] == 1
    monkeypatch.setattr(loader, "_MOST_READS", 10_000)
    for name, parameter in parameters(load(folder)[0]).items():
        assert torch.equal(parameter, expected[name]), name
    assert reads["model.layers.0.mamba.in_proj.weight"] == 1 + 2 * 6 * 48


# --- accounting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "name", "pattern"),
    [
        ("Qwen3NextForCausalLM", "mtp.layers.0.mlp.gate.weight", "mtp.*"),
        ("Qwen3_5ForCausalLM", "mtp.fc.weight", "mtp.*"),
        ("Qwen3_5MoeForCausalLM", "model.visual.blocks.0.attn.qkv.weight", "model.visual.*"),
        ("Qwen3_5ForConditionalGeneration", "mtp.norm.weight", "mtp.*"),
        ("LlamaForCausalLM", "model.layers.0.self_attn.rotary_emb.inv_freq", "*.rotary_emb.inv_freq"),
    ],
)
def test_ignorable_tensors_are_counted_and_logged(
    arch: str, name: str, pattern: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint(arch, tmp_path)
    before = load(tmp_path)[1]
    rewrite(tmp_path, lambda tensors: tensors.update({name: torch.ones(3)}))
    with caplog.at_level("INFO", logger="weft.weights"):
        after = load(tmp_path)[1]
    assert after.ignored[pattern] == before.ignored.get(pattern, 0) + 1
    assert after.num_tensors == before.num_tensors
    assert any(pattern in record.getMessage() for record in caplog.records)


def test_vision_tower_of_the_published_layout_is_ignored(tmp_path: Path) -> None:
    report = load(make_checkpoint("Qwen3_5MoeForConditionalGeneration", tmp_path))[1]
    assert report.ignored["model.visual.*"] > 5


@SOME
def test_unexpected_tensors_are_listed(checkpoint: Path) -> None:
    extra = {"model.layers.9.mlp.up_proj.weight": torch.ones(2, 2), "mtpx.weight": torch.ones(1)}
    rewrite(checkpoint, lambda tensors: tensors.update(extra))
    with pytest.raises(WeightsError, match="2 unexpected: ") as error:
        load(checkpoint)
    assert all(name in str(error.value) for name in extra)


@SOME
def test_missing_tensors_are_listed(checkpoint: Path) -> None:
    gone = [
        n
        for n in load_file(checkpoint / "model.safetensors")
        if n.endswith(("k_proj.weight", "language_model.norm.weight"))
    ]
    remove(checkpoint, *gone)
    with pytest.raises(WeightsError, match=f"{len(gone)} missing: .*k_proj.weight"):
        load(checkpoint)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.layers.0.linear_attn.A_log"])
def test_one_missing_tensor(next_moe: Path, name: str) -> None:
    remove(next_moe, name)
    with pytest.raises(WeightsError, match=re.escape(f"1 missing: {name}. Check")):
        load(next_moe)


def test_incomplete_expert_sets(next_moe: Path) -> None:
    names = [f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for i, e in ((0, 4), (2, 0))]
    remove(next_moe, *names)
    with pytest.raises(WeightsError, match="2 missing: " + re.escape(", ".join(names))):
        load(next_moe)


def test_one_expert_too_many(next_moe: Path) -> None:
    name = "model.layers.0.mlp.experts.5.up_proj.weight"
    rewrite(next_moe, lambda tensors: tensors.update({name: torch.zeros(24, 48)}))
    with pytest.raises(WeightsError, match=re.escape(f"1 unexpected: {name}")):
        load(next_moe)


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("model.layers.3.self_attn.q_proj.weight", [128, 48]),
        ("model.layers.0.linear_attn.in_proj_qkvz.weight", [160, 48]),
        ("model.layers.0.linear_attn.conv1d.weight", [96, 1, 4]),
        ("model.layers.0.mlp.experts.3.gate_proj.weight", [24, 48]),
        ("lm_head.weight", [211, 48]),
    ],
)
def test_wrong_shapes_name_both(next_moe: Path, name: str, needed: list[int]) -> None:
    def halve(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][: needed[0] // 2]

    rewrite(next_moe, halve)
    given = [needed[0] // 2, *needed[1:]]
    with pytest.raises(
        WeightsError, match=re.escape(f"1 of the wrong shape: {name} is {given}, the config needs {needed}")
    ):
        load(next_moe)


def test_all_kinds_of_problems_come_together(next_moe: Path) -> None:
    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["other.weight"] = torch.zeros(1)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].T

    rewrite(next_moe, spoil)
    with pytest.raises(WeightsError, match=r"1 missing: .*1 unexpected: .*1 of the wrong shape: .*belong together"):
        load(next_moe)


def test_a_failed_check_copies_nothing(next_moe: Path) -> None:
    remove(next_moe, "model.norm.weight")
    model = build(next_moe)
    with pytest.raises(WeightsError):
        load_weights(model, read_checkpoint_config(next_moe), next_moe, "auto", 0)
    filled = sum(int(parameter.isfinite().sum()) for parameter in model.parameters())
    assert filled == padding_elements(model)


@pytest.mark.parametrize("arch", ["LlamaForCausalLM", "Qwen3_5ForConditionalGeneration"])
def test_tied_head(arch: str, tmp_path: Path) -> None:
    make_checkpoint(arch, tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    embedding = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    model, report = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert load(tmp_path)[1].num_tensors == report.num_tensors + 1
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": embedding + 1e-3}))
    with pytest.raises(WeightsError, match=r"tie_word_embeddings=true, but lm_head.weight .* differs"):
        load(tmp_path)
    for other in (embedding[:-1], torch.cat([embedding, embedding[:1]])):
        rewrite(tmp_path, lambda t, head=other: t.update({"lm_head.weight": head.clone()}))
        with pytest.raises(WeightsError, match=re.escape(f"(shape [{len(other)}, 48]) differs")):
            load(tmp_path)
    narrow = {"lm_head.weight": embedding.bfloat16()}
    rewrite(tmp_path, lambda t: t.update({n: x.bfloat16() for n, x in t.items()} | narrow))
    load(tmp_path)


def test_both_spellings_of_one_tensor(tmp_path: Path) -> None:
    make_checkpoint("Qwen3_5ForConditionalGeneration", tmp_path)
    rewrite(tmp_path, lambda t: t.update({"model.norm.weight": torch.ones(48)}))
    with pytest.raises(WeightsError, match=r"model.norm.weight.* are the same tensor of the model"):
        load(tmp_path)


def test_the_embedding_of_early_mamba2_files(tmp_path: Path) -> None:
    make_checkpoint("Mamba2ForCausalLM", tmp_path)
    model, _ = load(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"backbone.embedding.weight": t.pop("backbone.embeddings.weight")}))
    assert_same(load(tmp_path)[0], model)


def test_dense_layers_of_kimi_linear_as_published(tmp_path: Path) -> None:
    """Under ``mlp``, where transformers writes ``block_sparse_moe`` for dense layers and experts alike."""
    make_checkpoint("KimiLinearForCausalLM", tmp_path)
    model, report = load(tmp_path)
    dense = re.compile(r"block_sparse_moe\.(gate|up|down)_proj")
    rewrite(tmp_path, lambda t: [t.update({dense.sub(r"mlp.\1_proj", n): t.pop(n)}) for n in list(t)] and None)
    assert any(".mlp.gate_proj." in name for name in load_file(tmp_path / "model.safetensors"))
    again, same = load(tmp_path)
    assert report.num_tensors == same.num_tensors
    for name, parameter in parameters(model).items():
        torch.testing.assert_close(parameters(again)[name], parameter, rtol=0, atol=0, equal_nan=True)


# --- random weights ---------------------------------------------------------------------------------------------------


@SOME
def test_dummy_weights_need_only_the_config_and_depend_on_the_seed(checkpoint: Path) -> None:
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    (a, report), (b, _), (c, _) = (
        load(checkpoint, "dummy", 7),
        load(checkpoint, "dummy", 7),
        load(checkpoint, "dummy", 8),
    )
    assert report.num_tensors == 0 and report.num_bytes > 0
    assert all(parameter.isfinite().all() for parameter in a.parameters())
    assert_same(a, b)
    assert all(not torch.equal(p, parameters(c)[name]) for name, p in parameters(a).items())
    values = torch.cat([p.flatten() for p in a.parameters()])
    assert values.unique().numel() > 0.99 * values.numel(), "parameters repeat each other's numbers"


def test_dummy_weights_do_not_depend_on_the_model_around_them(tmp_path: Path) -> None:
    short = make_checkpoint("Qwen3NextForCausalLM", tmp_path / "short", num_hidden_layers=2)
    long = make_checkpoint("Qwen3NextForCausalLM", tmp_path / "long")
    a, b = parameters(load(short, "dummy", 3)[0]), parameters(load(long, "dummy", 3)[0])
    for name in a:
        assert torch.equal(a[name], b[name]), name


def test_dummy_models_run(checkpoint: Path) -> None:
    harness = Harness(checkpoint)
    load_weights(harness.model, harness.config, checkpoint, "dummy", 0)
    logits = harness.run([(harness.sequence(list(range(70))), 70)])[0]
    assert logits.isfinite().all() and 0.1 < logits.std() < 10


def test_unknown_load_format(next_moe: Path) -> None:
    with pytest.raises(ConfigError, match="load_format='gguf' is not valid; allowed are 'auto' and 'dummy'"):
        load(next_moe, "gguf")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_parameter_that_no_layout_can_fill_is_named(tmp_path: Path, load_format: str) -> None:
    folder = make_checkpoint("LlamaForCausalLM", tmp_path)
    model = build(folder)
    model.model.layers[0].register_parameter("decay", torch.nn.Parameter(torch.empty(3)))
    with pytest.raises(AssertionError, match=r"no WeightModule.*: model\.layers\.0\.decay"):
        load_weights(model, read_checkpoint_config(folder), folder, load_format, 0)
