"""Tokens of images in a step: the ids by which the model finds their embeddings, and their positions (M-RoPE)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.messages import ScheduledRequest
from weft.runner.layout import Layout
from weft.runner.rows import RowTable


def place_media(
    host: Mapping[str, np.ndarray],
    requests: list[ScheduledRequest],
    layout: Layout,
    table: RowTable,
    first_id: int | None,
    first_position: int,
) -> None:
    """Positions of sequences with images; ids and positions of the images' tokens.

    Args:
        host: the step's arrays: ``positions`` is filled for texts, ``input_ids`` for tokens of texts.
        first_id, first_position: of a step's first token, if it is one of an image; see ``BatchBuilder``.
    """
    ids, positions = host["input_ids"], host["positions"]
    positions[: layout.bounds[-1]] += np.repeat(table.rope_delta[layout.rows], layout.counts)
    for i in (layout.first < table.num_prompt_tokens[layout.rows]).nonzero()[0].tolist():
        r, at = requests[i], int(layout.bounds[i])
        if r.row not in table.rope_positions:
            continue
        prompt = table.rope_positions[r.row][0, r.start : r.start + r.num_tokens]
        positions[at : at + len(prompt)] = prompt
        for position, count, _ in r.media:
            assert first_id is not None, "an image came to a model without a vision tower"
            first = at + position - r.start
            numbers = np.arange(first, first + count)
            ids[first : first + count] = first_id + numbers
            positions[first : first + count] = first_position + numbers
