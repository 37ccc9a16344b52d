"""FP8 checkpoints: shards, mixed projections, quantising while loading, and clear errors for what does not fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.fp8_checkpoints import (
    GEOMETRY,
    SCHEMES,
    edit_tensors,
    make_fp8_checkpoint,
    quantize_checkpoint,
    quantize_weight,
)
from tests.harness import Harness, model_context, poison
from tests.layers.test_tensor_parallel import Group, run_layer, run_sharded
from tests.tiny import make_checkpoint
from tests.whole import covering
from weft import LLM, SamplingParams
from weft.config.checkpoint import read_checkpoint_config
from weft.config.quantization import ONLINE
from weft.errors import ConfigError, UnsupportedModelError, WeightsError
from weft.layers.linear import LinearBase
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.ops.fp8 import dequantize_weight
from weft.quantization.storage import QuantizedRows
from weft.weights import load_weights

NEXT = "Qwen3NextForCausalLM"


def load(folder: Path, load_format: str = "auto", seed: int = 0, *, online: bool = False, tp: Any = None) -> CausalLM:
    config = read_checkpoint_config(folder)
    if online:
        config = dataclasses.replace(config, quantization=ONLINE)
    model = create_model(config, model_context(tp=tp))
    poison(model)
    load_weights(model, config, folder, load_format, seed)
    return model


@pytest.fixture(params=SCHEMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_fp8_checkpoint(NEXT, request.param, tmp_path)


def test_every_parameter_is_filled(checkpoint: Path) -> None:
    model = load(checkpoint)
    for name, parameter in model.named_parameters():
        assert parameter.float().isfinite().all(), name
    kinds = {name.rpartition(".")[2]: parameter.dtype for name, parameter in model.named_parameters()}
    assert kinds["gate_up"] == kinds["down"] == torch.float8_e4m3fn and kinds["gate_up_scale"] == torch.float32
    in_proj = model.get_submodule("model.layers.0.linear_attn.in_proj")
    assert in_proj.weight.dtype == torch.float8_e4m3fn and in_proj.plain_weight.dtype == torch.float32
    assert in_proj.plain_weight.shape == (4, 256), "the rows of b and a are not quantised"
    assert model.get_submodule("model.layers.0.mlp.router").weight.dtype == torch.float32


def test_fp8_bytes_are_counted(checkpoint: Path) -> None:
    quantized, plain = load(checkpoint), load(checkpoint.parent / "plain")
    sizes = [sum(p.numel() * p.element_size() for p in m.parameters()) for m in (quantized, plain)]
    assert sizes[0] < 0.45 * sizes[1], "the head and the embedding alone stay as they are"


TP = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = TP | {"moe_intermediate_size": 256, "intermediate_size": 256}


@pytest.mark.parametrize(
    ("name", "scheme"),
    covering(["linear_attn", "mlp", "self_attn"], ["block", "channel-token", "tensor-static"], of=1),
)
def test_shards_take_their_scales_along(name: str, scheme: str, tmp_path: Path) -> None:
    """Two ranks must compute what one rank computes. Scales per token add a difference, since each rank has a
    scale for its own share of the inputs."""
    folder = make_fp8_checkpoint(NEXT, scheme, tmp_path, **WIDE)
    run = run_layer(f"model.layers.{3 if name == 'self_attn' else 0}.{name}")
    whole, sharded = run(Harness(folder))[:73], run_sharded(folder, 2, run)[:73]
    error = (sharded - whole).norm(dim=-1) / whole.norm(dim=-1)
    assert error.median() < (5e-2 if scheme == "channel-token" else 1e-5) and error.max() < 0.1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"moe_intermediate_size": 128}, "experts.0.gate_proj: this rank's 64 of 128 rows, from row 0 on, do not fall"),
        ({"shared_expert_intermediate_size": 384}, "shared_expert.gate_proj: this rank's 192 of 384 rows"),
    ],
)
def test_shards_that_cut_blocks_are_refused(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_fp8_checkpoint(NEXT, "block", tmp_path, **(WIDE | overrides))
    with pytest.raises(ConfigError, match=re.escape(message) + ".*use a tensor_parallel_size that leaves multiples"):
        load(folder, tp=Group(2).rank(0))


def test_ranks_with_whole_experts_take_their_scales(tmp_path: Path) -> None:
    folder = make_fp8_checkpoint(NEXT, "block", tmp_path, **(WIDE | {"num_experts": 6}))
    config, group = read_checkpoint_config(folder), Group(2)
    whole = load(folder).get_submodule("model.layers.0.mlp.experts")
    for rank in range(2):
        context = dataclasses.replace(model_context(tp=group.rank(rank)), expert_parallel=True)
        model = create_model(config, context)
        poison(model)
        load_weights(model, config, folder, "auto", 0)
        experts = model.get_submodule("model.layers.0.mlp.experts")
        for name, parameter in experts.named_parameters():
            want = whole.get_parameter(name)[rank * 3 : rank * 3 + 3]
            assert torch.equal(parameter.float(), want.float()), name


def test_parts_that_cut_blocks_are_refused(tmp_path: Path) -> None:
    """Merged parts whose rows 128 does not divide, although one rank has all of them."""
    folder = make_fp8_checkpoint("Qwen3ForCausalLM", "block", tmp_path, head_dim=64, num_attention_heads=3)
    with pytest.raises(ConfigError, match=r"self_attn.q_proj: this rank's 192 of 192 rows, from row 0 on, do not fall"):
        load(folder)


def test_a_ragged_matrix_of_one_part_is_fine(tmp_path: Path) -> None:
    """Its last blocks are smaller, as published."""
    folder = make_fp8_checkpoint("Qwen3ForCausalLM", "block", tmp_path, hidden_size=200, intermediate_size=256)
    weight = load(folder).get_submodule("model.layers.0.mlp.down_proj")
    assert weight.weight.shape == (200, 256) and weight.weight_scale.shape == (2, 2)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["model.layers.3.self_attn.q_proj"], "quantises some of .*q_proj, .*k_proj, .*v_proj and not others"),
        (["model.layers.0.mlp.shared_expert.up_proj"], "quantises some of .*gate_proj, .*up_proj and not others"),
        (["mlp.experts.0.down_proj"], "quantises some of .*experts.0.gate_proj, .* and not others"),
    ],
)
def test_merged_parts_are_quantised_together(changed: list[str], message: str, tmp_path: Path) -> None:
    folder = make_fp8_checkpoint(NEXT, "block", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] += changed
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message):
        load(folder)


DENSE_GRANITE = {"num_local_experts": 0}


@pytest.mark.parametrize(
    ("arch", "overrides", "left_out", "module"),
    [
        ("Lfm2MoeForCausalLM", {}, "feed_forward.experts", "model.layers.1.mlp.experts"),
        ("JambaForCausalLM", {}, "feed_forward.experts", "model.layers.1.mlp.experts"),
        ("MiniMaxForCausalLM", {}, "block_sparse_moe.experts", "model.layers.1.mlp.experts"),
        ("NemotronHForCausalLM", {}, "mixer.experts", "model.layers.3.mlp.experts"),
        ("KimiLinearForCausalLM", {}, "kv_b_proj|block_sparse_moe.experts", "model.layers.1.mlp.experts"),
        ("KimiLinearForCausalLM", {}, "kv_b_proj|shared_experts", "model.layers.1.mlp.shared_expert.gate_up_proj"),
        ("GraniteMoeHybridForCausalLM", DENSE_GRANITE, "input_linear", "model.layers.1.mlp.gate_up_proj"),
        ("GraniteMoeHybridForCausalLM", DENSE_GRANITE, "output_linear", "model.layers.1.mlp.down_proj"),
    ],
)
def test_modules_are_left_out_by_their_published_names(
    arch: str, overrides: dict[str, Any], left_out: str, module: str, tmp_path: Path
) -> None:
    folder = quantize_checkpoint(make_checkpoint(arch, tmp_path / "plain", **overrides), "tensor-static", left_out)
    model = load(folder)
    assert all(parameter.float().isfinite().all() for parameter in model.parameters())
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert all(dtype == torch.float32 for name, dtype in kinds.items() if name.startswith(f"{module}."))
    assert torch.float8_e4m3fn in kinds.values()


# --- broken checkpoints -----------------------------------------------------------------------------------------------

Q = "model.layers.3.self_attn.q_proj."


def edited(tmp_path: Path, scheme: str, change: Callable[[dict[str, Tensor]], None]) -> Path:
    folder = make_fp8_checkpoint(NEXT, scheme, tmp_path)
    edit_tensors(folder, change)
    return folder


@pytest.mark.parametrize(
    ("scheme", "tensor"),
    [
        ("block", "weight_scale_inv"),
        ("channel-token", "weight_scale"),
        ("tensor-static", "input_scale"),
        ("channel-static", "input_scale"),
    ],
)
def test_missing_scales_are_named(scheme: str, tensor: str, tmp_path: Path) -> None:
    folder = edited(tmp_path, scheme, lambda tensors: tensors.__delitem__(Q + tensor))
    with pytest.raises(WeightsError, match=re.escape(f"1 missing: {Q}{tensor}. Check")):
        load(folder)


@pytest.mark.parametrize(
    ("scheme", "tensor", "shape", "needed"),
    [
        ("block", "weight_scale_inv", (2, 2), [4, 2]),
        ("block", "weight_scale_inv", (512, 1), [4, 2]),
        ("channel-token", "weight_scale", (4, 2), [512, 1]),
        ("channel-token", "weight_scale", (1,), [512, 1]),
        ("tensor-token", "weight_scale", (512, 1), [1]),
    ],
)
def test_scales_of_the_wrong_shape_are_named(
    scheme: str, tensor: str, shape: tuple[int, ...], needed: list[int], tmp_path: Path
) -> None:
    folder = edited(tmp_path, scheme, lambda tensors: tensors.update({Q + tensor: torch.ones(shape)}))
    message = f"1 of the wrong shape: {Q}{tensor} is {list(shape)}, the config needs {needed}"
    with pytest.raises(WeightsError, match=re.escape(message)):
        load(folder)


def test_a_scale_without_dimensions_is_one_number(tmp_path: Path) -> None:
    folder = make_fp8_checkpoint(NEXT, "tensor-static", tmp_path)
    before = load(folder)

    def flatten(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: t.reshape(()) for name, t in tensors.items() if name.endswith("_scale")})

    edit_tensors(folder, flatten)
    for (name, a), b in zip(before.named_parameters(), load(folder).parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name


def test_e5m2_is_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path, "block", lambda t: t.update({f"{Q}weight": t[f"{Q}weight"].to(torch.float8_e5m2)}))
    with pytest.raises(WeightsError, match=r"q_proj.weight has dtype F8_E5M2; supported are .*F8_E4M3"):
        load(folder)


def test_weights_of_the_wrong_dtype_are_named(tmp_path: Path) -> None:
    """FP8 where the config wants none, and none where it wants FP8."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
        tensors[f"{Q}weight"] = tensors[f"{Q}weight"].bfloat16()

    with pytest.raises(
        WeightsError, match=r"2 of the wrong dtype: .*lm_head.weight is F8_E4M3, the config needs F32"
    ) as e:
        load(edited(tmp_path, "block", change))
    assert f"{Q}weight is BF16, the config needs F8_E4M3" in str(e.value)


def test_a_quantised_checkpoint_without_its_config(tmp_path: Path) -> None:
    folder = make_fp8_checkpoint(NEXT, "block", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"of the wrong dtype: .* is F8_E4M3, the config needs F32, F16 or BF16"):
        load(folder)


# --- scales of merged parts -------------------------------------------------------------------------------------------


def test_parts_with_scales_of_their_own(tmp_path: Path) -> None:
    """One number per part: every row keeps its part's; static inputs take the largest."""

    def change(tensors: dict[str, Tensor]) -> None:
        for part, factor in (("q", 1.0), ("k", 2.0), ("v", 3.0)):
            prefix = f"model.layers.3.self_attn.{part}_proj."
            tensors[f"{prefix}weight_scale"] = torch.tensor([factor])
            tensors[f"{prefix}input_scale"] = torch.tensor([1 / factor])

    qkv = load(edited(tmp_path, "tensor-static", change)).get_submodule("model.layers.3.self_attn.qkv_proj")
    assert qkv.weight_scale[:, 0].tolist() == [1.0] * 512 + [2.0] * 128 + [3.0] * 128
    assert qkv.input_scale.tolist() == [1.0]


# --- quantising while loading -----------------------------------------------------------------------------------------


def test_online_weights_are_near_the_checkpoints(tmp_path: Path) -> None:
    folder = make_checkpoint(NEXT, tmp_path, **GEOMETRY)
    plain, online = load(folder), load(folder, online=True)
    for name, module in online.named_modules():
        if isinstance(module, LinearBase) and module.quantizable:
            got = dequantize_weight(module.weight, module.weight_scale, block=0)
            want = plain.get_submodule(name).weight
            assert (got - want).norm() < 0.04 * want.norm(), name
            assert module.weight.shape == want.shape, "all parts are quantised"
    experts = online.get_submodule("model.layers.0.mlp.experts")
    want = plain.get_submodule("model.layers.0.mlp.experts").down
    assert (dequantize_weight(experts.down, experts.down_scale, block=0) - want).norm() < 0.04 * want.norm()


def test_online_from_fused_experts(tmp_path: Path) -> None:
    single, fused = (make_checkpoint(NEXT, tmp_path / kind, **GEOMETRY) for kind in ("single", "fused"))

    def fuse(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            prefix = f"model.layers.{layer}.mlp.experts"
            parts = {
                part: torch.stack([tensors.pop(f"{prefix}.{e}.{part}_proj.weight") for e in range(5)])
                for part in ("gate", "up", "down")
            }
            tensors[f"{prefix}.gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{prefix}.down_proj"] = parts["down"]

    edit_tensors(fused, fuse)
    for (name, a), b in zip(
        load(single, online=True).named_parameters(), load(fused, online=True).parameters(), strict=True
    ):
        assert torch.equal(a.float(), b.float()), name


def test_online_shards_quantise_their_share(tmp_path: Path) -> None:
    folder = make_checkpoint(NEXT, tmp_path)
    whole = load(folder).get_submodule("model.layers.3.self_attn.o_proj")
    shard = load(folder, online=True, tp=Group(2).rank(1)).get_submodule("model.layers.3.self_attn.o_proj")
    want = whole.weight[:, 32:]
    assert (dequantize_weight(shard.weight, shard.weight_scale, block=0) - want).norm() < 0.04 * want.norm()


def test_rows_are_quantised_as_the_reference_does() -> None:
    rows = torch.randn(6, 40)
    weight, scale = torch.empty(6, 40).to(torch.float8_e4m3fn), torch.empty(6, 1)
    QuantizedRows(weight, scale).copy_(rows.bfloat16())
    want, want_scale = quantize_weight(rows.bfloat16().float(), "channel")
    assert torch.equal(weight.float(), want.float()) and torch.equal(scale, want_scale)


def test_the_engine_says_how_weights_are_stored(tmp_path: Path) -> None:
    fp8 = make_fp8_checkpoint("Qwen3ForCausalLM", "block", tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "cpu_cache_gib": 0.05, "max_num_seqs": 2}
    for folder, given, reason in ((fp8, None, "the checkpoint's (fp8)"), (tmp_path / "plain", "fp8", None)):
        with LLM(str(folder), quantization=given, **settings) as llm:
            assert llm.config.quantization == "fp8" and llm.config.reasons.get("quantization") == reason
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            assert len(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("source", ["checkpoint", "online"])
def test_dummy_weights(source: str, tmp_path: Path) -> None:
    if source == "online":
        folder = make_checkpoint(NEXT, tmp_path, **GEOMETRY)
    else:
        folder = make_fp8_checkpoint(NEXT, "block", tmp_path)
    model = load(folder, "dummy", 3, online=source == "online")
    block = 0 if source == "online" else 128
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and module.quantizable:
            weight = dequantize_weight(module.weight, module.weight_scale, block=block)
            assert 0.8 < weight.std() * weight.shape[1] ** 0.5 < 1.2, name
    other = load(folder, "dummy", 3, online=source == "online")
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a.float(), b.float()), name
