"""Attention over a sliding window as a kind of layer: geometry, keys in ``config.json``, cache.

A window is a state: the layer keeps the last ``window`` keys and values of a sequence in a slot. The memory of a
sequence therefore has a fixed size, and planning counts windows like recurrent states. A prefix can be reused if its
window was stored completely.
"""

from collections.abc import Callable
from dataclasses import dataclass

from weft.config.attention import AttentionConfig
from weft.config.json_object import JsonObject
from weft.config.layer_spec import CacheDtypes, CacheTensor, LayerSpec
from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SlidingWindowConfig:
    """Geometry of a sliding window in the whole model.

    Attributes:
        attention: heads, norms and rotary embedding.
        window: number of tokens that a token sees: itself and the ``window - 1`` tokens before it.
    """

    attention: AttentionConfig
    window: int

    def layer_spec(self, hidden_size: int, dtypes: CacheDtypes) -> LayerSpec:
        """The states ``k`` and ``v``, ``[window, num_kv_heads, head_dim]``. The entry of a token is its position modulo
        the window."""
        attention = self.attention
        entry = (self.window, attention.num_kv_heads, attention.head_dim)
        return LayerSpec(
            states=tuple(CacheTensor(name, entry, dtypes.model, sharded_dim=1) for name in ("k", "v")),
            num_weights=attention.layer_spec(hidden_size, dtypes).num_weights,
            flops_per_token=4.0 * attention.num_heads * attention.head_dim * self.window,
        )

    def check_shares(self, tp_size: int) -> None:
        """Heads are split as in attention."""
        self.attention.check_shares(tp_size)


def read_sliding_window(
    text: JsonObject, *, attention: Callable[[JsonObject], AttentionConfig], switched: bool = False
) -> SlidingWindowConfig | AttentionConfig:
    """Read ``sliding_window``. Returns full attention if no context can be longer than the window.

    Args:
        attention: reads the rest of the layer.
        switched: the layer has a window only if ``use_sliding_window`` is true, which is false by default.

    Raises:
        ConfigError: a layer needs a window, but the config has none.
    """
    if switched and not text.boolean("use_sliding_window", False):
        raise ConfigError(
            f"{text.where}: layer_types holds 'sliding_attention', but use_sliding_window is false; set it to true, or "
            "make those layers 'full_attention'"
        )
    window = text.integer("sliding_window")
    if window >= text.integer("max_position_embeddings", 32768):
        return attention(text)
    return SlidingWindowConfig(attention(text), window)


def all_sliding(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Every layer has a window, if the config has one (Mistral)."""
    return ("sliding_attention" if text.given("sliding_window") else "full_attention",) * num_layers


def all_sliding_if_used(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Every layer has a window, if ``use_sliding_window`` says so (Qwen3-MoE)."""
    return all_sliding(text, num_layers) if _is_used(text) else ("full_attention",) * num_layers


def sliding_from_layer(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Layers from ``max_window_layers`` on have a window, if ``use_sliding_window`` says so (Qwen2, Qwen3)."""
    first = text.integer("max_window_layers", low=0) if _is_used(text) else num_layers
    return tuple("sliding_attention" if i >= first else "full_attention" for i in range(num_layers))


def sliding_every_other(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """Every other layer below ``max_window_layers`` has a window, if ``use_sliding_window`` says so (Qwen2-MoE)."""
    end = text.integer("max_window_layers", low=0) if _is_used(text) else 0
    return tuple("sliding_attention" if i < end and i % 2 == 0 else "full_attention" for i in range(num_layers))


def alternating_from_sliding(text: JsonObject, num_layers: int) -> tuple[str, ...]:
    """A layer with a window and one of full attention in turn (gpt-oss)."""
    return tuple("full_attention" if i % 2 else "sliding_attention" for i in range(num_layers))


def _is_used(text: JsonObject) -> bool:
    return text.boolean("use_sliding_window", False) and text.given("sliding_window")
