"""Descriptors of batches for tests of what goes by their sizes."""

from __future__ import annotations

from weft.graph.batch_descriptor import BatchDescriptor


def decodes(count: int) -> BatchDescriptor:
    """``count`` sequences that decode."""
    return BatchDescriptor(count, count, count, 1, 64, 0, count)


def mixed_batch(num_tokens: int, num_decodes: int = 0, num_prefills: int = 1, num_chunks: int = 0) -> BatchDescriptor:
    """``num_tokens`` tokens of prompts and decodes."""
    num_seqs = num_decodes + num_prefills
    return BatchDescriptor(num_tokens, num_seqs, num_decodes, num_tokens, 64, num_chunks, num_seqs)
