"""Reading a published ``config.json`` into a ``ModelConfig``.

Job: read the keys of every supported architecture, old and new, with the defaults of the reference implementation
(``transformers``). Refuse what Weft does not compute by name, value and remedy. Owns: the keys that all architectures
share (``families.py`` has the others). Does not know: tensors, weights, devices, user settings.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from weft.config.families import FAMILIES, OTHER_NAMES, Family
from weft.config.json_object import JsonObject
from weft.config.model import MTP_LAYER_TYPE, Mixers, ModelConfig, Multipliers
from weft.config.quantization import Rule
from weft.config.quantization_formats import read_quantization, read_quantization_file
from weft.config.stored_names import holds_kv_scales, unquantised_head
from weft.config.verified import nearest
from weft.config.wrappers import WRAPPERS
from weft.errors import ConfigError, UnsupportedModelError

_DTYPES = ("float32", "float16", "bfloat16")
_STATE_DTYPES = ("float32", "bfloat16")
_LAYER_TYPE_NAMES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
}
"""Names of layer types before transformers 5.23 -> names since then. Published files have both."""


_WITHOUT = ("sliding_window", "linear_lower_bound")
"""Keys whose ``null`` means that there is no window, or no bound, whatever the default is."""


def read_checkpoint_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``.

    Raises:
        ConfigError: the file is missing, truncated or not JSON, or a number is missing, of the wrong type or at odds
            with another one.
        UnsupportedModelError: a valid config that asks for something Weft does not compute.
    """
    top = JsonObject.load(Path(folder) / "config.json")
    name = _architecture(top)
    if name not in WRAPPERS:
        return _with_files(_read_model(name, top, top), Path(folder))
    whole, text, architecture = WRAPPERS[name].unwrap(top, name)
    return _with_files(replace(_read_model(architecture, whole, text), wrapper=name), Path(folder))


def _with_files(model: ModelConfig, folder: Path) -> ModelConfig:
    """Add what other files say of the quantisation: the file of ModelOpt, and the names of a head's tensors."""
    quantization = model.quantization or read_quantization_file(folder)
    if quantization is None:
        return model
    plain = unquantised_head(folder, model.num_hidden_layers) if model.mtp_layers else ()
    rules = (Rule(None, plain, "part"), *quantization.rules) if plain else quantization.rules
    kv_cache = holds_kv_scales(folder) if quantization.source == "modelopt" else quantization.kv_cache
    return replace(model, quantization=replace(quantization, rules=rules, kv_cache=kv_cache))


def _read_model(architecture: str, top: JsonObject, given: JsonObject) -> ModelConfig:
    family = FAMILIES[architecture]
    text = _text_config(given, architecture, family)
    _refuse_unsupported(text, family)
    return _model_config(architecture, family, top, text)


def _architecture(top: JsonObject) -> str:
    names = top.raw("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(
            f"{top.where}: architectures={names!r} is not a list with one class name; "
            f"supported are {', '.join(FAMILIES)}"
        )
    architecture = OTHER_NAMES.get(names[0], names[0])
    if architecture not in FAMILIES and architecture not in WRAPPERS:
        raise UnsupportedModelError(
            f"{top.where}: architecture {names[0]!r} is not supported; the nearest that is: {nearest(names[0])}; "
            f"supported are {', '.join((*FAMILIES, *WRAPPERS))}"
        )
    return architecture


@cache
def _defaults() -> dict[str, dict[str, Any]]:
    """Values of the reference implementation for keys that a ``config.json`` may leave out, by architecture."""
    return JsonObject.load(Path(__file__).parent / "defaults.json").values


def _text_config(top: JsonObject, architecture: str, family: Family) -> JsonObject:
    """The object that holds the language model's numbers, with the architecture's defaults under it."""
    text = top.object("text_config") if family.multimodal else top
    if text is None:
        raise ConfigError(f"{top.where}: {architecture} needs a text_config object, which is missing")
    given = {key: value for key, value in text.values.items() if value is not None}
    if "num_local_experts" in given:  # newer files use this name
        given.setdefault("num_experts", given["num_local_experts"])
    called = {shared: own for own, shared in family.keys.items() if own in given}
    given |= {shared: given[own] for shared, own in called.items()}
    merged = {**_defaults().get(architecture, {}), **given}
    for key in _WITHOUT:
        if text.values.get(key, 0) is None:
            merged.pop(key, None)
    return JsonObject(merged, text.where, called)


def _refuse_unsupported(config: JsonObject, family: Family) -> None:
    supported = ("silu", "swish") if family.activation == "silu" else (family.activation,)
    if config.text("hidden_act", supported[0]) not in supported:
        raise config.unsupported("hidden_act", f"; supported is {supported[0]!r}")


def _model_config(architecture: str, family: Family, top: JsonObject, text: JsonObject) -> ModelConfig:
    layer_types = _layer_types(text, family)
    if family.final_layer_types is not None:
        layer_types = family.final_layer_types(text, layer_types)
    mtp_chain, mtp_refused = family.mtp_chain(top, text) if family.mtp_chain is not None else ((), "")
    return ModelConfig(
        architecture=architecture,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=_intermediate_size(text, family),
        num_hidden_layers=len(layer_types),
        rms_norm_eps=text.number("rms_norm_eps", 1e-6),
        max_position_embeddings=text.integer("max_position_embeddings", 32768),
        layer_types=layer_types,
        mixers=Mixers(
            {
                kind: {name: read(text) for name, read in readers.items()}
                for kind, readers in family.mixers.items()
                if kind in layer_types
            }
        ),
        tie_word_embeddings=top.boolean("tie_word_embeddings", text.boolean("tie_word_embeddings", False)),
        mlp_bias=text.boolean("mlp_bias", False) if family.mlp_bias == "key" else family.mlp_bias == "always",
        layers_without_mlp=frozenset(i for i, kind in enumerate(layer_types) if kind in family.without_mlp),
        activation=family.activation,
        multipliers=family.multipliers(text) if family.multipliers is not None else Multipliers(),
        zero_centered_norm=family.zero_centered_norm,
        streams=family.streams(text) if family.streams is not None else None,
        residual_weights=family.residual_weights(text) if family.residual_weights is not None else {},
        norm_placement=dict(family.norm_placement),
        moe=family.moe(text, len(layer_types)) if family.moe is not None else None,
        dtype=_dtype(top, text),
        state_dtype=_state_dtype(text),
        eos_token_ids=text.integers("eos_token_id") or top.integers("eos_token_id"),
        quantization=read_quantization(top, text),
        mtp_layers=_mtp_layers(text) if family.mtp else len(mtp_chain),
        mtp_chain=mtp_chain,
        mtp_refused=mtp_refused,
        vision=family.vision(top, text) if family.vision is not None else None,
        unpadded_vocab_size=_unpadded_vocab_size(text),
    )


def _unpadded_vocab_size(text: JsonObject) -> int | None:
    """Number of ids that the head predicts, if that is less than ``vocab_size``."""
    size, most = text.integer("unpadded_vocab_size", text.integer("vocab_size")), text.integer("vocab_size")
    if size > most:
        raise text.wrong("unpadded_vocab_size", f"at most vocab_size={most}")
    return size if size < most else None


def _mtp_layers(text: JsonObject) -> int:
    """Number of layers in the multi-token-prediction head. Qwen3-Next does not state it; other families call it
    ``num_nextn_predict_layers``. A head with an embedding of its own counts as no head."""
    for key, kind in (("mtp_layer_types", MTP_LAYER_TYPE), ("mtp_mlp_layer_types", "sparse")):
        if text.given(key) and {_LAYER_TYPE_NAMES.get(name, name) for name in text.raw(key)} != {kind}:
            raise text.unsupported(key, f" for this architecture; its head is one {kind} layer")
    if text.boolean("mtp_use_dedicated_embeddings", False):
        return 0
    return text.integer("mtp_num_hidden_layers", text.integer("num_nextn_predict_layers", 1, low=0), low=0)


def _intermediate_size(text: JsonObject, family: Family) -> int:
    """Width of the dense MLP; 0 if every layer has experts and the config has no width."""
    if family.intermediate_size is not None:
        return family.intermediate_size(text)
    if family.moe is not None and not text.given("intermediate_size"):
        return 0
    return text.integer("intermediate_size")


def _layer_types(text: JsonObject, family: Family) -> tuple[str, ...]:
    types = text.raw("layer_types")
    if types is None:
        return family.layer_types(text, text.integer("num_hidden_layers"))
    allowed = tuple(family.mixers)
    if not isinstance(types, list):
        raise text.wrong("layer_types", "a list with one entry per layer")
    num_layers = text.integer("num_hidden_layers", len(types))
    names = {**_LAYER_TYPE_NAMES, **family.layer_type_names}
    for kind in types:
        if not isinstance(kind, str) or names.get(kind, kind) not in allowed:
            raise UnsupportedModelError(
                f"{text.where}: layer_types holds {kind!r}, which is not supported for this architecture; "
                f"supported are {', '.join(allowed)}"
            )
    if len(types) != num_layers:
        raise ConfigError(
            f"{text.where}: layer_types has {len(types)} entries but num_hidden_layers={num_layers}; they must agree"
        )
    return tuple(names.get(kind, str(kind)) for kind in types)


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
        raise text.unsupported("mamba_ssm_dtype", f"; supported are {', '.join(_STATE_DTYPES)}")
    return name
