"""The tier in host memory: its memory on this rank, and the copies that a step orders between it and the caches.

Job: keep records of pages and states in pinned memory, gather them from the caches, scatter them there. Owns: that
memory. Does not know: streams and events (``host_link.py``), what a place holds, why something is copied
(``weft/offload/``).

A record is one page, or one state, of all layers (``ops/attention/records.py``).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from weft.cache.spec import CacheSpec
from weft.forward_context import LayerCache
from weft.messages import SchedulerOutput, Transfer
from weft.offload.disk import share_of
from weft.offload.plan import TierPlan
from weft.ops.attention.records import Records
from weft.ops.backend import Backend
from weft.parallel.tensor_parallel import SingleRank, TensorParallel
from weft.runner.buffers import device_ints
from weft.runner.file_results import FileResults
from weft.runner.host_files import HostFiles
from weft.runner.host_link import CHUNK_BYTES, CudaLink, DirectLink
from weft.runner.pinned_memory import allocate_host

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HostMemory:
    """Pinned memory for records.

    Args:
        plan: of one rank.
        folder, fingerprint: of the files, if there are any.
        tp: the ranks, each of which has files of its own.

    Attributes:
        pages: ``[num_pages, page_bytes]`` bytes.
        states: ``[num_slots, slot_bytes + page_bytes]`` bytes: a state, and the KV of the partial page at its position.
        link: copies records between this memory and the device.
        files: copies records between this memory and files; None without a folder.

    Raises:
        CapacityError: the host lacks the memory.
    """

    def __init__(
        self,
        plan: TierPlan,
        device: torch.device,
        folder: Path | None = None,
        fingerprint: str = "",
        tp: TensorParallel | None = None,
    ) -> None:
        began = time.monotonic()
        on_gpu = device.type == "cuda"
        block = allocate_host(max(1, plan.num_bytes), "kv_offloading_size", pin=on_gpu, owner=self)
        split = plan.num_pages * plan.page_bytes
        self.pages = block[:split].view(plan.num_pages, plan.page_bytes)
        self.states = block[split : plan.num_bytes].view(plan.num_slots, plan.slot_bytes)
        largest = max(plan.page_bytes, plan.slot_bytes, min(CHUNK_BYTES, plan.num_bytes))
        self.link = CudaLink(device, largest) if on_gpu else DirectLink()
        self.files, self.has_ranks = None, tp is not None and tp.size > 1
        if folder is not None:
            tp = tp if tp is not None else SingleRank()
            share = share_of(fingerprint, tp.rank, tp.size)
            self.files = HostFiles(folder, share, self.pages, self.states, FileResults(tp))
            weakref.finalize(self, self.files.close)
        seconds = time.monotonic() - began
        logger.info("host tier: %.2f GiB in %.2f s", plan.num_bytes / 2**30, seconds)

    def transfers(
        self, spec: CacheSpec, caches: Mapping[str, LayerCache], device: torch.device, backend: Backend
    ) -> Transfers:
        """The copies between this memory and ``caches``."""
        return Transfers(spec, caches, self, device, backend)


class Transfers:
    """The copies of one rank's steps.

    Args:
        spec, caches: of the model.
        host: the other end.
    """

    def __init__(
        self,
        spec: CacheSpec,
        caches: Mapping[str, LayerCache],
        host: HostMemory,
        device: torch.device,
        backend: Backend,
    ) -> None:
        layers = spec.layers.items()
        self._pages = Records([caches[name][t.name] for name, layer in layers for t in layer.paged], backend)
        self._states = Records([caches[name][t.name] for name, layer in layers for t in layer.states], backend)
        self._host, self._link, self._device = host, host.link, device

    def walk(self) -> None:
        """Launch every kernel once, so that none is compiled later."""
        entries = device_ints([0], self._device)
        for records in (self._pages, self._states):
            if records.num_bytes:
                row = torch.empty(1, records.num_bytes, dtype=torch.uint8, device=self._device)
                records.gather(entries, row)
                records.scatter(row, entries)

    def begin(self, step: SchedulerOutput) -> None:
        """Queue the copies of a step, before anything else of the step."""
        self._link.wait_for(step.restored)
        # The engine knows the ends of the copies on rank 0. Other ranks may be late.
        earlier = self._link.mark() if self._host.has_ranks and (step.files or step.restores) else []
        for transfer in step.stores:
            with self._link.storing(transfer.number):
                self._store_pages(transfer)
                self._store_states(transfer)
        if step.files and self._host.files is not None:
            self._host.files.begin(step.files, earlier)
        for transfer in step.restores:
            with self._link.restoring(transfer.number, transfer.after, earlier):
                self._restore_pages(transfer)
                self._restore_states(transfer)

    def finished(self) -> list[tuple[int, float]]:
        """Number and seconds of each copy that is done, once."""
        return self._link.finished()

    def finished_files(self) -> list[tuple[int, int, str]]:
        return self._host.files.results.take() if self._host.files is not None else []

    def wait(self) -> None:
        """Wait for the oldest restore in flight, and a moment for files."""
        self._link.wait()
        if self._host.files is not None:
            self._host.files.results.wait()

    def _store_pages(self, transfer: Transfer) -> None:
        ordered = sorted((target, source) for source, target in transfer.pages)
        for chunk in self._chunks(ordered, self._host.pages):
            rows = self._link.rows(len(chunk), self._host.pages)
            self._pages.gather(self._ints(source for _, source in chunk), rows)
            self._link.to_host(rows, self._host.pages, [target for target, _ in chunk])

    def _store_states(self, transfer: Transfer) -> None:
        ordered = sorted((target, slot, page) for slot, target, page in transfer.states)
        for chunk in self._chunks(ordered, self._host.states):
            rows = self._link.rows(len(chunk), self._host.states)
            self._states.gather(self._ints(slot for _, slot, _ in chunk), rows)
            tails = rows[:, self._states.num_bytes :]
            if self._pages.num_bytes:
                self._pages.gather(self._ints(page for _, _, page in chunk), tails)
            self._link.to_host(rows, self._host.states, [target for target, _, _ in chunk])

    def _restore_pages(self, transfer: Transfer) -> None:
        for chunk in self._chunks(sorted(transfer.pages), self._host.pages):
            rows = self._link.to_device(self._host.pages, [source for source, _ in chunk])
            self._pages.scatter(rows, self._ints(target for _, target in chunk))

    def _restore_states(self, transfer: Transfer) -> None:
        for chunk in self._chunks(sorted(transfer.states), self._host.states):
            rows = self._link.to_device(self._host.states, [source for source, _, _ in chunk])
            self._states.scatter(rows, self._ints(slot for _, slot, _ in chunk))
            for place, (_, _, page) in enumerate(chunk):
                if page:
                    tail = rows[place : place + 1, self._states.num_bytes :]
                    self._pages.scatter(tail, self._ints([page]))

    def _ints(self, values: Iterable[int]) -> Tensor:
        return device_ints(list(values), self._device)

    def _chunks(self, pairs: list[T], memory: Tensor) -> Iterator[list[T]]:
        """``pairs`` in lists that fit into a staging buffer."""
        size = max(1, self._link.chunk_bytes // max(1, memory.shape[1]))
        for begin in range(0, len(pairs), size):
            yield pairs[begin : begin + size]
