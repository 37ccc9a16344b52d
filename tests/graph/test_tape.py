"""The stand-in for graphs on the CPU."""

from __future__ import annotations

import torch

from weft.graph.graph import Tape


def test_an_expanded_result_is_replayed() -> None:
    """A compiled function may return one: the streams of Qwen4-Exp begin as the same embeddings."""
    given, tape = torch.ones(3, 2), Tape()

    @torch.library.custom_op("weft_test::begin", mutates_args=())
    def begin(x: torch.Tensor) -> torch.Tensor:
        return (x * 2)[:, None].expand(-1, 4, -1)

    with tape:
        streams = torch.ops.weft_test.begin(given)
        total = streams.sum(1)
    given.fill_(3.0)
    tape.replay()
    assert streams.eq(6.0).all() and total.eq(24.0).all()
