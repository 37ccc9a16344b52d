"""Coded checkpoints: shards, mixed forms, gpt-oss, quantising while loading, and clear errors for what does not fit."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.coded_checkpoints import dequantize_fp4, make_coded_checkpoint, quantize_fp4
from tests.fp8_checkpoints import GEOMETRY, edit_tensors, quantization_config
from tests.fp8_checkpoints import quantize_weight as quantize_to_fp8
from tests.harness import Harness, model_context, poison
from tests.layers.test_tensor_parallel import Group, run_layer, run_sharded
from tests.quantization.test_coded_parity import logits_of, prompt, reference
from tests.tiny import make_checkpoint
from tests.whole import covering, unless_long
from weft import LLM, SamplingParams
from weft.config.checkpoint import read_checkpoint_config
from weft.config.quantization import ONLINE_INT4
from weft.config.weights import weight_bytes
from weft.errors import ConfigError, UnsupportedModelError, WeightsError
from weft.layers.linear import LinearBase
from weft.layers.moe import Experts
from weft.models.decoder import CausalLM
from weft.models.registry import create_model
from weft.ops.codes import CodedMatrix, Packing, dequantize_codes, pack_words, quantize_groups, unpack_words
from weft.quantization.coded import CodedExperts, CodedLinear
from weft.weights import load_weights

NEXT, OSS = "Qwen3NextForCausalLM", "GptOssForCausalLM"
WIDE: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "moe_intermediate_size": 256, "intermediate_size": 256,
}  # fmt: skip
Q = "model.layers.3.self_attn.q_proj."


def load(folder: Path, load_format: str = "auto", *, online: bool = False, tp: Any = None) -> CausalLM:
    config = read_checkpoint_config(folder)
    if online:
        config = dataclasses.replace(config, quantization=ONLINE_INT4)
    model = create_model(config, model_context(tp=tp))
    poison(model)
    load_weights(model, config, folder, load_format, 3)
    return model


def matrix_of(module: LinearBase) -> CodedMatrix:
    assert isinstance(module.quant_method, CodedLinear)
    return module.quant_method._matrix(module)


def experts_of(module: Experts) -> dict[str, CodedMatrix]:
    assert isinstance(module.quant_method, CodedExperts)
    return module.quant_method._matrices(module)


# --- the form in memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 32), (4, 16), (8, 64), (8, 0)])
@pytest.mark.parametrize("columns", [16, 96, 160, 384])
def test_packing_is_inverted(bits: int, group: int, columns: int) -> None:
    codes, packing = torch.randint(2**bits, (7, columns), dtype=torch.uint8), Packing.of(bits, group)
    words = pack_words(codes, packing)
    assert words.shape == packing.words_shape(7, columns) and words.dtype == torch.int32
    assert torch.equal(unpack_words(words, packing, columns).to(torch.uint8), codes)


def test_a_span_is_the_same_bits_of_all_words() -> None:
    """Weight k of a chunk is in bits ``4 * (k // 32)`` of half ``k % 2`` of word ``k % 32 // 2``."""
    for k in (0, 1, 31, 32, 95, 127):
        codes = torch.zeros(1, 128, dtype=torch.uint8)
        codes[0, k] = 15
        words = pack_words(codes, Packing.of(4, 128))[0, 0].tolist()
        assert words[k % 32 // 2] & 0xFFFFFFFF == 15 << (4 * (k // 32) + 16 * (k % 2)) and sum(map(bool, words)) == 1


def test_rounding_to_nearest() -> None:
    """Errors are at most half a step but at the end that has seven codes; the largest magnitude of a group is exact."""
    weight = torch.randn(9, 256) * torch.rand(9, 1)
    weight[3, :128] = 0
    codes, scales = quantize_groups(weight, 128, torch.float32)
    words = pack_words(codes, Packing.of(4, 128))
    got = dequantize_codes(CodedMatrix(words, scales, None, None, 4, False, 128, 256))
    steps = scales.t().abs().repeat_interleave(128, 1)
    assert ((got - weight).abs() <= steps * 1.0001).all() and (got[3, :128] == 0).all()
    assert ((got - weight).abs() <= steps * 0.5001).float().mean() > 0.99
    extremes = weight.view(9, 2, 128).abs().argmax(2)
    found = got.view(9, 2, 128).gather(2, extremes[..., None])
    torch.testing.assert_close(found, weight.view(9, 2, 128).gather(2, extremes[..., None]))


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"),
    covering(
        ["linear_attn", "mlp", "self_attn"],
        ["int4 g64 zeros", "int4 rows zeros", "gptq zeros", "awq", "nvfp4", "fp8 mx"],
        of=1,
    ),
)
def test_shards_take_their_scales_along(name: str, kind: str, tmp_path: Path) -> None:
    folder = make_coded_checkpoint(NEXT, kind, tmp_path, **WIDE)
    run = run_layer(f"model.layers.{3 if name == 'self_attn' else 0}.{name}")
    whole, sharded = run(Harness(folder))[:73], run_sharded(folder, 2, run)[:73]
    torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4)


def test_shards_that_cut_groups_are_refused(tmp_path: Path) -> None:
    folder = make_coded_checkpoint(NEXT, "int4 g128", tmp_path, **(WIDE | {"moe_intermediate_size": 128}))
    message = "experts.0.down_proj: this rank's 64 of 128 columns do not fall on the boundaries of the groups of 128"
    with pytest.raises(ConfigError, match=re.escape(message) + ".*use a tensor_parallel_size that leaves a multiple"):
        load(folder, tp=Group(2).rank(0))


def test_ranks_with_whole_experts(tmp_path: Path) -> None:
    folder = make_coded_checkpoint(NEXT, "int4 g64 zeros", tmp_path, **(WIDE | {"num_experts": 6}))
    config, group = read_checkpoint_config(folder), Group(2)
    whole = load(folder).get_submodule("model.layers.0.mlp.experts")
    for rank in range(2):
        model = create_model(config, dataclasses.replace(model_context(tp=group.rank(rank)), expert_parallel=True))
        poison(model)
        load_weights(model, config, folder, "auto", 0)
        for name, parameter in model.get_submodule("model.layers.0.mlp.experts").named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)[rank * 3 : rank * 3 + 3]), name


# --- mixed checkpoints ------------------------------------------------------------------------------------------------


def test_layers_in_several_forms(tmp_path: Path) -> None:
    """INT4 in most layers, FP8 by channel in one projection, another projection as it is."""
    folder = make_coded_checkpoint(NEXT, "int4 g32", tmp_path, left_out=r"layers\.1\..*out_proj|shared_expert\.")
    config = json.loads((folder / "config.json").read_text())
    quantization, name = config["quantization_config"], "model.layers.3.self_attn.o_proj"
    fp8 = quantization_config("channel-token")["config_groups"]["group_0"]
    quantization["config_groups"]["group_1"] = fp8 | {"targets": [name], "format": "float-quantized"}
    (folder / "config.json").write_text(json.dumps(config))

    def in_fp8(tensors: dict[str, Tensor]) -> None:
        for part in ("packed", "scale", "shape"):
            del tensors[f"{name}.weight_{part}"]
        plain = load_file(tmp_path / "plain" / "model.safetensors")[f"{name}.weight"]
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = quantize_to_fp8(plain, "channel")

    edit_tensors(folder, in_fp8)
    model = load(folder)
    kinds = {name: type(m.quant_method).__name__ for name, m in model.named_modules() if isinstance(m, LinearBase)}
    assert kinds[name] == "Fp8Linear" and kinds["model.layers.1.linear_attn.out_proj"] == "UnquantizedLinear"
    assert kinds["model.layers.0.linear_attn.out_proj"] == "CodedLinear"
    got = Harness(folder)
    sequence = got.sequence(prompt(65))
    want = logits_of(reference(NEXT, tmp_path / "plain"), sequence.tokens)
    errors = (got.run([(sequence, 65)])[0] - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() < 0.1, "FP8 alone rounds inputs"


def test_parts_of_one_matrix_in_several_forms_are_refused(tmp_path: Path) -> None:
    folder = make_coded_checkpoint(NEXT, "gptq", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"][r".*layers\.3\.self_attn\.k_proj"] = {"bits": 8}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"q_proj, .* several forms \(int4, int8\)"):
        load(folder)


# --- gpt-oss ----------------------------------------------------------------------------------------------------------


def make_gpt_oss(folder: Path, **overrides: Any) -> Path:
    """``folder/coded`` with experts as published, and ``folder/plain`` with the same values."""
    geometry = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}
    plain = make_checkpoint(OSS, folder / "plain", **geometry, **overrides)
    tensors, stored = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")) or tensor.dim() != 3:
            stored[name] = tensor
            continue
        blocks, scales, exact = [], [], []
        for expert in tensor:  # [columns, rows]
            codes, scale, whole = quantize_fp4(expert.t().contiguous() * torch.rand(expert.shape[1], 1).add(0.5), 32)
            blocks.append((codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).unflatten(1, (-1, 16)))
            scales.append((scale.log2() + 127).to(torch.uint8))
            exact.append(dequantize_fp4(codes, scale, whole).t())
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = torch.stack(blocks), torch.stack(scales)
        tensors[name] = torch.stack(exact).contiguous()
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    coded = folder / "coded"
    coded.mkdir()
    save_file(stored, coded / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (coded / "config.json").write_text(json.dumps(config))
    return coded


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    harness = Harness(make_gpt_oss(tmp_path))
    sequence = harness.sequence(prompt(65))
    want = logits_of(reference(OSS, tmp_path / "plain"), sequence.tokens)
    torch.testing.assert_close(harness.run([(sequence, 65)])[0], want, rtol=1e-3, atol=1e-3)


def test_gpt_oss_experts_over_ranks(tmp_path: Path) -> None:
    """Ranks hold whole experts, or are refused where groups of 32 are cut."""
    folder = make_gpt_oss(tmp_path)
    with pytest.raises(ConfigError, match="this rank's 48 of 96 columns are no multiple of the 32 weights"):
        load(folder, tp=Group(2).rank(1))


def test_mxfp4_of_another_architecture_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3MoeForCausalLM", tmp_path, **GEOMETRY)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UnsupportedModelError, match="quant_method='mxfp4' is read for gpt-oss alone"):
        load(folder)


# --- quantising while loading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", [NEXT, OSS, "Qwen3VLMoeForConditionalGeneration"])
def test_online_weights_are_near_the_checkpoints(arch: str, tmp_path: Path) -> None:
    """Experts one by one, interleaved (gpt-oss) and fused (Qwen3-VL-MoE), and merged projections with all parts."""
    geometry = GEOMETRY if arch == NEXT else {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64}
    folder = make_checkpoint(arch, tmp_path, **geometry)
    plain, online = load(folder), load(folder, online=True)
    count = 0
    for name, module in online.named_modules():
        if isinstance(module, LinearBase) and module.quantizable:
            got, want = dequantize_codes(matrix_of(module)), plain.get_submodule(name).get_parameter("weight")
            assert (got - want).norm() < 0.15 * want.norm(), name
        elif isinstance(module, Experts):
            for part, matrix in experts_of(module).items():
                count += 1
                for expert, want in enumerate(plain.get_submodule(name).get_parameter(part)):
                    assert (dequantize_codes(matrix.expert(expert)) - want).norm() < 0.15 * want.norm(), (name, part)
    assert count


def test_online_groups_follow_the_width(tmp_path: Path) -> None:
    folder = make_checkpoint(NEXT, tmp_path, **(GEOMETRY | {"moe_intermediate_size": 96}))
    matrices = experts_of(load(folder, online=True).get_submodule("model.layers.0.mlp.experts"))  # type: ignore[arg-type]
    assert [matrix.group for matrix in matrices.values()] == [128, 32]


def test_online_widths_without_groups_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path, hidden_size=64, intermediate_size=72)
    with pytest.raises(ConfigError, match="rows of 72 weights do not divide into groups of 128, 64 or 32"):
        load(folder, online=True)


def test_online_shards_quantise_their_share(tmp_path: Path) -> None:
    folder = make_checkpoint(NEXT, tmp_path, **(GEOMETRY | WIDE))
    whole, shard = (
        matrix_of(load(folder, online=True, tp=tp).get_submodule("model.layers.3.self_attn.o_proj"))  # type: ignore[arg-type]
        for tp in (None, Group(2).rank(1))
    )
    assert whole.columns == 2 * shard.columns and whole.group == shard.group == 128
    assert torch.equal(dequantize_codes(whole)[:, shard.columns :], dequantize_codes(shard))


DUMMIES = ["int4 g64 zeros", "int8 rows", "nvfp4", "mxfp4", "mxfp8", "online"]


@pytest.mark.parametrize("kind", unless_long(DUMMIES[::2], DUMMIES))
def test_dummy_weights(kind: str, tmp_path: Path) -> None:
    online = kind == "online"
    folder = make_checkpoint(NEXT, tmp_path, **GEOMETRY) if online else make_coded_checkpoint(NEXT, kind, tmp_path)
    for name, module in load(folder, "dummy", online=online).named_modules():
        if isinstance(module, LinearBase) and module.quantizable:
            weights = dequantize_codes(matrix_of(module))
            assert weights.std() == pytest.approx(weights.shape[1] ** -0.5, rel=0.7), name
            assert abs(weights.mean()) < 0.08 * weights.std(), name


COUNTED = ["int4 g128", "int8 g128 zeros", "nvfp4", "mxfp4", "mxfp8"]


@pytest.mark.parametrize("kind", unless_long(COUNTED[::2], COUNTED))
def test_bytes_are_counted(kind: str, tmp_path: Path) -> None:
    model = load(make_coded_checkpoint(NEXT, kind, tmp_path, hidden_size=512))
    config = read_checkpoint_config(tmp_path / "coded")
    kept = sum(p.numel() * p.element_size() for p in model.parameters())
    assert weight_bytes(config, "float32") == pytest.approx(kept, rel=0.05)


# --- broken checkpoints -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("int4 g64 zeros", "weight_scale"), ("int4 g64 zeros", "weight_zero_point"), ("gptq", "qzeros"),
        ("gptq", "scales"), ("awq", "qzeros"), ("nvfp4", "weight_global_scale"), ("modelopt", "weight_scale_2"),
    ],
)  # fmt: skip
def test_missing_tensors_are_named(kind: str, tensor: str, tmp_path: Path) -> None:
    folder = make_coded_checkpoint(NEXT, kind, tmp_path)
    edit_tensors(folder, lambda tensors: tensors.__delitem__(Q + tensor))
    with pytest.raises(WeightsError, match=re.escape(f"1 missing: {Q}{tensor}. Check")):
        load(folder)


def _shuffled(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}g_idx"] = tensors[f"{Q}g_idx"].flip(0).contiguous()


def _other_shape(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}weight_shape"] = torch.tensor([7, 256])


def _other_zero(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}qzeros"][0, 0] = 0


def _overwritten_zeros(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}qzeros"][0, 0] = -1 << 12  # the fourth zero was 0


def _as_bytes(tensors: dict[str, Tensor]) -> None:
    tensors[f"{Q}weight_packed"] = tensors[f"{Q}weight_packed"].to(torch.uint8)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gptq", _shuffled, r"q_proj.g_idx: weights of one group are not neighbours .*quantise with desc_act=False"),
        ("gptq", _other_zero, r"q_proj.qzeros: a zero is not 8, but the config says that weights are symmetric"),
        ("gptq zeros", _overwritten_zeros, r"q_proj.qzeros: four zeros of a word are -1: an old AutoGPTQ"),
        ("auto-round awq", _other_zero, r"q_proj.qzeros: a zero is not 8"),
        ("int4 g32", _other_shape, r"q_proj.weight_shape is not \[512, 256\], which the config needs"),
        ("int4 g32", _as_bytes, r"q_proj.weight_packed is U8, the config needs I32"),
    ],
)
def test_tensors_that_contradict_the_config(
    kind: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    folder = make_coded_checkpoint(NEXT, kind, tmp_path)
    edit_tensors(folder, change)
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_groups_that_do_not_divide_rows_are_named(tmp_path: Path) -> None:
    folder = make_coded_checkpoint(NEXT, "int4 g32", tmp_path, moe_intermediate_size=96)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    message = "experts.0.down_proj: group_size=64 does not divide its rows of 96 weights"
    with pytest.raises(ConfigError, match=message):
        load(folder)


HEADS: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 16}


@pytest.mark.parametrize(("experts", "what"), [(0, "several projections"), (4, "all experts")])
def test_packed_tensors_of_several_matrices_are_refused(experts: int, what: str, tmp_path: Path) -> None:
    sizes = {"num_local_experts": experts, "hidden_size": 64, "intermediate_size": 64, "shared_intermediate_size": 64}
    folder = make_checkpoint("GraniteMoeHybridForCausalLM", tmp_path, **sizes, **HEADS)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=f"int4 weights of {what} in one tensor are not read"):
        load(folder)


# --- whole engines ----------------------------------------------------------------------------------------------------


def test_the_engine_says_how_weights_are_stored(tmp_path: Path) -> None:
    coded = make_coded_checkpoint("Qwen3ForCausalLM", "awq", tmp_path)
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "cpu_cache_gib": 0.05, "max_num_seqs": 2}
    for folder, given, reason in ((coded, None, "the checkpoint's (awq)"), (tmp_path / "plain", "int4", None)):
        with LLM(str(folder), quantization=given, **settings) as llm:
            assert llm.config.quantization == "int4" and llm.config.reasons.get("quantization") == reason
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            assert len(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0].outputs[0].token_ids) == 3


def test_dropped_activations_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(make_coded_checkpoint("Qwen3ForCausalLM", "modelopt", tmp_path))
    assert "was made for inputs in 4 bits" in caplog.text
