"""Hashes of n-grams: which rows of hash tables belong to each token of a step.

Job: read the last tokens of every sequence from pages, and hash them. Owns: the hash. Does not know: tables, layers.

Device work only, with no number read on the host, so that a captured graph serves every batch of its size.
"""

import torch
from torch import Tensor

from weft.forward_context import Batch
from weft.ops.indexed_attention import token_rows


def last_tokens(ids: Tensor, cache: Tensor, batch: Batch, count: int, eos: int) -> Tensor:
    """Store this step's token ids, and return each token with those before it: ``[T, count]`` int64, the latest first.

    ``eos`` stands for what is before the text, and for all before an ``eos`` that precedes the token.

    Args:
        ids: ``[T]`` int64.
        cache: ``[num_pages, page_size, 1]`` float32.
    """
    cache.flatten(0, 1).index_copy_(0, batch.slot_mapping, ids[:, None].to(cache.dtype))
    page_size = cache.shape[1]
    pages, positions = token_rows(batch, ids.shape[0])
    before = positions[:, None] - torch.arange(1, count, device=ids.device)
    places = before.clamp(min=0)
    slots = pages.gather(1, places // page_size) * page_size + places % page_size
    found = torch.where(before >= 0, cache.flatten()[slots], eos).long()
    ended = (found == eos).cummax(1).values
    return torch.cat([ids[:, None], torch.where(ended, eos, found)], dim=1)


def ngram_rows(tokens: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Rows of the tables for the n-grams of 2 to ``count`` tokens: ``[T, (count - 1) * heads]`` int64.

    Args:
        tokens: ``[T, count]`` from ``last_tokens``.
        multipliers: ``[count]`` int64. Products wrap around.
        sizes, offsets: ``[(count - 1) * heads]`` int64, rows of each table and its first row.
    """
    products = tokens * multipliers
    mixed, hashes = products[:, 0], []
    for i in range(1, tokens.shape[1]):
        mixed = torch.bitwise_xor(mixed, products[:, i])
        hashes.append(mixed[:, None].expand(-1, heads))
    return torch.remainder(torch.cat(hashes, dim=1), sizes) + offsets
