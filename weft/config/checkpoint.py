"""From a published ``config.json`` to a ``ModelConfig``.

Job: read the keys of every supported architecture, old and new, with the defaults of the reference implementation
(``transformers``), and refuse by name, value and remedy what Weft does not compute.
Owns: the list of supported architectures. Does not know: tensors, weights, devices, user settings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weft.config.json_object import JsonObject
from weft.config.model import LayerType, LinearAttentionConfig, ModelConfig, MoeConfig
from weft.config.rope import read_rope
from weft.errors import ConfigError, UnsupportedModelError


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture's name alone decides.

    ``defaults`` are the reference implementation's values of keys that a ``config.json`` may leave out.
    ``windows_everywhere``: where sliding windows are used, every layer has one, whatever ``max_window_layers`` says.
    """

    qk_norm: bool = True
    hybrid: bool = False
    moe: bool = False
    multimodal: bool = False
    always_renormalise: bool = False
    windows_everywhere: bool = False
    defaults: dict[str, Any] = field(default_factory=dict)


_LLAMA = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
          "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_QWEN3 = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
          "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128,
          "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip
_QWEN3_MOE = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
              "num_attention_heads": 32, "num_key_value_heads": 4, "moe_intermediate_size": 768, "num_experts": 128,
              "num_experts_per_tok": 8, "norm_topk_prob": False, "sliding_window": 4096}  # fmt: skip
_LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
           "linear_num_key_heads": 16, "linear_num_value_heads": 32, "full_attention_interval": 4}  # fmt: skip
_QWEN3_NEXT = _LINEAR | {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
                         "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
                         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
                         "num_experts_per_tok": 10, "norm_topk_prob": True}  # fmt: skip
_QWEN3_5 = _LINEAR | {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
                      "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256}  # fmt: skip
_QWEN3_5_MOE = _LINEAR | {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
                          "num_key_value_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
                          "shared_expert_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
                          "norm_topk_prob": True}  # fmt: skip

_FAMILIES = {
    "LlamaForCausalLM": _Family(qk_norm=False, defaults=_LLAMA),
    "Qwen3ForCausalLM": _Family(defaults=_QWEN3),
    "Qwen3MoeForCausalLM": _Family(moe=True, windows_everywhere=True, defaults=_QWEN3_MOE),
    "Qwen3NextForCausalLM": _Family(hybrid=True, moe=True, defaults=_QWEN3_NEXT),
    "Qwen3_5ForCausalLM": _Family(hybrid=True, defaults=_QWEN3_5),
    "Qwen3_5MoeForCausalLM": _Family(hybrid=True, moe=True, always_renormalise=True, defaults=_QWEN3_5_MOE),
    "Qwen3_5ForConditionalGeneration": _Family(hybrid=True, multimodal=True, defaults=_QWEN3_5),
    "Qwen3_5MoeForConditionalGeneration": _Family(
        hybrid=True, moe=True, multimodal=True, always_renormalise=True, defaults=_QWEN3_5_MOE
    ),
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILIES)

_DTYPES = ("float32", "float16", "bfloat16")
_STATE_DTYPES = ("float32", "bfloat16")


def read_checkpoint_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``.

    Raises:
        ConfigError: the file is missing, truncated or not JSON, or a number is missing, of the wrong type or at odds
            with another one.
        UnsupportedModelError: a valid config that asks for something Weft does not compute.
    """
    top = JsonObject.load(Path(folder) / "config.json")
    architecture = _architecture(top)
    family = _FAMILIES[architecture]
    text = _text_config(top, architecture, family)
    _refuse_unsupported(top)
    _refuse_unsupported(text)
    return _model_config(architecture, family, top, text)


def _architecture(top: JsonObject) -> str:
    names = top.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"{top.where}: architectures={names!r} is not a list with one class name; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if names[0] not in _FAMILIES:
        raise UnsupportedModelError(
            f"{top.where}: architecture {names[0]!r} is not supported; "
            f"supported are {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    return names[0]


def _text_config(top: JsonObject, architecture: str, family: _Family) -> JsonObject:
    """The object that holds the language model's numbers, with the architecture's defaults under it."""
    text = top.object("text_config") if family.multimodal else top
    if text is None:
        raise ConfigError(f"{top.where}: {architecture} needs a text_config object, which is missing")
    given = {key: value for key, value in text.values.items() if value is not None}
    if "num_local_experts" in given:  # the name under which newer files store it
        given.setdefault("num_experts", given["num_local_experts"])
    return JsonObject(family.defaults | given, text.where)


def _refuse_unsupported(config: JsonObject) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.given(key):
            method = (config.object(key) or config).raw("quant_method")
            raise UnsupportedModelError(
                f"{config.where}: {key} (quant_method={method!r}) is not supported; use the unquantised checkpoint "
                f"(dtype {', '.join(_DTYPES)})"
            )
    if config.text("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModelError(
            f"{config.where}: hidden_act={config.raw('hidden_act')!r} is not supported; supported is 'silu'"
        )


def _model_config(architecture: str, family: _Family, top: JsonObject, text: JsonObject) -> ModelConfig:
    hidden_size, num_heads = text.integer("hidden_size"), text.integer("num_attention_heads")
    head_dim = _head_dim(text, hidden_size, num_heads)
    layer_types = _layer_types(text, family)
    max_positions = text.integer("max_position_embeddings", 32768)
    _refuse_sliding_window(text, family, len(layer_types))
    return ModelConfig(
        architecture=architecture,
        model_type=text.text("model_type", ""),
        vocab_size=text.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(text, family),
        num_hidden_layers=len(layer_types),
        num_attention_heads=num_heads,
        num_key_value_heads=_num_key_value_heads(text, num_heads),
        head_dim=head_dim,
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_positions,
        layer_types=layer_types,
        rope=read_rope(text, head_dim, max_positions, partial_default=0.25 if family.hybrid else None),
        tie_word_embeddings=top.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", False)),
        attention_bias=text.boolean("attention_bias", False),
        mlp_bias=text.boolean("mlp_bias", False) and architecture == "LlamaForCausalLM",
        qk_norm=family.qk_norm,
        attn_output_gate=_attn_output_gate(text, family),
        zero_centered_norm=family.hybrid,
        linear=_linear(text) if family.hybrid else None,
        moe=_moe(text, family, len(layer_types)) if family.moe else None,
        dtype=_dtype(top, text),
        state_dtype=_state_dtype(text),
        eos_token_ids=text.integers("eos_token_id") or top.integers("eos_token_id"),
        bos_token_id=next(iter(text.integers("bos_token_id") or top.integers("bos_token_id")), None),
    )


def _head_dim(text: JsonObject, hidden_size: int, num_heads: int) -> int:
    if text.given("head_dim"):
        return text.integer("head_dim")
    if hidden_size % num_heads:
        raise ConfigError(
            f"{text.where}: hidden_size={hidden_size} is not divisible by num_attention_heads={num_heads} "
            "and no head_dim is given"
        )
    return hidden_size // num_heads


def _intermediate_size(text: JsonObject, family: _Family) -> int:
    """Width of the dense MLP; 0 where every layer has experts and the checkpoint names none."""
    if family.moe and not text.given("intermediate_size"):
        return 0
    return text.integer("intermediate_size")


def _num_key_value_heads(text: JsonObject, num_heads: int) -> int:
    num_kv_heads = text.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{text.where}: num_attention_heads={num_heads} is not divisible by num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _layer_types(text: JsonObject, family: _Family) -> tuple[LayerType, ...]:
    num_layers = text.integer("num_hidden_layers")
    types = text.raw("layer_types")
    if types is None:
        interval = text.integer("full_attention_interval") if family.hybrid else 1
        return tuple("linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers))
    allowed = ("full_attention", "linear_attention") if family.hybrid else ("full_attention",)
    if not isinstance(types, list):
        raise text.wrong("layer_types", "a list with one entry per layer")
    for kind in types:
        if kind not in allowed:
            raise UnsupportedModelError(
                f"{text.where}: layer_types holds {kind!r}, which is not supported for this architecture; "
                f"supported are {', '.join(allowed)}"
            )
    if len(types) != num_layers:
        raise ConfigError(
            f"{text.where}: layer_types has {len(types)} entries but num_hidden_layers={num_layers}; they must agree"
        )
    return tuple(cast(list[LayerType], types))


def _refuse_sliding_window(text: JsonObject, family: _Family, num_layers: int) -> None:
    if not text.boolean("use_sliding_window", False) or not text.given("sliding_window"):
        return
    first = 0 if family.windows_everywhere else text.integer("max_window_layers", 0, low=0)
    if first < num_layers:
        raise UnsupportedModelError(
            f"{text.where}: use_sliding_window=true with sliding_window={text.raw('sliding_window')} from layer "
            f"{first} on is not supported; set use_sliding_window to false to attend to the whole context"
        )


def _attn_output_gate(text: JsonObject, family: _Family) -> bool:
    gate = text.boolean("attn_output_gate", family.hybrid)
    if gate != family.hybrid:
        raise UnsupportedModelError(
            f"{text.where}: attn_output_gate={str(gate).lower()} is not supported for this architecture; "
            f"leave it out or set it to {str(family.hybrid).lower()}"
        )
    return gate


def _linear(text: JsonObject) -> LinearAttentionConfig:
    linear = LinearAttentionConfig(
        num_k_heads=text.integer("linear_num_key_heads"),
        num_v_heads=text.integer("linear_num_value_heads"),
        head_k_dim=text.integer("linear_key_head_dim"),
        head_v_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", low=2),
    )
    if linear.num_v_heads % linear.num_k_heads:
        raise ConfigError(
            f"{text.where}: linear_num_value_heads={linear.num_v_heads} is not divisible by "
            f"linear_num_key_heads={linear.num_k_heads}"
        )
    return linear


def _moe(text: JsonObject, family: _Family, num_layers: int) -> MoeConfig:
    num_experts, top_k = text.integer("num_experts"), text.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise ConfigError(f"{text.where}: num_experts_per_tok={top_k} is greater than num_experts={num_experts}")
    renormalise = text.boolean("norm_topk_prob", True)
    if family.always_renormalise and not renormalise:
        raise UnsupportedModelError(
            f"{text.where}: norm_topk_prob=false is not supported for this architecture, which always renormalises; "
            "leave it out"
        )
    shared = text.integer("shared_expert_intermediate_size") if family.hybrid else None
    sparse = frozenset(range(num_layers)) if family.always_renormalise else _sparse_layers(text, num_layers)
    return MoeConfig(num_experts, top_k, text.integer("moe_intermediate_size"), renormalise, shared, sparse)


def _sparse_layers(text: JsonObject, num_layers: int) -> frozenset[int]:
    dense, step = set(text.integers("mlp_only_layers")), text.integer("decoder_sparse_step", 1)
    if any(layer >= num_layers for layer in dense):
        raise text.wrong("mlp_only_layers", f"layer indices below num_hidden_layers={num_layers}")
    sparse = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    if len(sparse) < num_layers and not text.given("intermediate_size"):
        raise ConfigError(f"{text.where}: required key 'intermediate_size' is missing (layers without experts need it)")
    return sparse


def _dtype(top: JsonObject, text: JsonObject) -> str:
    for config, key in ((text, "dtype"), (text, "torch_dtype"), (top, "dtype"), (top, "torch_dtype")):
        if config.given(key):
            name = config.text(key).removeprefix("torch.")
            if name not in _DTYPES:
                raise UnsupportedModelError(
                    f"{config.where}: {key}={name!r} is not supported; supported are {', '.join(_DTYPES)}"
                )
            return name
    return "float32"


def _state_dtype(text: JsonObject) -> str | None:
    if not text.given("mamba_ssm_dtype"):
        return None
    name = text.text("mamba_ssm_dtype")
    if name not in _STATE_DTYPES:
        raise UnsupportedModelError(
            f"{text.where}: mamba_ssm_dtype={name!r} is not supported; supported are {', '.join(_STATE_DTYPES)}"
        )
    return name
