"""Causal softmax attention over a paged cache, of keys and values or of latents, and the writes to that cache.

Job: read each sequence's pages and attend, prefill and decode in one call; store keys, values and latents; copy pages.
Latents may be expanded to keys and values of every head, which takes fewer operations for many query tokens.
Owns: the layouts ``[num_pages, page_size, Hkv, D]`` of keys and values and ``[num_pages, page_size, P]`` of latents
(MLA, arXiv 2405.04434, absorbed), and the meaning of a slot (``page * page_size + offset``). Does not know: who owns a
page, how queries are absorbed, or what a layer is.

A latent's first R columns are both key and value, the columns up to E are key alone, and the others are padding. Page 0
is reserved: padding tokens write there, and nobody reads it. Unwritten cache entries may hold anything, NaN included;
they are never read.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.forward_context import Batch
from weft.ops.backend import Backend, with_kernel
from weft.ops.device_work import device_work
from weft.ops.fp8 import E4M3, E4M3_MAX
from weft.ops.rows import by_token

# Keys gathered at a time for decoding rows: few enough that they are still in the CPU's cache when they are used.
_BLOCK_ELEMENTS = 1 << 19


class AttentionCall(NamedTuple):
    """The arguments of ``paged_attention``, with memory for its result."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    batch: Batch
    scale: float
    out: Tensor
    sinks: Tensor | None = None
    v_scale: Tensor | None = None
    bias: Tensor | None = None

    @property
    def has_row_terms(self) -> bool:
        """Whether rows have a bias, or sinks of their own. The kernels for Hopper and for held splits have neither."""
        return self.bias is not None or (self.sinks is not None and self.sinks.dim() == 2)


@with_kernel("weft.ops.attention.paged", by_token)
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: Batch,
    *,
    scale: float,
    sinks: Tensor | None = None,
    v_scale: Tensor | None = None,
    bias: Tensor | None = None,
    backend: Backend,
    out: Tensor | None = None,
) -> Tensor:
    """``softmax(scale * q k^T) v`` of each token over its sequence up to and including itself.

    Args:
        q: ``[T, Hq, D]``. Over a cache in e4m3 the kernels multiply bfloat16 queries as float16: beyond 65,504
            scores are not finite.
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]`` in q's dtype or e4m3; Hq is a multiple of Hkv, and query
            head h reads key head ``h // (Hq / Hkv)`` (grouped-query attention, arXiv 2305.13245). Keys of a sequence
            with one query token, except the key of that token, are read early on the GPU. They must have been written
            by an earlier step, or by a kernel before an ordinary launch (``ops/triton/early_launch.py``).
        batch: says which tokens form which sequence and where their pages are.
        sinks: ``[Hq]`` scores that take part in the softmax and have no value (arXiv 2309.17453, as in gpt-oss).
            ``[T, Hq]``, contiguous: every token has its own (Inkling 2).
        v_scale: ``[1]`` float32, factor of the result: the cache holds values divided by it.
        bias: ``[T, Hq, E]``, contiguous. ``q k^T`` of the key that is d tokens back is increased by entry d, if d < E.
        out: ``[T, Hq, D]`` to write to, optional.

    Returns:
        ``[T, Hq, D]`` in q's dtype; padding rows are zero.
    """
    # Decode rows in one call, prefill sequences one by one.
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    call = AttentionCall(q, k_cache, v_cache, batch, scale, out, sinks, bias=bias)
    if batch.mixed is not None:
        given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "scale": scale, "sinks": sinks, "bias": bias}
        device_work(paged_attention.reference, batch, out, given)
    elif batch.verification is not None:
        _decode(call, batch.verification.query_len)
    else:
        if batch.num_decodes:
            _decode(call)
        if batch.num_decodes < batch.num_seqs:
            _prefill(call)
        if batch.num_tokens < q.shape[0]:
            out[batch.num_tokens :].zero_()
    return out if v_scale is None else out.mul_(v_scale)


def _decode(call: AttentionCall, query_len: int = 1) -> None:
    """Sequences with ``query_len`` rows each, in blocks of similar length, longest first; in a captured graph, whose
    host knows no lengths, as one block over all the pages that there may be."""
    batch, out = call.batch, call.out
    count = batch.num_decodes if query_len == 1 else batch.num_seqs
    if batch.token_count is not None:
        seq_lens = batch.seq_lens[:count, None]
        out[:] = _decode_block(call, batch.page_table, seq_lens, batch.max_seq_len, query_len, ragged=True)
        return
    order = batch.seq_lens[:count].argsort(descending=True)
    lengths = batch.seq_lens[order].tolist()
    token_size = call.k_cache.shape[2] * call.k_cache.shape[3]
    begin = 0
    while begin < count:
        end = begin + max(1, _BLOCK_ELEMENTS // (lengths[begin] * token_size))
        rows = order[begin:end]
        tokens = rows
        if query_len > 1:
            tokens = (rows[:, None] * query_len + torch.arange(query_len, device=rows.device)).flatten()
        pages, seq_lens = batch.page_table[rows], batch.seq_lens[rows, None]
        own = {name: x[tokens] for name in ("bias", "sinks") if (x := getattr(call, name)) is not None and x.dim() > 1}
        some = call._replace(q=call.q[tokens], **own)
        out[tokens] = _decode_block(some, pages, seq_lens, lengths[begin], query_len, ragged=end - begin > 1)
        begin = end


def _decode_block(
    call: AttentionCall, page_table: Tensor, seq_lens: Tensor, longest: int, query_len: int, *, ragged: bool
) -> Tensor:
    """Attend from the last ``query_len`` tokens of each sequence. Sequences have at most ``longest`` tokens, or exactly
    as many unless ``ragged``. Tokens and the query heads of a group form rows, so that keys need no repetition."""
    n, q, scale, sinks = page_table.shape[0], call.q, call.scale, call.sinks
    _, page_size, num_kv_heads, head_dim = call.k_cache.shape
    offsets = torch.arange(longest, dtype=torch.int32, device=q.device)
    # Positions past the end read the sequence's last token instead: real numbers, to which the mask gives no weight.
    slots = _slots(page_table, torch.minimum(offsets, seq_lens - 1), page_size).flatten()
    if sinks is not None:
        each = sinks.expand(q.shape[:2]).reshape(n, query_len, num_kv_heads, -1)
        sinks = each.permute(0, 2, 3, 1).flatten(2)
    k, v = (
        c.flatten(0, 1).index_select(0, slots).to(q.dtype).view(n, longest, num_kv_heads, head_dim).transpose(1, 2)
        for c in (call.k_cache, call.v_cache)
    )
    if query_len == 1:
        mask = (offsets < seq_lens)[:, None, None] if ragged else None
        if call.bias is not None:
            mask = _biased(call.bias, seq_lens - 1 - offsets, scale).view(n, num_kv_heads, -1, longest)
        attended = _attend(q.reshape(n, num_kv_heads, -1, head_dim), k, v, mask, scale, sinks)
        return attended.flatten(1, 2)
    ends = seq_lens - torch.arange(query_len - 1, -1, -1, dtype=torch.int32, device=q.device)
    seen = offsets < ends[:, :, None]  # [n, query, key]
    rows = q.reshape(n, query_len, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)  # [n, Hkv, group, query, D]
    mask = seen.repeat(1, rows.shape[2], 1)[:, None]
    if call.bias is not None:
        added = _biased(call.bias, (ends[..., None] - 1 - offsets).flatten(0, 1), scale)
        mask = added.view(n, query_len, num_kv_heads, -1, longest).permute(0, 2, 3, 1, 4).flatten(2, 3)
    attended = _attend(rows.flatten(2, 3), k, v, mask, scale, sinks)
    return attended.view(rows.shape).permute(0, 3, 1, 2, 4).reshape(n * query_len, -1, head_dim)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    sinks: Tensor | None,
    *,
    is_causal: bool = False,
) -> Tensor:
    """``q [..., rows, D]``, ``k, v [..., keys, D]``, ``mask [..., rows, keys]``, ``sinks [..., rows]``. A sink is the
    score of one more key, whose value is zero. The mask is boolean, or numbers that are added to scores."""
    if sinks is None and mask is not None and mask.dtype is not torch.bool and q.is_cuda:
        with sdpa_kernel(SDPBackend.MATH):  # on an H200 the last of 65 rows was wrong without this
            return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=scale)
    scores = q.new_zeros(*q.shape[:-1], k.shape[-2] + 1)
    if is_causal:
        mask = torch.ones(scores.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
        scores[..., :-1] = mask
    scores[..., -1] = sinks
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, scores, scale=scale)


def _biased(bias: Tensor, distance: Tensor, scale: float) -> Tensor:
    """Compute what is added to scores: ``bias [rows, Hq, E]``, ``distance [rows, keys]`` -> ``[rows, Hq, keys]``.

    A distance counts tokens from a row back to a key. Keys that follow the row get minus infinity.
    """
    extent = bias.shape[2]
    places = distance.clamp(0, extent - 1).long()[:, None].expand(-1, bias.shape[1], -1)
    added = (bias.gather(2, places) * scale).masked_fill_((distance >= extent)[:, None], 0.0)
    return added.masked_fill_((distance < 0)[:, None], -torch.inf)


def _prefill(call: AttentionCall) -> None:
    q, k_cache, v_cache, batch, scale, out, sinks, _, bias = call
    starts, seq_lens = batch.cu_seqlens_q.tolist(), batch.seq_lens.tolist()
    _, page_size, num_kv_heads, head_dim = k_cache.shape
    for i in range(batch.num_decodes, batch.num_seqs):
        start, end, kv_len = starts[i], starts[i + 1], seq_lens[i]
        slots = _slots(batch.page_table[i : i + 1], torch.arange(kv_len, device=q.device)[None], page_size)[0]
        k, v = (
            c.flatten(0, 1).index_select(0, slots).to(q.dtype).transpose(0, 1).unsqueeze(1) for c in (k_cache, v_cache)
        )
        rows = q[start:end].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)  # [Hkv, group, query, D]
        group, mask = rows.shape[1], _causal_mask(end - start, kv_len, q.device)
        if bias is not None:
            own, keys = (torch.arange(first, kv_len, device=q.device) for first in (kv_len - (end - start), 0))
            mask = _biased(bias[start:end], own[:, None] - keys, scale).transpose(0, 1).unflatten(0, (num_kv_heads, -1))
        attended = _attend(
            rows,
            k.expand(-1, group, -1, -1),
            v.expand(-1, group, -1, -1),
            mask,
            scale,
            None if sinks is None else sinks.expand(q.shape[:2])[start:end].T.reshape(num_kv_heads, group, -1),
            is_causal=mask is None,
        )
        out[start:end] = attended.permute(2, 0, 1, 3).reshape(end - start, -1, head_dim)


def _slots(page_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Cache slots of token positions: ``[N, max_pages]``, ``[N, L]`` -> ``[N, L]`` int64."""
    pages = page_table.gather(1, (positions // page_size).long())
    return (pages * page_size).add_(positions % page_size).long()


def _causal_mask(query_len: int, kv_len: int, device: torch.device) -> Tensor | None:
    """The last ``query_len`` of ``kv_len`` positions ask: ``[query_len, kv_len]``. None if all do (plain causal)."""
    if query_len == kv_len:
        return None
    return torch.ones(query_len, kv_len, dtype=torch.bool, device=device).tril(kv_len - query_len)


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write one key and one value per token, in place, as torch operations. Part of ``qk_norm_rope``.

    Args:
        k, v: ``[T, Hkv, D]``.
        k_cache, v_cache: ``[num_pages, page_size, Hkv, D]``, contiguous, in k's dtype or e4m3 (saturating).
        slot_mapping: ``[T]`` int64. Only slots of page 0 may occur more than once.
    """
    for x, cache in ((k, k_cache), (v, v_cache)):
        if cache.dtype is E4M3:
            x = x.clamp(-E4M3_MAX, E4M3_MAX)
        as_bytes(cache).flatten(0, 1).index_copy_(0, slot_mapping, as_bytes(x.to(cache.dtype)))


def copy_pages(caches: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy page ``src[i]`` to page ``dst[i]`` in every cache tensor (any tensor indexed by page or by slot), in place.

    Args:
        caches: tensors ``[num_pages, ...]``.
        src, dst: ``[N]`` integer tensors. All reads happen before any write; ``dst`` has no duplicates.
    """
    src, dst = src.long(), dst.long()
    for cache in caches:
        cache = as_bytes(cache)
        cache.index_copy_(0, dst, cache.index_select(0, src))


def as_bytes(x: Tensor) -> Tensor:
    """e4m3 as bytes, which torch can copy by index on every device; other dtypes as they are."""
    return x.view(torch.uint8) if x.dtype is E4M3 else x


@with_kernel("weft.ops.attention.latent", by_token)
def latent_attention(
    q: Tensor, latents: Tensor, batch: Batch, *, rank: int, scale: float, skips_begun: bool = False, backend: Backend
) -> Tensor:  # fmt: skip
    """``softmax(scale * q c^T) c[:rank]`` of each token over its sequence up to and including itself.

    Args:
        q: ``[T, H, E]``, absorbed queries.
        latents: ``[num_pages, page_size, P]`` in q's dtype, P a multiple of 8 and at least E; this step's are written.
        batch: says which tokens form which sequence and where their pages are.
        rank: columns of an entry that are its value.
        skips_begun: the results of sequences that begin in this step and of padding rows are not used.

    Returns:
        ``[T, H, rank]`` in q's dtype; padding rows are zero. Rows that are not used may be anything.
    """
    # Attention with one key head, whose values are its keys.
    if batch.mixed is not None:
        out = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
        return device_work(
            latent_attention.reference, batch, out, {"q": q, "latents": latents, "rank": rank, "scale": scale}
        )
    cache = latents[..., : q.shape[2]].unsqueeze(2)
    return paged_attention.reference(q, cache, cache, batch, scale=scale)[..., :rank].contiguous()


EXPANDED_ROWS = 128
"""Least rows of a step whose latents are expanded."""

EXPANDED_BYTES = 640 << 20
"""Most memory for expanded keys and values at a time. 32,768 tokens of Kimi-Linear take as much with all 32 heads."""


class Expansion(NamedTuple):
    """The sequences of a step whose latents are expanded, chosen on the device.

    Attributes:
        lengths: ``[S]`` int32, lengths of these sequences after this step; 0 for all other sequences.
        seq_lens: ``[S]`` int32, the batch's, except that these sequences have as many tokens as queries: with
            ``skips_begun``, ``latent_attention`` leaves them out.
        is_whole: the host knows that every sequence that does not decode is expanded.
        places: the kernel's own: where keys and values go.
    """

    lengths: Tensor
    seq_lens: Tensor
    is_whole: bool
    places: tuple[Tensor, ...] = ()


def plan_expansion(own: Tensor, shared_dim: int, value_dim: int, batch: Batch, *, backend: Backend) -> Expansion | None:
    """Choose the sequences whose latents ``expanded_latent_attention`` expands; None if it would take none.

    Every sequence that begins in this step is chosen. A sequence with a context is chosen if it has many tokens in this
    step. The choice depends on the other sequences of the step, so invariant backends expand none. ``own``: ``[T, H,
    key_dim]``.
    """
    if backend is not Backend.TRITON or own.shape[0] < EXPANDED_ROWS or batch.verification is not None:
        return None
    from weft.ops.attention.expanded_latent_hopper import plan_on_hopper

    return plan_on_hopper(own, shared_dim, value_dim, batch)


def expansion_bytes(device: torch.device, *, backend: Backend) -> int:
    """Return the most memory that expanded keys and values take on a device."""
    if backend is not Backend.TRITON:
        return 0
    from weft.ops.attention.expanded_latent_hopper import runs_gluon

    return EXPANDED_BYTES if runs_gluon(device) else 0


@with_kernel("weft.ops.attention.expanded_latent_hopper")
def expanded_latent_attention(
    own: Tensor, of_shared: Tensor, latents: Tensor, k: Tensor, v: Tensor, batch: Batch, expansion: Expansion, *,
    scale: float, out: Tensor, backend: Backend,
) -> Tensor:  # fmt: skip
    """Latent attention of the sequences of an expansion, over keys and values of every head.

    A head's key is its product with the latent, and the part that all heads share.

    Args:
        own: ``[T, H, key_dim]``, queries as they are projected.
        of_shared: ``[T, H, shared_dim]``, queries of the shared part.
        latents: ``[num_pages, page_size, P]`` in own's dtype, P a multiple of 8; this step's are written.
        k, v: ``[H, key_dim, rank]`` and ``[H, value_dim, rank]``, contiguous.
        batch: says which tokens form which sequence and where their pages are.
        out: ``[T, H, value_dim]`` in own's dtype, contiguous, with the results of all other rows. It is written to and
            returned; padding rows are zero.
    """
    given = {"own": own, "of_shared": of_shared, "latents": latents, "k": k, "v": v, "lengths": expansion.lengths}
    if batch.mixed is not None:
        return device_work(_attend_expanded, batch, out, given | {"out": out, "scale": scale})
    return _attend_expanded(**given, out=out, scale=scale, batch=batch)


def _attend_expanded(
    own: Tensor, of_shared: Tensor, latents: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor, scale: float,
    batch: Batch,
) -> Tensor:  # fmt: skip
    q, starts = torch.cat([own, of_shared], dim=-1), batch.cu_seqlens_q.tolist()
    for i, length in enumerate(lengths[: batch.num_seqs].tolist()):
        if length:
            rows = slice(starts[i], starts[i + 1])
            slots = _slots(batch.page_table[i : i + 1], torch.arange(length, device=q.device)[None], latents.shape[1])
            entries = latents.flatten(0, 1).index_select(0, slots[0])[:, : k.shape[2] + of_shared.shape[2]]
            latent, shared = entries.split([k.shape[2], of_shared.shape[2]], dim=-1)
            keys, values = (torch.einsum("tr,hdr->htd", latent, weight) for weight in (k, v))
            keys = torch.cat([keys, shared.expand(keys.shape[0], -1, -1)], dim=-1)
            mask = _causal_mask(rows.stop - rows.start, length, q.device)
            attended = _attend(q[rows].transpose(0, 1), keys, values, mask, scale, None, is_causal=mask is None)
            out[rows] = attended.transpose(0, 1)
    out[batch.num_tokens :] = 0
    return out


def store_latents(entries: Tensor, latents: Tensor, slot_mapping: Tensor) -> None:
    """Write one entry per token, in place.

    Args:
        entries: ``[T, E]``.
        latents: ``[num_pages, page_size, P]``; columns from E on stay as they are.
        slot_mapping: ``[T]`` int64. Only slots of page 0 may occur more than once.
    """
    latents.flatten(0, 1)[:, : entries.shape[1]].index_copy_(0, slot_mapping, entries.to(latents.dtype))
