"""Checkpoints of 4 and 8 bits with the published tensor names, beside the same weights dequantised.

Job: ``make_coded_checkpoint`` quantises a tiny checkpoint of transformers by the documented formula of each format.
Does not know: Weft. The formulas are written out here a second time on purpose, number by number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.fp8_checkpoints import GEOMETRY, is_quantized
from tests.tiny import make_checkpoint

IGNORED = ["lm_head", "re:.*in_proj_(ba|a|b)$", "re:.*mlp.gate$", "re:.*shared_expert_gate"]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


class Kind(NamedTuple):
    """A format: its packing, bits, group (-1: rows), symmetry, and ``quantization_config``."""

    packing: str
    bits: int
    group: int
    symmetric: bool
    config: dict[str, Any]


def _packed(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
        "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": IGNORED,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | more, "input_activations": None}},
    }  # fmt: skip


def _fp4(kind: str, group: int) -> dict[str, Any]:
    return _packed(4, group, True, type="float", strategy="tensor_group") | {"format": f"{kind}-pack-quantized"}


def _mxfp8() -> dict[str, Any]:
    return _packed(8, 32, True, type="float", strategy="group") | {"format": "mxfp8-quantized"}


def _gptq(bits: int, group: int, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False,
        "dynamic": {"-:.*in_proj_(ba|a|b)$": {}},
    } | more  # fmt: skip


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["in_proj_b"]}  # fmt: skip
_AUTO_ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "data_type": "int",
               "extra_config": {".*in_proj_ba": {"bits": 16, "data_type": "float"}}}  # fmt: skip
_FP8_MX = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32], "scale_fmt": "ue8m0",
           "modules_to_not_convert": ["lm_head", "in_proj_ba", "in_proj_b", "in_proj_a", "mlp.gate",
                                      "shared_expert_gate"]}  # fmt: skip
_MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*in_proj_ba", "*.gate"]}

KINDS = {
    "int4 g32": Kind("packed", 4, 32, True, _packed(4, 32, True)),
    "int4 g64 zeros": Kind("packed", 4, 64, False, _packed(4, 64, False)),
    "int4 g128": Kind("packed", 4, 128, True, _packed(4, 128, True)),
    "int4 rows zeros": Kind("packed", 4, -1, False, _packed(4, -1, False)),
    "int8 g128 zeros": Kind("packed", 8, 128, False, _packed(8, 128, False)),
    "int8 rows": Kind("packed", 8, -1, True, _packed(8, -1, True)),
    "gptq": Kind("gptq", 4, 128, True, _gptq(4, 128, True)),
    "gptq zeros": Kind("gptq", 4, 32, False, _gptq(4, 32, False)),
    "gptq 8 rows": Kind("gptq", 8, -1, False, _gptq(8, -1, False)),
    "gptq v2": Kind("gptq_v2", 4, 64, False, _gptq(4, 64, False, checkpoint_format="gptq_v2")),
    "awq": Kind("awq", 4, 64, False, _AWQ),
    "auto-round": Kind("gptq", 4, 128, True, _AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}),
    "auto-round awq": Kind("awq", 4, 128, True, _AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}),
    "nvfp4": Kind("nvfp4", 4, 16, True, _fp4("nvfp4", 16)),
    "mxfp4": Kind("mxfp4", 4, 32, True, _fp4("mxfp4", 32)),
    "modelopt": Kind("modelopt", 4, 16, True, _MODELOPT),
    "mxfp8": Kind("mxfp8", 8, 32, True, _mxfp8()),
    "fp8 mx": Kind("mxfp8", 8, 32, True, _FP8_MX),
}


def words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """``[M, N]`` codes -> int32 ``[M, N * bits / 32]``; ``order``: which of a word's codes comes first, second, ..."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    total = torch.zeros(codes.shape[0], padded.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order):
        total += padded[:, column::per_word] << (bits * place)
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32).contiguous()


def quantize_integers(weight: Tensor, kind: Kind) -> tuple[Tensor, Tensor, Tensor]:
    """``(codes [N, K], scales [N, G], zeros [N, G])``, unsigned."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, columns if kind.group == -1 else kind.group)
    most, middle = 2**kind.bits - 1, 2 ** (kind.bits - 1)
    if kind.symmetric:
        scales = groups.abs().amax(2) / (middle - 0.5)
        zeros = torch.full_like(scales, middle)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / most
        zeros = (-low / scales).round()
    scales = scales.half().float()
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, most)
    return codes.view(rows, columns), scales, zeros


def dequantize_integers(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    group = codes.shape[1] // scales.shape[1]
    return (codes - zeros.repeat_interleave(group, 1)) * scales.repeat_interleave(group, 1)


def quantize_fp4(weight: Tensor, group: int) -> tuple[Tensor, Tensor, float]:
    """``(codes [N, K], scales [N, G], global scale)``: e4m3 scales in groups of 16, powers of two in larger ones."""
    rows, columns = weight.shape
    groups = weight.view(rows, -1, group)
    wanted, whole = groups.abs().amax(2) / 6.0, 1.0
    if group == 16:
        whole = float(weight.abs().amax()) / (6.0 * 448.0)
        scales = (wanted / whole).to(torch.float8_e4m3fn).float()
    else:
        scales = 2.0 ** wanted.log2().ceil()
    values = groups / (scales * whole).clamp(min=1e-30)[..., None]
    table = torch.tensor(E2M1)
    codes = (values.abs()[..., None] - table).abs().argmin(-1) + 8 * (values < 0)
    return codes.view(rows, columns), scales, whole


def dequantize_fp4(codes: Tensor, scales: Tensor, whole: float) -> Tensor:
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    return table[codes] * scales.repeat_interleave(codes.shape[1] // scales.shape[1], 1) * whole


def quantize_mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """``(e4m3 [..., K], exponents [..., K / 32])`` of ``[..., K]``, as the OCP Microscaling formats say."""
    groups = weight.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor() - 8
    values = (groups / 2.0 ** exponents[..., None]).clamp(-448, 448).flatten(-2).to(torch.float8_e4m3fn)
    return values, (exponents + 127).to(torch.uint8)


def dequantize_mxfp8(values: Tensor, exponents: Tensor) -> Tensor:
    return values.float() * 2.0 ** (exponents.float() - 127).repeat_interleave(32, -1)


def _store_mxfp8(name: str, weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    values, exponents = quantize_mxfp8(weight)
    if kind.config["quant_method"] == "fp8":
        stored = {"weight": values, "weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    else:
        stored = {"weight": values, "weight_scale": exponents}
    return {f"{name}{part}": t for part, t in stored.items()}, dequantize_mxfp8(values, exponents)


def _store_packed(name: str, weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = quantize_integers(weight, kind)
    stored = {"packed": words(codes, kind.bits), "scale": scales, "shape": torch.tensor(weight.shape)}
    if not kind.symmetric:
        stored["zero_point"] = words(zeros.t(), kind.bits).t().contiguous()
    return {f"{name}weight_{part}": t for part, t in stored.items()}, dequantize_integers(codes, scales, zeros)


def _store_gptq(name: str, weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = quantize_integers(weight, kind)
    group = codes.shape[1] // scales.shape[1]
    kept = zeros.t() - 1 if kind.packing == "gptq" else zeros.t()
    stored = {
        "qweight": words(codes, kind.bits).t().contiguous(),
        "qzeros": words(kept % 2**kind.bits, kind.bits),
        "scales": scales.t().half().contiguous(),
        "g_idx": (torch.arange(codes.shape[1]) // group).int(),
    }
    if kind.config["quant_method"] == "auto-round":
        del stored["g_idx"]
    return {f"{name}{part}": t for part, t in stored.items()}, dequantize_integers(codes, scales, zeros)


def _store_awq(name: str, weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, zeros = quantize_integers(weight, kind)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {
        "qweight": words(codes.t(), 4, order),
        "qzeros": words(zeros.t(), 4, order),
        "scales": scales.t().half().contiguous(),
    }
    return {f"{name}{part}": t for part, t in stored.items()}, dequantize_integers(codes, scales, zeros)


def _store_fp4(name: str, weight: Tensor, kind: Kind) -> tuple[dict[str, Tensor], Tensor]:
    codes, scales, whole = quantize_fp4(weight, kind.group)
    octets = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
    if kind.packing == "mxfp4":
        stored = {"weight_packed": octets, "weight_scale": (scales.log2() + 127).to(torch.uint8)}
    elif kind.packing == "nvfp4":
        stored = {"weight_packed": octets, "weight_scale": scales.to(torch.float8_e4m3fn)}
        stored["weight_global_scale"] = torch.tensor([1.0 / whole])
        whole = 1.0 / float(stored["weight_global_scale"])
    else:
        stored = {"weight": octets, "weight_scale": scales.to(torch.float8_e4m3fn)}
        stored["weight_scale_2"] = torch.tensor(whole)
        stored["input_scale"] = torch.tensor(1.0)
    return {f"{name}{part}": t for part, t in stored.items()}, dequantize_fp4(codes, scales, whole)


STORES: dict[str, Callable[[str, Tensor, Kind], tuple[dict[str, Tensor], Tensor]]] = {
    "packed": _store_packed, "gptq": _store_gptq, "gptq_v2": _store_gptq, "awq": _store_awq,
    "nvfp4": _store_fp4, "mxfp4": _store_fp4, "modelopt": _store_fp4, "mxfp8": _store_mxfp8,
}  # fmt: skip


def make_coded_checkpoint(arch: str, kind: str, folder: Path, left_out: str = "no tensor", **overrides: Any) -> Path:
    """``folder/coded`` as published, and ``folder/plain`` with the same weights dequantised. Returns ``folder/coded``.

    Args:
        left_out: pattern of further tensors that stay as they are; ``ignore`` has their names.
    """
    return code_checkpoint(make_checkpoint(arch, folder / "plain", **(GEOMETRY | overrides)), kind, left_out)


def code_checkpoint(plain: Path, kind: str, left_out: str = "no tensor", *, listed: bool = True) -> Path:
    """Quantise ``plain``, whose weights become the dequantised ones, into the folder ``coded`` beside it.

    Args:
        left_out: pattern of further tensors that stay as they are; ``ignore`` has their names if ``listed``.
    """
    tensors, stored = load_file(plain / "model.safetensors"), dict[str, Tensor]()
    ignored = [name.removesuffix(".weight") for name in tensors if re.search(left_out, name)]
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor) or name.removesuffix(".weight") in ignored:
            stored[name] = tensor
            continue
        found, tensors[name] = STORES[KINDS[kind].packing](name.removesuffix("weight"), tensor, KINDS[kind])
        stored |= found
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    coded = plain.parent / "coded"
    coded.mkdir()
    save_file(stored, coded / "model.safetensors", metadata={"format": "pt"})
    for path in plain.glob("*.json"):
        (coded / path.name).write_text(path.read_text())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = json.loads(json.dumps(KINDS[kind].config))
    if ignored and listed:
        config["quantization_config"]["ignore"] += ignored
    (coded / "config.json").write_text(json.dumps(config))
    return coded
