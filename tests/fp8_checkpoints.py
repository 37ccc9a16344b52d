"""FP8 checkpoints with the published tensor names, and the function that they stand for.

Job: ``make_fp8_checkpoint`` quantises a tiny checkpoint of transformers; ``Reference`` is transformers' own model with
the dequantised weights, whose linear layers round their inputs as the checkpoint says. Does not know: Weft. The
arithmetic is written out here a second time on purpose.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.tiny import make_checkpoint

SCHEMES = ["block", "channel-token", "channel-static", "tensor-token", "tensor-static"]
INPUT_SCALE = 0.03
"""About the static scales; inputs above 448 times this would saturate."""
_INPUTS = (
    ("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",), ("in_proj",), ("out_proj",),
)  # fmt: skip
"""Projections that have their inputs in common."""

GEOMETRY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 256,
    "head_dim": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "initializer_range": 0.06,
}
"""Widths that blocks of 128 divide, projection by projection."""

_PLAIN = re.compile(
    r".*(norm|embed|lm_head|conv1d|\.gate\.(weight|down_proj)|router|shared_expert_gate|in_proj_(ba|a|b)\.|kv_b_proj|visual"
    r"|hyper_connection|indexer\.(wk|weights_proj)|(f_a|g_a)_proj|language_model.*\.self_attn\.b_proj).*"
)


_SMALL = ["re:.*(f_a|g_a)_proj$", "re:.*language_model.*self_attn.b_proj$"]
"""Projections of GLM-5.3 with few rows."""


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Whether published FP8 checkpoints quantise the tensor."""
    return tensor.dim() == 2 and name.endswith(".weight") and not _PLAIN.fullmatch(name)


def input_scale(name: str) -> float:
    """The static scale of the inputs of a weight: another for each layer and kind of input."""
    layer = int(re.findall(r"layers\.(\d+)", name)[0])
    kind = next((i for i, words in enumerate(_INPUTS) if any(word in name for word in words)), len(_INPUTS))
    return INPUT_SCALE * (0.8 + 0.1 * ((3 * layer + 2 * kind) % 5))


def quantize_weight(weight: Tensor, scheme: str) -> tuple[Tensor, Tensor]:
    """``(e4m3, scale)``, the scale in the shape in which it is published."""
    kind = scheme.partition("-")[0]
    if kind == "block":
        rows, columns = weight.shape
        padded = F.pad(weight, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        values = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    elif kind == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        values = weight / scale
    else:
        scale = weight.abs().amax().reshape(1) / 448
        values = weight / scale
    return values.clamp(-448, 448).to(torch.float8_e4m3fn).contiguous(), scale.float()


def dequantize_weight(values: Tensor, scale: Tensor) -> Tensor:
    rows, columns = values.shape
    if scale.shape == (-(-rows // 128), -(-columns // 128)):
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return values.float() * scale


_orders: list[torch.Generator] = []


@contextmanager
def another_order_of_sums(seed: int) -> Iterator[None]:
    """References see what they round moved by as much as float32 sums in another order move it. Numbers near a boundary
    between two of e4m3 come to its other side, as on another processor."""
    _orders.append(torch.Generator().manual_seed(seed))
    try:
        yield
    finally:
        _orders.pop()


def _as_summed(x: Tensor) -> Tensor:
    if not _orders:
        return x
    return x + torch.randn(x.shape, generator=_orders[-1]) * (1e-6 * x.square().mean(-1, keepdim=True).sqrt())


def round_inputs(x: Tensor, scheme: str, static: float) -> Tensor:
    """Quantise ``x [..., K]`` and return the dequantised values. ``static`` is the scale of static schemes."""
    if scheme.endswith("static"):
        return (x / static).clamp(-448, 448).to(torch.float8_e4m3fn).float() * static
    columns = x.shape[-1]
    groups = F.pad(x, (0, -columns % 128)).unflatten(-1, (-1, 128)) if scheme == "block" else x[..., None, :]
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    rounded = (groups / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., :columns]


def quantization_config(scheme: str) -> dict[str, Any]:
    """Return a quantization config like those in the ``config.json`` of published checkpoints."""
    if scheme == "block":
        ignored = ["lm_head", "model.embed_tokens", "re:.*in_proj_(ba|a|b)", "mlp.gate", "mlp.shared_expert_gate",
                   *_SMALL]  # fmt: skip
        return {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": ignored,
        }  # fmt: skip
    weights, activations = scheme.split("-")
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    dynamic = activations == "token"
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": weights, "dynamic": False},
        "input_activations": common | {"strategy": "token" if dynamic else "tensor", "dynamic": dynamic},
    }
    ignored = ["lm_head", "re:.*in_proj_(ba|a|b)$", "re:.*mlp.gate$", "re:.*shared_expert_gate", *_SMALL]
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ignored, "kv_cache_scheme": None,
    }  # fmt: skip


def make_fp8_checkpoint(arch: str, scheme: str, folder: Path, **overrides: Any) -> Path:
    """``folder/fp8`` as published, and ``folder/plain`` with the same weights dequantised. Returns ``folder/fp8``."""
    return quantize_checkpoint(make_checkpoint(arch, folder / "plain", **(GEOMETRY | overrides)), scheme)


def quantize_checkpoint(plain: Path, scheme: str, left_out: str = "no tensor") -> Path:
    """``fp8`` beside ``plain``, as published; ``plain`` then has the same weights dequantised. Returns ``fp8``.

    Args:
        left_out: pattern of further tensors that are not quantised; the config has the names of their modules.
    """
    folder = plain.parent
    tensors = _by_expert(load_file(plain / "model.safetensors"))
    stored: dict[str, Tensor] = {}
    ignored = [name.removesuffix(".weight") for name in tensors if re.search(left_out, name)]
    for name, tensor in tensors.items():
        if not is_quantized(name, tensor) or name.removesuffix(".weight") in ignored:
            stored[name] = tensor
            continue
        values, scale = quantize_weight(tensor, scheme)
        stored[name] = values
        stored[f"{name}_scale_inv" if scheme == "block" else f"{name}_scale"] = scale
        if scheme.endswith("static"):
            stored[name.removesuffix("weight") + "input_scale"] = torch.tensor([input_scale(name)])
        tensors[name] = dequantize_weight(values, scale)
    save_file(_fused(tensors), plain / "model.safetensors", metadata={"format": "pt"})
    (folder / "fp8").mkdir()
    save_file(stored, folder / "fp8" / "model.safetensors", metadata={"format": "pt"})
    for path in plain.glob("*.json"):
        (folder / "fp8" / path.name).write_text(path.read_text())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = quantization = quantization_config(scheme)
    quantization["modules_to_not_convert" if scheme == "block" else "ignore"] += ignored
    (folder / "fp8" / "config.json").write_text(json.dumps(config))
    return folder / "fp8"


_FUSED = re.compile(r".*\.self_attn\.qkv_proj\.conv_qk_.*")
"""Tensors of ZAYA1. transformers stores all experts of a layer in two tensors; FP8 checkpoints store each expert."""


def _by_expert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of each expert, where a tensor holds those of all."""
    if not any(map(_FUSED.fullmatch, tensors)):
        return tensors
    apart = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for name, tensor in tensors.items():
        if ".experts." in name:
            layer, _, kind = name.rpartition(".")
            for i, matrix in enumerate(tensor):
                parts = {"gate_proj": 0, "up_proj": 1} if kind == "gate_up_proj" else {kind: 0}
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    apart[f"{layer}.{i}.{part}.weight"] = rows.contiguous()
    return apart


def _fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``_by_expert``."""
    if not any(map(_FUSED.fullmatch, tensors)):
        return tensors
    together = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in {name.rpartition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}:
        count = len({name for name in tensors if name.startswith(layer) and name.endswith("down_proj.weight")})
        gate, up, down = (
            torch.stack([tensors[f"{layer}.{i}.{part}.weight"] for i in range(count)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        together |= {f"{layer}.gate_up_proj": torch.cat([gate, up], 1), f"{layer}.down_proj": down}
    return together


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint in place."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Reference:
    """transformers' model of ``folder/plain`` whose quantised linear layers round their inputs.

    Args:
        rounds_inputs: False leaves inputs as they are, to see how much rounding them matters.
    """

    def __init__(self, arch: str, folder: Path, scheme: str, *, rounds_inputs: bool = True) -> None:
        config = getattr(transformers, arch).config_class.from_pretrained(folder / "plain")
        config._attn_implementation, config._experts_implementation = "eager", "eager"
        self.model = getattr(transformers, arch).from_pretrained(folder / "plain", config=config).float().eval()
        scales: dict[int, float] = {}
        for name, parameter in self.model.named_parameters() if rounds_inputs else ():
            if parameter.dim() == 3 and ".experts." in name:
                own = name.replace("gate_up_proj", "gate_proj")
                scales |= {matrix.data_ptr(): input_scale(own) for matrix in parameter}
            elif is_quantized(name, parameter):
                scales[parameter.data_ptr()] = input_scale(name)
        self._mode: Callable[[], AbstractContextManager[Any]] = lambda: _RoundedInputs(scales, scheme)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), self._mode():
            return self.model(*args, **kwargs)

    def logits(self, tokens: list[int]) -> Tensor:
        """``[len(tokens), vocab_size]`` of one uncached pass."""
        return self(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


class RoundedKeysAndValues:
    """A model of transformers whose eager attention sees keys and values as an FP8 cache without scales holds them."""

    def __init__(self, model: Any) -> None:
        self.model, self._modeling = model, sys.modules[type(model).__module__]
        self._attend = self._modeling.eager_attention_forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(self._modeling, "eager_attention_forward", self._rounded):
            return self.model(*args, **kwargs)

    def _rounded(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = (_as_summed(x).clamp(-448, 448).to(torch.float8_e4m3fn).float() for x in (key, value))
        return self._attend(module, query, key, value, *args, **kwargs)


class _RoundedInputs(TorchFunctionMode):
    """``scales``: of the inputs of quantised weights, by their addresses."""

    def __init__(self, scales: dict[int, float], scheme: str) -> None:
        super().__init__()
        self._scales, self._scheme = scales, scheme

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (static := self._scales.get(args[1].data_ptr())) is not None:
            args = (round_inputs(_as_summed(args[0]), self._scheme, static), *args[1:])
        return func(*args, **(kwargs or {}))
