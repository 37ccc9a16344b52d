"""What a page and a state slot cost, from the model's real geometry.

Job: bytes and FLOPs per page, per slot and per token, for planning pools and weighing what to keep.
Owns: the arithmetic. Does not know: tensors, devices, free memory, or who uses a page.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.model import LinearAttentionConfig, ModelConfig

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """Geometry of one rank's caches.

    Attributes:
        page_size: tokens per KV page.
        num_attention_layers, num_kv_heads, head_dim: full-attention layers of the model; KV heads on this rank.
        kv_dtype: dtype name of keys and values (the model's).
        num_linear_layers: recurrent layers of the model.
        linear: geometry of the recurrent layers on this rank, or None.
        conv_dtype: dtype name of the convolution state (the model's).
        state_dtype: dtype name of the recurrent state.
        flops_per_token: FLOPs of one prompt token in the whole model, without attention between tokens and without the
            output head (which only the last token of a prompt needs).
        flops_per_pair: FLOPs of attention for one pair of a token and an earlier one, over all layers.
    """

    page_size: int
    num_attention_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    num_linear_layers: int = 0
    linear: LinearAttentionConfig | None = None
    conv_dtype: str = "float32"
    state_dtype: str = "float32"
    flops_per_token: float = 1.0
    flops_per_pair: float = 0.0

    @classmethod
    def from_model(
        cls, model: ModelConfig, *, page_size: int, dtype: str, state_dtype: str, tp_size: int = 1
    ) -> CacheSpec:
        """The spec of one of ``tp_size`` ranks. KV heads are replicated where there are fewer than ranks."""
        linear = model.linear
        if linear is not None and tp_size > 1:
            linear = LinearAttentionConfig(
                linear.num_k_heads // tp_size,
                linear.num_v_heads // tp_size,
                linear.head_k_dim,
                linear.head_v_dim,
                linear.conv_kernel,
            )
        return cls(
            page_size=page_size,
            num_attention_layers=len(model.attention_layers),
            num_kv_heads=max(1, model.num_key_value_heads // tp_size),
            head_dim=model.head_dim,
            kv_dtype=dtype,
            num_linear_layers=len(model.linear_layers),
            linear=linear,
            conv_dtype=dtype,
            state_dtype=state_dtype,
            flops_per_token=_flops_per_token(model),
            flops_per_pair=4.0 * len(model.attention_layers) * model.num_attention_heads * model.head_dim,
        )

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return 2 * self.num_attention_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.kv_dtype]

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self.page_size * self.kv_bytes_per_token

    @property
    def conv_shape(self) -> tuple[int, int]:
        """``(conv_dim, kernel - 1)``: one slot's convolution state in one layer."""
        assert self.linear is not None, "the model has no recurrent layers"
        return (self.linear.conv_dim, self.linear.conv_kernel - 1)

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """``(HV, K, V)``: one slot's recurrent state in one layer."""
        assert self.linear is not None, "the model has no recurrent layers"
        return (self.linear.num_v_heads, self.linear.head_k_dim, self.linear.head_v_dim)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one state slot (convolution and recurrent state) over all layers; 0 without recurrent layers."""
        if self.linear is None or self.num_linear_layers == 0:
            return 0
        conv_dim, width = self.conv_shape
        heads, k, v = self.recurrent_shape
        per_layer = conv_dim * width * DTYPE_BYTES[self.conv_dtype] + heads * k * v * DTYPE_BYTES[self.state_dtype]
        return self.num_linear_layers * per_layer

    def prefill_flops(self, start: int, end: int) -> float:
        """FLOPs of computing tokens ``start`` to ``end`` when everything before them is cached."""
        pairs = (end * (end + 1) - start * (start + 1)) / 2
        return self.flops_per_token * (end - start) + self.flops_per_pair * pairs

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)


def _flops_per_token(model: ModelConfig) -> float:
    """Two FLOPs per weight that a token meets, and six per entry of the recurrent states (decay, read, write)."""
    hidden, kv_size = model.hidden_size, model.num_key_value_heads * model.head_dim
    q_size = model.num_attention_heads * model.head_dim
    attention = hidden * (q_size * (2 if model.attn_output_gate else 1) + 2 * kv_size) + q_size * hidden
    weights = len(model.attention_layers) * attention
    states = 0
    if model.linear is not None:
        lin, count = model.linear, len(model.linear_layers)
        projections = hidden * (lin.conv_dim + lin.value_dim + 2 * lin.num_v_heads) + lin.value_dim * hidden
        weights += count * (projections + lin.conv_dim * lin.conv_kernel)
        states = count * lin.num_v_heads * lin.head_k_dim * lin.head_v_dim
    return 2.0 * (weights + _mlp_weights(model)) + 6.0 * states


def _mlp_weights(model: ModelConfig) -> int:
    """Weights of the MLPs that one token meets: the dense ones, and of a mixture the chosen experts and the router."""
    dense = 3 * model.hidden_size * model.intermediate_size
    if model.moe is None:
        return model.num_hidden_layers * dense
    moe = model.moe
    expert = moe.num_experts_per_tok * moe.intermediate_size + (moe.shared_expert_intermediate_size or 0)
    sparse = model.hidden_size * (3 * expert + moe.num_experts)
    num_sparse = len(moe.sparse_layers)
    return num_sparse * sparse + (model.num_hidden_layers - num_sparse) * dense
