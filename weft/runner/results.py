"""Bringing a step's results to the host.

Job: have them written without waiting, and turn them into a ``ModelOutput`` when asked. Owns: the host's memory for
results, and the event that says when they are complete. Does not know: how tokens were chosen.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from weft.layers.sampler import Logprobs
from weft.messages import ModelOutput, SchedulerOutput, TokenLogprobs
from weft.ops.backend import Backend
from weft.ops.drafts.types import NO_DRAFT
from weft.ops.steps import NUM_RESULTS, store_step_results
from weft.runner.buffers import to_device
from weft.runner.media_inputs import EncoderTime
from weft.runner.sampling.step_sampler import StepTokens

if TYPE_CHECKING:
    from weft.runner.host_memory import Transfers


def to_host(tensor: Tensor) -> Tensor:
    """Start copying ``tensor`` to the host; valid once an event recorded after this call has passed.

    On the CPU this is a real copy too: the original may be a static buffer that the next step overwrites.
    """
    if tensor.device.type == "cpu":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def logprobs_to_host(logprobs: Logprobs) -> Logprobs:
    """Start copying log probabilities to the host."""
    return Logprobs(to_host(logprobs.token_ids), to_host(logprobs.logprobs), to_host(logprobs.ranks))


def _entries(logprobs: Logprobs) -> list[TokenLogprobs]:
    """Convert log probabilities on the host to one entry per position."""
    columns = (logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist())
    return [TokenLogprobs(ids, values, rank) for ids, values, rank in zip(*columns, strict=True)]


_Block = tuple[Tensor, torch.cuda.Event | None]


class ResultMemory:
    """The host's memory for results: a block for each step in flight, reused by later steps.

    Kernels write the blocks, which are pinned memory. torch does not track such writes and would reuse a block as soon
    as its tensor is freed. So blocks are kept here, and ``memory.wait_for_steps`` waits for the device before this
    object is freed.

    Args:
        max_results: most tokens that a step samples.
        device, backend: where results come from, and how.
    """

    def __init__(self, max_results: int, device: torch.device, backend: Backend) -> None:
        self._shape, self._on_gpu, self._backend = (NUM_RESULTS, max_results), device.type == "cuda", backend
        self._no_ints = torch.empty(0, dtype=torch.int64, device=device)
        self._no_flags = torch.empty(0, dtype=torch.bool, device=device)
        self._free: list[_Block] = []

    def store(
        self,
        token_ids: Tensor | None,
        failed: Tensor | None,
        counted: Tensor | None,
        prefill_failed: Tensor | None,
        drafts: Tensor | None,
    ) -> ResultBlock:
        """Start writing what there is, as ``store_step_results`` takes it, to the host."""
        block = ResultBlock(self._free.pop() if self._free else self._allocate(), self._free)
        if token_ids is None and prefill_failed is None:
            return block  # a step without requests
        ints, flags = self._no_ints, self._no_flags
        store_step_results(
            block.host,
            ints if token_ids is None else token_ids,
            flags if failed is None else failed,
            flags if counted is None else counted,
            flags if prefill_failed is None else prefill_failed,
            ints if drafts is None else drafts,
            backend=self._backend,
        )
        return block

    def _allocate(self) -> _Block:
        host = torch.zeros(self._shape, dtype=torch.int64, pin_memory=self._on_gpu)
        return host, torch.cuda.Event() if self._on_gpu else None


class ResultBlock:
    """One step's results in a block of ``ResultMemory``, which is free with the end of this object.

    The device may not have written them by then: those of the step that takes the block next come after them, on the
    same stream.

    Attributes:
        host: ``[NUM_RESULTS, max_results]`` int64, in the order of ``store_step_results``.
        done: to be recorded after all of the step's results; None on the CPU.
    """

    __slots__ = ("_free", "done", "host")

    def __init__(self, block: _Block, free: list[_Block]) -> None:
        (self.host, self.done), self._free = block, free

    def __del__(self) -> None:
        self._free.append((self.host, self.done))


@dataclass(slots=True)
class PendingStep:
    """A launched step.

    Attributes:
        step: its number.
        rows: rows that sampled, in batch order; a row with drafts once for each of its positions.
        prefill_rows: rows that did not sample.
        draft_rows: rows for which up to ``num_drafts`` drafts were made; empty if nothing is drafted on the device.
        block: the device's results. For ``rows``: token ids, whether the row has failed, and whether the token is the
            sequence's. For ``prefill_rows``: whether the hidden state is NaN or infinite. For ``draft_rows``:
            ``num_drafts`` drafts for the next step, ``NO_DRAFT`` where none was found.
        counts_all: True if all tokens are the sequences'; the block says nothing about it then.
        num_logprobs: index in ``rows`` -> number of alternatives, for rows that want log probabilities.
        logprobs: log probabilities of the sampled tokens of those rows, in the same order, on the host.
        prompt_logprobs: row -> log probabilities of its prompt tokens, on the host.
        mode: the graph mode in which the step runs.
        encoder_time: time of the vision tower; None if the step encodes no images.
        transfers: copies between the device and a tier in host memory; None without one.
    """

    step: int
    rows: list[int]
    prefill_rows: list[int]
    draft_rows: list[int]
    num_drafts: int
    block: ResultBlock
    counts_all: bool
    num_logprobs: dict[int, int]
    logprobs: Logprobs | None
    prompt_logprobs: dict[int, Logprobs]
    mode: str = "NONE"
    num_padding_tokens: int = 0
    encoder_time: EncoderTime | None = None
    transfers: Transfers | None = None

    def __post_init__(self) -> None:
        if self.block.done is not None:
            self.block.done.record()

    @property
    def is_done(self) -> bool:
        """True if ``result`` does not have to wait."""
        return self.block.done is None or self.block.done.query()

    def result(self) -> ModelOutput:
        """Wait until the results are on the host."""
        if self.block.done is not None:
            self.block.done.synchronize()
        rows, shape = self.rows, (len(self.draft_rows), self.num_drafts)
        token_ids, failed, counted, prefill_failed, drafts = self.block.host.numpy()
        token_ids, failed, counted = token_ids[: len(rows)], failed[: len(rows)], counted[: len(rows)]
        logprobs = self._logprobs(counted)
        if not self.counts_all:
            is_counted = counted != 0
            rows, token_ids, failed = _where(counted, rows), token_ids[is_counted], failed[is_counted]
        return ModelOutput(
            self.step,
            rows,
            token_ids.tolist(),
            logprobs,
            {row: _entries(values) for row, values in self.prompt_logprobs.items()},
            _where(failed, rows) + _where(prefill_failed[: len(self.prefill_rows)], self.prefill_rows),
            self.mode,
            self.num_padding_tokens,
            self._drafts(drafts[: math.prod(shape)].reshape(shape)),
            self.encoder_time.seconds() if self.encoder_time is not None else 0.0,
            self._finished_transfers(self.transfers) if self.transfers is not None else [],
            self.transfers.finished_files() if self.transfers is not None else [],
        )

    def _finished_transfers(self, transfers: Transfers) -> list[tuple[int, float]]:
        """The copies that are done by now. A step without requests waits for one."""
        if not (self.rows or self.prefill_rows):
            transfers.wait()
        return transfers.finished()

    def _drafts(self, drafts: np.ndarray) -> dict[int, list[int]]:
        """The drafts by row, without rows that have none."""
        by_row = zip(self.draft_rows, drafts.tolist(), strict=True)
        return {row: ids for row, ids in by_row if ids and ids[0] != NO_DRAFT}

    def _logprobs(self, counted: np.ndarray) -> dict[int, list[TokenLogprobs]]:
        if self.logprobs is None:
            return {}
        by_row: dict[int, list[TokenLogprobs]] = {}
        for (place, count), entry in zip(self.num_logprobs.items(), _entries(self.logprobs), strict=True):
            if self.counts_all or counted[place]:
                by_row.setdefault(self.rows[place], []).append(_first(entry, count))
        return by_row


def _where(flags: np.ndarray, rows: list[int]) -> list[int]:
    """The rows whose flag is set."""
    return [row for row, flag in zip(rows, flags.tolist(), strict=True) if flag]


def _first(entry: TokenLogprobs, top_n: int) -> TokenLogprobs:
    """The entry with only ``top_n`` alternatives (the batch may have computed more for another row)."""
    return TokenLogprobs(entry.token_ids[: top_n + 1], entry.logprobs[: top_n + 1], entry.rank)


def pending_step(
    memory: ResultMemory,
    scheduler_output: SchedulerOutput,
    sampled: StepTokens | None,
    hidden_states: Tensor | None = None,
    prompt_logprobs: dict[int, Logprobs] | None = None,
    drafts: Tensor | None = None,
) -> PendingStep:
    """Start bringing a step's results to the host.

    Args:
        sampled: None if no row samples.
        hidden_states: ``[T, hidden_size]`` of the step's tokens; None if every row samples.
        prompt_logprobs: row -> log probabilities of its prompt tokens, on the device.
        drafts: from ``StepDrafts``.
    """
    requests = scheduler_output.requests
    logprobs = sampled.logprobs if sampled is not None else None
    acceptance = sampled.acceptance if sampled is not None else None
    return PendingStep(
        scheduler_output.step,
        sampled.rows if sampled is not None else [],
        prefill_rows=[r.row for r in requests if not r.samples],
        draft_rows=[r.row for r in requests if r.samples] if drafts is not None else [],
        num_drafts=drafts.shape[1] if drafts is not None else 0,
        block=memory.store(
            sampled.token_ids if sampled is not None else None,
            sampled.nan_rows if sampled is not None else None,
            acceptance.counted if acceptance is not None else None,
            failed_prefills(scheduler_output, hidden_states) if hidden_states is not None else None,
            drafts,
        ),
        counts_all=acceptance is None,
        num_logprobs=sampled.num_logprobs if sampled is not None else {},
        logprobs=logprobs_to_host(logprobs) if logprobs is not None else None,
        prompt_logprobs={row: logprobs_to_host(values) for row, values in (prompt_logprobs or {}).items()},
    )


def failed_prefills(scheduler_output: SchedulerOutput, hidden_states: Tensor) -> Tensor | None:
    """Return ``[N]`` bool for the rows that do not sample: True if the last token's hidden state is NaN or infinite.

    The last token reads all KV and every state of its sequence, so a NaN in any of them shows. A NaN token also spoils
    earlier tokens of its step (a weight of zero times NaN), so all that the step stored for the row is worthless. For
    rows that sample, the logits are checked instead.

    Args:
        hidden_states: ``[T, hidden_size]`` of the step's tokens.

    Returns:
        None if every row samples.
    """
    ends = itertools.accumulate(request.num_tokens for request in scheduler_output.requests)
    last = [end - 1 for end, request in zip(ends, scheduler_output.requests, strict=True) if not request.samples]
    if not last:
        return None
    indices = to_device(torch.tensor(last), hidden_states.device)
    return hidden_states.index_select(0, indices).isfinite().all(-1).logical_not()
