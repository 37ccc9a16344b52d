"""Latent attention (MLA, arXiv 2405.04434), absorbed: full attention in Kimi-Linear and Ling 3.0.

Job: project, normalise, rotate and store the latent, bring queries into its space, attend there, bring values back,
gate the heads. Prefills of many tokens attend over expanded latents instead, where that is faster. Owns: the layer's
projections. Does not know: who allocated the pages; it finds its cache by its own name in the forward context.
"""

from dataclasses import replace

import torch
from torch import Tensor

from weft.config.kimi import LatentAttentionConfig
from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.forward_context import Batch, get_forward_context
from weft.layers.attention import PagedAttention
from weft.layers.context import ModelContext
from weft.layers.linear import ColumnParallelLinear, PackedLinear, RowParallelLinear
from weft.layers.norm import RMSNorm
from weft.layers.weight import WeightLayout, WeightModule, WeightPiece, empty_parameter, split_rows, stacked, whole_rows
from weft.ops.activation import gate_heads
from weft.ops.attention import Expansion, expanded_latent_attention, latent_attention, plan_expansion, store_latents
from weft.ops.backend import Backend
from weft.ops.linear import head_linear
from weft.ops.rotary import apply_rotary


class LatentExpansion(WeightModule):
    """The rank's heads of the expansion: keys ``k [H, key_dim, rank]`` and values ``v [H, value_dim, rank]``."""

    def __init__(self, geometry: LatentAttentionConfig, context: ModelContext) -> None:
        super().__init__()
        self._geometry, self._tp = geometry, context.tp
        heads = divide(geometry.num_heads, context.tp.size, "num_attention_heads")
        for name, rows in (("k", geometry.key_dim), ("v", geometry.value_dim)):
            parameter = empty_parameter(heads, rows, geometry.rank, dtype=context.dtype, device=context.device)
            self.register_parameter(name, parameter)

    def layouts(self) -> tuple[WeightLayout, ...]:
        """One tensor, each head's key rows followed by its value rows."""
        k, v = self.get_parameter("k"), self.get_parameter("v")
        both = self._geometry.key_dim + self._geometry.value_dim
        copies = []
        for local in range(k.shape[0]):
            start = (self._tp.rank * k.shape[0] + local) * both
            copies.append(((slice(start, start + k.shape[1]),), k[local]))
            copies.append(((slice(start + k.shape[1], start + both),), v[local]))
        return ({"weight": WeightPiece((self._geometry.num_heads * both, k.shape[2]), tuple(copies))},)


class LatentAttention(PagedAttention):
    """``hidden_states [T, hidden_size] -> [T, hidden_size]``, this rank's part of the sum (padding rows are arbitrary).

    Args:
        name: key of the layer's cache and of its entry in the layer table, for example ``model.layers.3.self_attn``.
    """

    _sees_all = True  # whether a token attends to all tokens before it

    def __init__(self, geometry: LatentAttentionConfig, config: ModelConfig, context: ModelContext, name: str) -> None:
        super().__init__()
        self.name, self._backend, self._geometry = name, context.backend, geometry
        self._heads = divide(geometry.num_heads, context.tp.size, "num_attention_heads")
        self._scale = (geometry.key_dim + geometry.shared_dim) ** -0.5
        self.output_width = self._heads * geometry.value_dim
        queries = geometry.num_heads * (geometry.key_dim + geometry.shared_dim)
        entry, hidden_size = whole_rows(geometry.rank + geometry.shared_dim), config.hidden_size
        self.q_b_proj: ColumnParallelLinear | None = None
        if geometry.query_rank is None:
            rows = split_rows([queries], context.tp, "num_attention_heads")
            gates = [split_rows([geometry.num_heads], context.tp, "num_attention_heads")] * geometry.output_gate
            self.q_kv_proj = PackedLinear(hidden_size, stacked(rows, entry, *gates), bias=False, context=context)
        else:
            self._low_ranks = [geometry.query_rank, entry.count]
            rows = whole_rows(geometry.query_rank)
            self.q_a_kv_proj = PackedLinear(hidden_size, stacked(rows, entry), bias=False, context=context)
            self.q_a_layernorm = RMSNorm(geometry.query_rank, geometry.norm_eps, context, zero_centered=False)
            self.q_b_proj = ColumnParallelLinear(
                geometry.query_rank, queries, bias=False, context=context, what="num_attention_heads"
            )
        self._cos_sin: Tensor | None = None
        if geometry.rope is not None:
            self._cos_sin = context.rotary.get(
                geometry.rope, config.max_position_embeddings, context.num_rotary_rows, context.device
            )
        self.kv_a_layernorm = RMSNorm(geometry.rank, geometry.norm_eps, context, zero_centered=False)
        self.kv_b_proj = LatentExpansion(geometry, context)
        self.o_proj = RowParallelLinear(
            geometry.num_heads * geometry.value_dim,
            hidden_size,
            bias=False,
            context=context,
            what="num_attention_heads",
        )
        context.layers.register(name, self)

    def layouts(self) -> tuple[WeightLayout, ...]:
        return ({},)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.o_proj(self.attend(self.project(hidden_states)))

    def project(self, hidden_states: Tensor) -> Tensor:
        """``[T, hidden_size] -> [T, queries | latent | gates]``."""
        if self.q_b_proj is None:
            return self.q_kv_proj(hidden_states)
        q_a, entry = self.q_a_kv_proj(hidden_states).split(self._low_ranks, dim=-1)
        return torch.cat([self.q_b_proj(self.q_a_layernorm(q_a)), entry], dim=-1)

    def attend_rows(self, projected: Tensor) -> Tensor:
        """``[T, queries | latent | gates] -> [T, num_heads * value_dim]``."""
        context, geometry = get_forward_context(), self._geometry
        batch, cache = context.batch, context.caches[self.name]["latent"]
        width = geometry.key_dim + geometry.shared_dim
        gates = self._heads * geometry.output_gate
        sizes = [self._heads * width, geometry.rank, geometry.shared_dim, gates]
        q, latent, shared, gate = projected.split(sizes, dim=-1)
        own, of_shared = q.unflatten(-1, (self._heads, width)).split([geometry.key_dim, geometry.shared_dim], dim=-1)
        if self._cos_sin is not None:
            of_shared, shared = _rotate_pairs(of_shared, shared, batch.positions, self._cos_sin)
        entries = torch.cat([self.kv_a_layernorm(latent), shared], dim=-1)
        store_latents(entries, cache, batch.slot_mapping)
        expansion: Expansion | None = None
        if self._sees_all:
            expansion = plan_expansion(own, geometry.shared_dim, geometry.value_dim, batch, backend=self._backend)
        if expansion is None:
            attended = self.attend_latents(self._absorb(own, of_shared), cache, batch)
            values = self._by_head(attended, self.kv_b_proj.get_parameter("v").transpose(1, 2))
        else:
            values = own.new_empty(*own.shape[:2], geometry.value_dim)
            self._attend_others(own, of_shared, cache, batch, expansion, values)
            k, v = (self.kv_b_proj.get_parameter(name) for name in "kv")
            expanded_latent_attention(
                own, of_shared, cache, k, v, batch, expansion, scale=self._scale, out=values, backend=self._backend
            )
        if gates:
            values = gate_heads(values, gate, backend=self._backend)
        return values.flatten(1)

    def _attend_others(
        self, own: Tensor, of_shared: Tensor, cache: Tensor, batch: Batch, expansion: Expansion, out: Tensor
    ) -> None:
        """Attend from the sequences that are not expanded, absorbed. Where the host knows these, other rows take no
        part."""
        skips_begun = not expansion.is_whole
        if skips_begun:
            batch = replace(batch, seq_lens=expansion.seq_lens)
        elif batch.num_decodes:
            batch = _leading_decodes(batch)
            own, of_shared, out = (x[: batch.num_tokens] for x in (own, of_shared, out))
        else:
            return
        attended = self.attend_latents(self._absorb(own, of_shared), cache, batch, skips_begun=skips_begun)
        v = self.kv_b_proj.get_parameter("v").transpose(1, 2)
        torch.bmm(attended.transpose(0, 1), v, out=out.transpose(0, 1))

    def _absorb(self, own: Tensor, of_shared: Tensor) -> Tensor:
        """Queries ``[T, H, rank + shared_dim]`` of latents: the product writes to its columns, unless rows have to be
        independent."""
        weight, rank = self.kv_b_proj.get_parameter("k"), self._geometry.rank
        if self._backend.is_invariant:
            return torch.cat([self._by_head(own, weight), of_shared], dim=-1)
        q = own.new_empty(*own.shape[:2], rank + of_shared.shape[2])
        torch.bmm(own.transpose(0, 1), weight, out=q[..., :rank].transpose(0, 1))
        q[..., rank:] = of_shared
        return q

    def _by_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """``head_linear``, by the matrix library unless rows have to be independent."""
        return head_linear(x, weight, backend=self._backend if self._backend.is_invariant else Backend.TORCH)

    def attend_latents(self, q: Tensor, latents: Tensor, batch: Batch, *, skips_begun: bool = False) -> Tensor:
        """``[T, H, entry] -> [T, H, rank]`` over each token's sequence. See ``latent_attention``."""
        rank, scale, backend = self._geometry.rank, self._scale, self._backend
        return latent_attention(q, latents, batch, rank=rank, scale=scale, skips_begun=skips_begun, backend=backend)


def _leading_decodes(batch: Batch) -> Batch:
    """The sequences of a batch that decode, alone."""
    count = batch.num_decodes
    return replace(
        batch, num_tokens=count, num_seqs=count, max_query_len=1, positions=batch.positions[:count],
        slot_mapping=batch.slot_mapping[:count], cu_seqlens_q=batch.cu_seqlens_q[: count + 1],
        seq_lens=batch.seq_lens[:count], page_table=batch.page_table[:count], state_slots=batch.state_slots[:count],
        chunks=None,
    )  # fmt: skip


def _rotate_pairs(q: Tensor, shared: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate neighbouring columns of ``q [T, H, D]`` and ``shared [T, D]``. The results hold the first
    columns of all pairs, then the second columns. Scores stay the same, because both results are ordered alike."""
    q, k = (x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, shared[:, None]))
    q, k = apply_rotary(q, k, positions, cos_sin)
    return q, k[:, 0]
