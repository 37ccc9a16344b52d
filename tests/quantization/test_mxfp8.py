"""MXFP8: the experts of Inkling 2 as published and as transformers saves them, shards, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.quantizers import quantizer_finegrained_fp8

from tests.coded_checkpoints import dequantize_mxfp8, make_coded_checkpoint, quantize_mxfp8
from tests.fp8_checkpoints import edit_tensors
from tests.harness import Harness
from tests.layers.test_tensor_parallel import Group, run_layer, run_sharded
from tests.quantization.test_coded_loading import experts_of, load
from tests.quantization.test_coded_parity import logits_of, prompt, reference
from tests.tiny import make_checkpoint
from weft.config.checkpoint import read_checkpoint_config
from weft.errors import ConfigError, WeightsError
from weft.ops.codes import dequantize_codes
from weft.weights import loader

INKLING2, WRAPPER = "Inkling2ForCausalLM", "Inkling2ForConditionalGeneration"
FORM = {
    "quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
    "modules_to_not_convert": ["lm_head", "model.vision_tower", "model.language_model.layers.*.self_attn"],
}  # fmt: skip
Q = "model.layers.3.self_attn.q_proj."


def make_inkling2(folder: Path, saved: bool = False, **overrides: Any) -> Path:
    """``folder/coded`` as published, or as transformers saves it, and ``folder/plain`` with the same values."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96} | overrides
    plain, coded = make_checkpoint(INKLING2, folder / "plain", **sizes), folder / "coded"
    tensors, stored = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        stored[name] = tensor
        if ".experts." in name:
            factors = torch.randint(-2, 3, (*tensor.shape[:-1], tensor.shape[-1] // 32), generator=generator)
            values, exponents = quantize_mxfp8(tensor * 2.0 ** factors.repeat_interleave(32, -1))
            stored[name] = values
            stored[f"{name}_scale"] = exponents.view(torch.float8_e8m0fnu) if saved else exponents
            tensors[name] = dequantize_mxfp8(values, exponents)
    assert len(stored) == len(tensors) + 8, "two matrices of four layers"
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    coded.mkdir()
    save_file(stored, coded / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((plain / "config.json").read_text())
    more = {"transformers_version": text.pop("transformers_version"), "quantization_config": FORM} if saved else {}
    config = {"architectures": [WRAPPER], "model_type": "inkling2", "text_config": text} | more
    (coded / "config.json").write_text(json.dumps(config))
    return coded


@pytest.mark.parametrize("saved", [False, True])
def test_inkling2(saved: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Logits are those of transformers' model of the dequantised weights; what is not an expert stays as it is."""
    harness = Harness(make_inkling2(tmp_path, saved))
    sequences = [harness.sequence(prompt(length)) for length in (3, 65)]
    got = torch.cat(harness.run([(s, len(s.tokens)) for s in sequences], pad_tokens=3, pad_seqs=1))
    model = reference(INKLING2, tmp_path / "plain")
    torch.testing.assert_close(got, torch.cat([logits_of(model, s.tokens) for s in sequences]), rtol=1e-3, atol=1e-3)
    for sequence in sequences:
        sequence.tokens.append(17)
    steps = torch.cat(harness.run([(s, 1) for s in sequences], pad_tokens=2, pad_seqs=2))
    want = torch.stack([logits_of(model, s.tokens)[-1] for s in sequences])
    torch.testing.assert_close(steps, want, rtol=1e-3, atol=1e-3)
    kinds = {type(m.quant_method).__name__ for m in harness.model.modules() if hasattr(m, "quant_method")}
    assert kinds == {"CodedExperts", "UnquantizedLinear"} and "made for inputs in 8 bits" in caplog.text
    quantization = read_checkpoint_config(tmp_path / "coded").quantization
    assert quantization is not None and quantization.name == "mxfp8"


@pytest.mark.parametrize("arch", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_files_as_transformers_reads_them(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers, which dequantises where there is no GPU, computes the same of the same files."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *_: True)  # not on one device
    folder = make_coded_checkpoint(arch, "fp8 mx", tmp_path)
    settings = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        model = getattr(transformers, arch).from_pretrained(folder, dtype=torch.float32, **settings).eval()
    sequence = (harness := Harness(folder)).sequence(prompt(65))
    want = logits_of(model, sequence.tokens)
    torch.testing.assert_close(harness.run([(sequence, 65)])[0], want, rtol=1e-3, atol=1e-3)


def test_ranks_share_the_experts_of_inkling2(tmp_path: Path) -> None:
    folder, run = make_inkling2(tmp_path, moe_intermediate_size=128), run_layer("model.layers.1.mlp")
    whole, sharded = run(Harness(folder))[:73], run_sharded(folder, 2, run)[:73]
    torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4)


def test_shards_that_cut_groups_are_refused(tmp_path: Path) -> None:
    message = "experts.0.down_proj: this rank's 48 of 96 columns do not fall on the boundaries of the groups of 32"
    with pytest.raises(ConfigError, match=message):
        load(make_inkling2(tmp_path), tp=Group(2).rank(1))


def test_experts_are_read_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many they are, no more than one expert's matrix is in host memory at a time."""
    folder, sizes = make_inkling2(tmp_path), list[int]()
    want = {name: p.clone() for name, p in load(folder).named_parameters()}
    monkeypatch.setattr(loader, "_MOST_READS", 0)
    monkeypatch.setattr(loader, "_SMALL_PART", 192 * 64 // 2)
    read = loader.SafetensorsFolder.read
    monkeypatch.setattr(
        loader.SafetensorsFolder, "read", lambda *args: sizes.append((found := read(*args)).numel()) or found
    )
    for name, parameter in load(folder).named_parameters():
        assert torch.equal(parameter.view(torch.uint8), want[name].view(torch.uint8)), name
    assert max(sizes) == max(192 * 64, 211 * 64)


@pytest.mark.parametrize("kind", ["mxfp8", "fp8 mx"])
def test_special_values(kind: str, tmp_path: Path) -> None:
    """NaN codes, the largest and the smallest number, and exponents of NaN and of 2^-127 arrive as they are."""
    folder, scale = make_coded_checkpoint("Qwen3ForCausalLM", kind, tmp_path), "weight_scale"
    scale, name = scale + "_inv" * (kind == "fp8 mx"), "model.layers.1.mlp.down_proj."
    values = torch.tensor([0x7F, 0xFF, 0x7E, 0x01, 0x80], dtype=torch.uint8).view(torch.float8_e4m3fn)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{name}weight"][3, :5] = values
        scales = tensors[f"{name}{scale}"].view(torch.uint8)
        scales[3, 0], scales[5, 1], scales[6, 0] = 127, 255, 0

    edit_tensors(folder, change)
    layer: Any = load(folder).get_submodule("model.layers.1.mlp.down_proj")
    weight = dequantize_codes(layer.quant_method._matrix(layer))
    torch.testing.assert_close(weight[3, :5], values.float(), equal_nan=True, rtol=0, atol=0)
    assert weight[5, 32:64].isnan().all() and weight.isnan().sum() == 34
    stored = load_file(folder / "model.safetensors")[f"{name}weight"].float()
    assert torch.equal(weight[6, :32], torch.ldexp(stored[6, :32], torch.tensor(-127)))


def test_experts_with_other_scales_are_refused(tmp_path: Path) -> None:
    """Where rows of gate and up stand in turn, a scale has to belong to one row."""
    folder = make_inkling2(tmp_path, hidden_size=128, moe_intermediate_size=128)
    config = json.loads((folder / "config.json").read_text())
    blocks = FORM | {"weight_block_size": [128, 128], "scale_fmt": "float"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    with pytest.raises(ConfigError, match="experts with weight, weight_scale_inv are not supported where one tensor"):
        load(folder)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [("weight", "q_proj.weight is F32, the config needs F8_E4M3"),
     ("weight_scale_inv", "q_proj.weight_scale_inv is F32, the config needs U8 or F8_E8M0")],
)  # fmt: skip
def test_tensors_of_another_dtype(tensor: str, message: str, tmp_path: Path) -> None:
    folder = make_coded_checkpoint("Qwen3NextForCausalLM", "fp8 mx", tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update({Q + tensor: tensors[Q + tensor].float()}))
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_dummy_codes_are_numbers(tmp_path: Path) -> None:
    for module in load(make_inkling2(tmp_path), "dummy").modules():
        if type(getattr(module, "quant_method", None)).__name__ == "CodedExperts":
            for matrix in experts_of(module).values():  # type: ignore[arg-type]
                weights = torch.stack([dequantize_codes(matrix.expert(i)) for i in range(6)])
                assert weights.isfinite().all() and weights.std() == pytest.approx(matrix.columns**-0.5, rel=0.7)
