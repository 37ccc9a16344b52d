"""A small model with one split op, and forward contexts for it; no cache, no engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from weft.forward_context import Batch, ForwardContext, get_forward_context
from weft.graph.split_ops import split_op

SIZE = 6


class RunningSum(nn.Module):
    """Sums every sequence's rows; lengths are read on the host, so this cannot be captured."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.calls = name, 0

    @split_op("running_sum", width=lambda layer: SIZE)
    def mix(self, x: Tensor) -> Tensor:
        self.calls += 1
        lengths = get_forward_context().batch.cu_seqlens_q.diff().tolist()
        return torch.cat([rows.cumsum(0) for rows in x.split(lengths)])


class Model(nn.Module):
    """``ids [T] -> [T, SIZE]`` through ``depth`` blocks with a residual stream."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, SIZE)
        self.mixers = nn.ModuleList(RunningSum(f"layers.{i}") for i in range(depth))
        self.projections = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(depth))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for mixer, projection in zip(self.mixers, self.projections, strict=True):
            x = x + torch.tanh(projection(mixer.mix(x)))
        return x

    def table(self) -> dict[str, Any]:
        return {mixer.name: mixer for mixer in self.mixers}


def context_of(lengths: list[int], layers: dict[str, Any], **fields: Any) -> ForwardContext:
    """A batch of sequences of these lengths that start here; ``fields`` of the context beside it."""
    lens = torch.tensor(lengths, dtype=torch.int32)
    count = int(lens.sum())
    zeros = torch.zeros(count, dtype=torch.int64)
    batch = Batch(
        num_tokens=count,
        num_seqs=len(lengths),
        num_decodes=0,
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        positions=zeros,
        slot_mapping=zeros,
        cu_seqlens_q=torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int(),
        seq_lens=lens,
        page_table=torch.zeros(len(lengths), 1, dtype=torch.int32),
        state_slots=torch.zeros(len(lengths), dtype=torch.int32),
    )
    return ForwardContext(batch, {}, layers, **fields)
