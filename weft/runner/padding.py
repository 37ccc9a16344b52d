"""Padding of a step to the sizes of its graph."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.graph.batch_descriptor import BatchDescriptor

CHUNK_COLUMNS = ("chunk_seq", "chunk_start", "chunk_length", "chunk_checkpoint")
"""Arrays of the chunk table."""

Host = Mapping[str, np.ndarray]


class Padding:
    """Args: ``padding_row``: the row of the runner's tables that belongs to nobody."""

    def __init__(self, padding_row: int) -> None:
        self._row = padding_row

    def uniform(self, host: Host, real: BatchDescriptor, size: int) -> None:
        """Fill a step up to ``size`` sequences, all of which decode or verify the same number of drafts.

        A padding sequence runs token 0 at the first positions of page 0 with state slot 0, and is sampled greedily.
        """
        count, query_len = real.num_seqs, real.query_len or 1
        tokens = slice(count * query_len, size * query_len)
        self._tokens(host, tokens.start, tokens.stop)
        host["rows"][count:size] = self._row
        host["state_slots"][count:size] = 0
        host["seq_lens"][count:size] = query_len
        host["cu_seqlens_q"][count + 1 : size + 1] = np.arange((count + 1) * query_len, size * query_len + 1, query_len)
        if real.query_len:
            host["verify_slots"][tokens] = 0
            host["follows"][count:size] = 0
        self.samples(host, real, tokens.stop)
        host["sample_indices"][tokens] = np.arange(tokens.start, tokens.stop)

    def mixed(self, host: Host, real: BatchDescriptor, padded: BatchDescriptor) -> None:
        """Fill any step up to the sizes of ``padded`` with tokens that belong to no sequence, and with sequences that
        have no token."""
        seqs = slice(real.num_seqs, padded.num_seqs)
        self._tokens(host, real.num_tokens, padded.num_tokens)
        host["rows"][seqs] = self._row
        host["state_slots"][seqs] = host["seq_lens"][seqs] = 0
        host["cu_seqlens_q"][real.num_seqs + 1 : padded.num_seqs + 1] = real.num_tokens
        host["decode_slots"][: real.num_decodes] = host["state_slots"][: real.num_decodes]
        host["decode_slots"][real.num_decodes : padded.num_seqs] = 0
        if padded.num_chunks:
            for column, value in zip(CHUNK_COLUMNS, (0, 0, 0, -1), strict=True):
                host[column][real.num_chunks : padded.num_chunks] = value
            host["chunk_first"][real.num_seqs + 1 if real.num_chunks else 0 : padded.num_seqs + 1] = real.num_chunks

    def samples(self, host: Host, real: BatchDescriptor, size: int) -> None:
        """Fill the sampling arrays up to ``size``. Padding samples greedily from the first token's logits, unread."""
        pad = slice(real.num_samples, size)
        for name in ("sample_indices", "sample_positions", "temperature", "min_p", "top_k", "seeds"):
            host[name][pad] = 0
        host["sample_rows"][pad] = self._row
        host["top_p"][pad] = 1.0

    def _tokens(self, host: Host, real: int, padded: int) -> None:
        for name in ("input_ids", "positions", "slot_mapping"):
            host[name][real:padded] = 0
        host["token_rows"][real:padded] = self._row
