"""The training-time forward pass: the same function as transformers' Qwen3-Next, in few and large operations.

Owns a faster computation: Gated DeltaNet chunk by chunk with no loop over rows, and experts as one dense product.
Layers are written as plain functions, so that one compiled layer serves all of its kind.
Knows nothing of data, optimisers or generation. The parameters are those of the transformers model, by name;
a test compares loss and gradients with it.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3NextForCausalLM

CHUNK = 64
Weights = dict[str, Tensor]


class UnitLowerInverse(torch.autograd.Function):
    """(I + L)^-1 for strictly lower triangular L, by joining inverted blocks of 1, 2, 4 ... rows.

    Unlike a sum of powers of L this stays accurate when keys repeat; its gradient needs only the result.
    """

    @staticmethod
    def forward(ctx, lower: Tensor) -> Tensor:
        size = lower.shape[-1]
        index = torch.arange(size, device=lower.device)
        inverse = torch.eye(size, device=lower.device, dtype=lower.dtype).expand_as(lower)
        block = 1
        while block < size:
            same_pair = (index // (2 * block))[:, None] == (index // (2 * block))[None, :]
            below = (index // block)[:, None] > (index // block)[None, :]
            inverse = inverse - inverse @ (lower * (same_pair & below)) @ inverse
            block *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed).tril(-1)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule from an empty state; [batch, length, heads, dim], length a multiple of CHUNK.

    Each chunk changes the state by S' = M S + C. All M and C are found at once, so that the walk over chunks
    is one product each; then all outputs are found at once.
    """
    rows, length, heads, dim = v.shape
    shape = (rows, length // CHUNK, CHUNK, heads)
    q, k, v = (x.float().reshape(*shape, -1).permute(0, 3, 1, 2, 4).contiguous() for x in (q, k, v))
    decay, beta = (x.float().reshape(shape).permute(0, 3, 1, 2).contiguous() for x in (decay, beta))
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    total = decay.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    k_beta = k * beta[..., None]
    inverse = UnitLowerInverse.apply((k_beta @ k.transpose(-1, -2) * between).tril(-1))
    new_values = inverse @ (v * beta[..., None])
    read_keys = inverse @ (k_beta * total.exp()[..., None])
    write_keys = (k * (total[..., -1:] - total).exp()[..., None]).transpose(-1, -2)
    fade = total[..., -1].exp()[..., None, None]
    step = fade * torch.eye(k.shape[-1], device=q.device) - write_keys @ read_keys
    states = _states_before(step, write_keys @ new_values)
    values = new_values - read_keys @ states
    out = (q * total.exp()[..., None]) @ states + (q @ k.transpose(-1, -2) * between) @ values
    return out.permute(0, 2, 3, 1, 4).reshape(rows, length, heads, dim)


def _states_before(step: Tensor, added: Tensor) -> Tensor:
    """The state before each chunk, of S' = step S + added; [batch, heads, chunks, dim, dim]."""
    state = torch.zeros_like(added[:, :, 0])
    states = []
    for i in range(added.shape[2]):
        states.append(state)
        state = step[:, :, i] @ state + added[:, :, i]
    return torch.stack(states, 2)


def unit(x: Tensor) -> Tensor:
    """Length one along the last dimension, as the delta rule wants its keys and queries."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """A product in the dtype of `x`; the float32 master weight is cast for it."""
    return F.linear(x, weight.to(x.dtype))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Qwen3-Next's RMS norm: the weight is stored as its distance from one."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight)).to(x.dtype)


def delta_net(x: Tensor, w: Weights, config: SimpleNamespace) -> Tensor:
    """A Gated DeltaNet mixer."""
    rows, length, _ = x.shape
    heads, dim = config.linear_num_key_heads, config.linear_key_head_dim
    groups = config.linear_num_value_heads // heads
    value = groups * config.linear_value_head_dim
    mixed = linear(x, w["in_proj_qkvz.weight"]).view(rows, length, heads, -1)
    q, k, v, z = mixed.split([dim, dim, value, value], -1)
    b, a = linear(x, w["in_proj_ba.weight"]).view(rows, length, heads, -1).split([groups, groups], -1)
    qkv = torch.cat([t.reshape(rows, length, -1) for t in (q, k, v)], -1)
    qkv = short_convolution(qkv, w["conv1d.weight"])
    q, k, v = qkv.split([heads * dim, heads * dim, heads * value], -1)
    q, k = (t.view(rows, length, heads, dim).repeat_interleave(groups, 2) for t in (q, k))
    v = v.view(rows, length, heads * groups, -1)
    decay = -w["A_log"].exp() * F.softplus(a.reshape(rows, length, -1).float() + w["dt_bias"])
    beta = b.reshape(rows, length, -1).sigmoid()
    out = gated_delta_rule(q, k, v, decay, beta)
    out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * w["norm.weight"]
    out = out * F.silu(z.reshape(out.shape).float())
    return linear(out.to(x.dtype).reshape(rows, length, -1), w["out_proj.weight"])


def short_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """The causal depthwise convolution as a sum of shifted products, which fuses into one kernel."""
    width, length = weight.shape[-1], x.shape[1]
    padded = F.pad(x, (0, 0, width - 1, 0))
    taps = weight[:, 0].to(x.dtype)
    return F.silu(sum(padded[:, i : i + length] * taps[:, i] for i in range(width)))


def attention(x: Tensor, w: Weights, config: SimpleNamespace, rope: tuple[Tensor, Tensor]) -> Tensor:
    """A gated softmax attention mixer."""
    q, k, v, gate = projections(x, w, config, rope)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return joined(out, gate, w)


def projections(x: Tensor, w: Weights, config: SimpleNamespace, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys and values [rows, heads, length, dim], one key head per query head, and the output's gate."""
    rows, length, _ = x.shape
    dim, eps = config.head_dim, config.rms_norm_eps
    q, gate = linear(x, w["q_proj.weight"]).view(rows, length, -1, 2 * dim).chunk(2, -1)
    k = linear(x, w["k_proj.weight"]).view(rows, length, -1, dim)
    v = linear(x, w["v_proj.weight"]).view(rows, length, -1, dim)
    q = rotate(norm(q, w["q_norm.weight"], eps), rope).transpose(1, 2)
    k = rotate(norm(k, w["k_norm.weight"], eps), rope).transpose(1, 2)
    groups = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(groups, 1), v.transpose(1, 2).repeat_interleave(groups, 1), gate


def joined(out: Tensor, gate: Tensor, w: Weights) -> Tensor:
    """The heads' outputs [rows, heads, length, dim], gated and projected."""
    return linear((out.transpose(1, 2) * gate.sigmoid()).flatten(2), w["o_proj.weight"])


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on the first dims of each head."""
    cos, sin = (t[None, :, None].to(x.dtype) for t in rope)
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    left, right = turned.chunk(2, -1)
    return torch.cat([turned * cos + torch.cat([-right, left], -1) * sin, rest], -1)


def experts(x: Tensor, w: Weights, config: SimpleNamespace) -> tuple[Tensor, Tensor]:
    """The mixture of experts, every expert computed and weighted (most by zero), and its balancing loss."""
    logits = linear(x, w["gate.weight"])
    probabilities = logits.float().softmax(-1)
    rest, chosen = probabilities, torch.zeros_like(probabilities)
    for _ in range(config.num_experts_per_tok):
        best = F.one_hot(rest.argmax(-1), config.num_experts).to(rest.dtype)
        chosen, rest = chosen + best, rest - best
    routing = probabilities * chosen
    routing = (routing / routing.sum(-1, keepdim=True)).to(x.dtype)
    gate, up = linear(x, w["experts.gate_up_proj"].flatten(0, 1)).unflatten(-1, (config.num_experts, 2, -1)).unbind(-2)
    inner = (F.silu(gate) * up * routing[..., None]).flatten(-2)
    out = linear(inner, w["experts.down_proj"].transpose(1, 2).flatten(0, 1).T)
    shared = F.silu(linear(x, w["shared_expert.gate_proj.weight"])) * linear(x, w["shared_expert.up_proj.weight"])
    shared = linear(shared, w["shared_expert.down_proj.weight"])
    balance = (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum() * config.num_experts
    return out + linear(x, w["shared_expert_gate.weight"]).sigmoid() * shared, balance


def layer(x: Tensor, w: dict[str, Weights], config: SimpleNamespace, rope: tuple[Tensor, Tensor] | None):
    """One decoder layer: linear attention where no `rope` is given."""
    y = norm(x, w["norms"]["input_layernorm.weight"], config.rms_norm_eps)
    x = x + (delta_net(y, w["mixer"], config) if rope is None else attention(y, w["mixer"], config, rope))
    y = norm(x, w["norms"]["post_attention_layernorm.weight"], config.rms_norm_eps)
    y, balance = experts(y, w["mlp"], config)
    return x + y, balance


def head_loss(x: Tensor, labels: Tensor, norm_weight: Tensor, head: Tensor, eps: float) -> Tensor:
    """Mean cross entropy of the next token over the learned ones."""
    logits = linear(norm(x, norm_weight, eps), head)[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten().long(), ignore_index=-100)


class Trainable:
    """A transformers model with its layers' weights sorted for the functions above."""

    def __init__(self, model: Qwen3NextForCausalLM, dtype: torch.dtype, compiled: bool = False):
        self.config = SimpleNamespace(**model.config.to_dict())  # a plain object, which the compiler can read
        self.dtype, self.model = dtype, model
        self._layer, self._head_loss = layer, head_loss
        if compiled:
            self._layer, self._head_loss = (torch.compile(f, fullgraph=True, dynamic=False) for f in (layer, head_loss))
        self._layers = [sorted_weights(m) for m in model.model.layers]

    def loss(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy and the mean balancing loss of the layers."""
        x, balance = self.hidden(ids)
        return self.next_token_loss(x, labels), balance

    def next_token_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of the next token, from what leaves the last layer."""
        head, final = self.model.lm_head.weight, self.model.model.norm.weight
        return self._head_loss(x, labels, final, head, self.config.rms_norm_eps)

    def hidden(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of the last layer, before the final norm, and the mean balancing loss."""
        x = F.embedding(ids.long(), self.model.model.embed_tokens.weight).to(self.dtype)
        rope = self.rope(ids.shape[1], ids.device)
        balances = []
        for kind, weights in zip(self.config.layer_types, self._layers, strict=True):
            x, balance = self._layer(x, weights, self.config, rope if kind == "full_attention" else None)
            balances.append(balance)
        return x, torch.stack(balances).mean()

    def rope(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions from 0 on."""
        inverse = self.model.model.rotary_emb.inv_freq.to(device).float()
        angles = torch.arange(length, device=device).float()[:, None] * inverse
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


def sorted_weights(module: torch.nn.Module) -> dict[str, Weights]:
    """A layer's weights by part."""
    mixer = module.linear_attn if hasattr(module, "linear_attn") else module.self_attn
    norms = {k: v for k, v in module.named_parameters() if k.endswith("layernorm.weight")}
    return {"mixer": dict(mixer.named_parameters()), "mlp": dict(module.mlp.named_parameters()), "norms": norms}
