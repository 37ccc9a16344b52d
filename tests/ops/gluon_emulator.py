"""Runs a Gluon kernel's Python on the CPU, which Triton's interpreter cannot: its warps are threads.

Checks what no compiler can: indices, masks and phases of barriers, that nothing waits for ever, and that nobody writes
to shared memory that is still read. For that, all that is asynchronous is late: a copy arrives after a random while,
and a matrix product reads its operands when it is waited for. Shared memory starts as NaN. Layouts are not looked at.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from weft.ops.attention import decode_tiles_hopper as decode
from weft.ops.delta_rule.decode_gluon import unpack, update
from weft.ops.delta_rule.kda_prepare_hopper import times_half
from weft.ops.fp8 import E4M3
from weft.ops.linear.coded_few_rows_hopper import code_pair
from weft.ops.triton.early_launch import enter, pass_on, release, release_by_work, wait
from weft.ops.triton.gluon import async_load, reinterpret, thread_barrier, threads_load
from weft.ops.triton.hopper import hold, pack
from weft.ops.triton.hopper_rows import exchange

PATIENCE_S = 20.0


def late() -> None:
    """A while, and now and then long enough for all others to get far ahead."""
    time.sleep(random.random() * (3e-4 if random.random() < 0.9 else 3e-2))


class Pointer:
    """An address in a tensor's storage; what lies outside of it is out of bounds."""

    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    @classmethod
    def of(cls, tensor: Tensor) -> Pointer:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return cls(tensor.as_strided((size,), (1,), 0), tensor.storage_offset())

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.data.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.data, self.offset + more)

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        """The same memory as numbers of another size."""
        data = self.data.view(dtype)
        return Pointer(data, self.offset * self.data.element_size() // data.element_size())

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        offsets, mask = torch.broadcast_tensors(torch.as_tensor(self.offset).long(), torch.as_tensor(mask))
        assert ((offsets >= 0) & (offsets < self.data.numel()))[mask].all(), "out of bounds"
        return offsets, mask


def load(
    pointer: Pointer, mask: Any = True, other: float = 0, cache_modifier: str = "", eviction_policy: str = ""
) -> Tensor:
    offsets, inside = pointer.places(mask)
    if mask is True:
        return pointer.data[offsets]
    return torch.where(inside, pointer.data[offsets.where(inside, 0)], torch.tensor(other, dtype=pointer.data.dtype))


def store(pointer: Pointer, value: Tensor, mask: Any = True) -> None:
    offsets, mask = pointer.places(mask)
    assert value.dtype == pointer.data.dtype
    pointer.data[offsets[mask]] = value[mask]


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes announced are there."""

    def __init__(self, failures: list[BaseException]) -> None:
        self.failures, self.changed, self.is_used = failures, threading.Condition(), False
        self.count = self.missing = self.num_bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def arrive(self, arrivals: int = 1, num_bytes: int = 0) -> None:
        self.is_used = True
        with self.changed:
            self.missing -= arrivals
            self.num_bytes += num_bytes
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == self.num_bytes == 0:
                self.phase ^= 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, phase: Any) -> None:
        late()
        end = time.monotonic() + PATIENCE_S
        with self.changed:
            while self.phase == int(phase):
                self.changed.wait(0.2)
                if self.failures or time.monotonic() > end:
                    raise RuntimeError("another part failed" if self.failures else "waits for ever")


class Shared:
    """Shared memory, or barriers in it."""

    def __init__(self, data: Any) -> None:
        self.data = data

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.data.dtype
        return dtype

    def index(self, i: Any) -> Any:
        return self.data[int(i)] if isinstance(self.data, list) else Shared(self.data[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared | Operand:
        """Numbers or boxes as they lie; or the operand of a product, made of boxes of 64 numbers of two bytes."""
        if len(shape) != 2 or dtype == torch.float32:
            return Shared(self.data.view(*shape))
        return Operand(lambda: self.data.view(-1, shape[0], 64).transpose(0, 1).flatten(1))

    def permute(self, order: tuple[int, int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def read(self) -> Tensor:
        return self.data


class Operand:
    """An operand that a product reads from shared memory only when the product runs."""

    def __init__(self, read: Callable[[], Tensor]) -> None:
        self.read = read

    def permute(self, order: tuple[int, int]) -> Operand:
        return Operand(lambda: self.read().permute(*order))


def pack_pairs(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first, second], dim=-1).bfloat16().view(torch.int32).squeeze(-1)


def unpack_pairs(pairs: Tensor) -> tuple[Tensor, ...]:
    return pairs.contiguous()[..., None].view(torch.bfloat16).float().unbind(-1)


def update_pairs(pairs: Tensor, decay: Tensor, k: Tensor, low: Tensor, high: Tensor) -> Tensor:
    below, above = unpack_pairs(pairs)
    return pack_pairs(below * decay + k * low, above * decay + k * high)


def widen(words: Tensor) -> list[Tensor]:
    """The numbers in e4m3 of each word."""
    numbers = words.contiguous().view(torch.uint8).view(*words.shape, 4).view(E4M3).to(torch.float16)
    return list(numbers.unbind(-1))


def widen_two(even: Tensor, odd: Tensor) -> list[Tensor]:
    return [number for pair in zip(widen(even), widen(odd), strict=True) for number in pair]


def code_pairs(words: Tensor) -> tuple[Tensor, Tensor]:
    """The INT4 codes in the lowest bits of both halves of each word, less 8."""
    return ((words & 15) - 8).bfloat16(), ((words >> 16 & 15) - 8).bfloat16()


def transpose_blocks(x: Tensor) -> Tensor:
    """Each block of 8 x 8."""
    return x.unflatten(2, (-1, 8)).unflatten(1, (-1, 8)).transpose(2, 4).flatten(3).flatten(1, 2)


class Product:
    """A matrix product under way."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self.run, self.result = run, None


class Emulator:
    """One launch: ``handle`` stands in for it (``weft.ops.triton.launch.launches_handled``).

    Attributes:
        waited: programs of the last launch that have waited for the kernel before.
        used_barriers: for each allocation of barriers, whether a program of the last launch used one. A barrier without
            use shares its memory with something else.
    """

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.queue = threading.local()  # products under way, of each part
        self.namespaces: dict[int, dict[str, Any]] = {}
        self.program, self.grid, self.num_warps = (0, 0, 0), (0, 0, 0), 0
        self.waited: set[tuple[int, ...]] = set()
        self.barriers: list[list[Barrier]] = []
        self.used_barriers: list[bool] = []
        barrier_ops = SimpleNamespace(
            MBarrierLayout=lambda: None,
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, num_bytes: barrier.arrive(num_bytes=num_bytes),
            arrive=lambda barrier, count: barrier.arrive(count),
            wait=lambda barrier, phase: barrier.wait(phase),
        )
        language = self._language()
        self.stand_ins = {
            id(gl): language, id(tl): language, id(hopper.mbarrier): barrier_ops,
            id(async_load): self._copy, id(reinterpret): Shared.reinterpret, id(thread_barrier): lambda: None,
            id(threads_load): self._copy_later, id(commit_group): self._commit, id(wait_group): self._wait_copies,
            id(hopper): SimpleNamespace(warpgroup_mma=self._multiply, fence_async_shared=lambda: None),
            id(hopper.fence_async_shared): lambda: None, id(hopper.warpgroup_mma_wait): self._wait,
            **{id(part): lambda *early: None for part in (release, release_by_work)},
            **{id(part): lambda *early: self.waited.add(self.program) for part in (enter, pass_on, wait)},
            id(mma_v2): lambda a, b, acc: acc + a.float() @ b.float(),
            id(decode._widen): widen, id(decode._widen_two): widen_two, id(decode._transpose): transpose_blocks,
            id(code_pair): code_pairs,
            id(hold): lambda x: x, id(exchange): lambda x: x, id(pack): pack_pairs,
            id(unpack): unpack_pairs, id(update): update_pairs, id(times_half): lambda x, factor: x * factor.half(),
        }  # fmt: skip

    def handle(
        self, kernel: JITFunction, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        constants = {p.name: options[p.name] for p in kernel.params if p.is_constexpr}
        run, self.num_warps = self._python(kernel), options["num_warps"]
        self.waited.clear()
        self.used_barriers = []
        self.grid = x, y, z = (*grid, 1, 1)[:3]
        for self.program in itertools.product(range(x), range(y), range(z)):
            self.barriers = []
            run(*map(self._argument, args), **constants)
            if self.failures:
                raise self.failures[0]
            used = [any(barrier.is_used for barrier in barriers) for barriers in self.barriers]
            self.used_barriers = [a or b for a, b in itertools.zip_longest(self.used_barriers, used, fillvalue=False)]

    def _argument(self, value: Any) -> Any:
        if isinstance(value, TensorDescriptor):
            data = value.base.view(value.shape)
            return SimpleNamespace(data=data, block=value.block_shape, shape=[torch.tensor(n) for n in value.shape])
        return Pointer.of(value) if isinstance(value, Tensor) else torch.tensor(value)

    def _python(self, kernel: Any) -> FunctionType:
        """The function behind a kernel, with stand-ins for all that it uses from its module."""
        function = kernel.fn
        names = function.__globals__
        if id(names) not in self.namespaces:
            self.namespaces[id(names)] = space = {}
            space |= {name: self._stand_in(value) for name, value in names.items()}
        return FunctionType(function.__code__, self.namespaces[id(names)])

    def _stand_in(self, value: Any) -> Any:
        if id(value) in self.stand_ins:
            return self.stand_ins[id(value)]
        if isinstance(value, JITFunction | InterpretedFunction):
            return lambda *args: self._python(value)(*args)
        return value.value if isinstance(value, tl.constexpr) else value

    def _copy(self, desc: Any, at: Sequence[Any], barrier: Barrier, box: Shared) -> None:
        row, column = map(int, at)
        height, width = desc.block

        def arrive() -> None:
            late()
            content = torch.zeros(height, width, dtype=desc.data.dtype)
            there = desc.data[row : row + height, column : column + width]
            content[: there.shape[0], : there.shape[1]] = there
            box.store(content)
            barrier.arrive(0, -height * width * content.element_size())

        assert list(box.data.shape) == desc.block
        self._thread(arrive).start()

    def _copy_later(self, box: Shared, pointer: Pointer, mask: Any = True) -> None:
        """Start a copy that a thread asks for itself. The result is zero where ``mask`` is not set."""

        def arrive() -> None:
            late()
            box.store(load(pointer, mask))

        pointer.places(mask)
        thread = self._thread(arrive)
        self.queue.copies = [*getattr(self.queue, "copies", []), thread]
        thread.start()

    def _commit(self) -> None:
        self.queue.groups = [*getattr(self.queue, "groups", []), getattr(self.queue, "copies", [])]
        self.queue.copies = []

    def _wait_copies(self, under_way: int) -> None:
        late()
        groups = getattr(self.queue, "groups", [])
        for thread in [thread for group in groups[: len(groups) - under_way] for thread in group]:
            thread.join()
        self.queue.groups = groups[len(groups) - under_way :]

    def _multiply(self, a: Any, b: Operand | Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        def run() -> Tensor:
            left = a if isinstance(a, Tensor) else a.read()
            product = left.float() @ b.read().float()
            return (acc.result if isinstance(acc, Product) else acc) + product if use_acc else product

        assert is_async
        self.queue.products = [*getattr(self.queue, "products", []), Product(run)]
        return self.queue.products[-1]

    def _wait(self, under_way: int, deps: Sequence[Any]) -> Any:
        late()
        while len(self.queue.products) > under_way:
            product = self.queue.products.pop(0)
            product.result = product.run()
        results = [d.result if isinstance(d, Product) and d.result is not None else d for d in deps]
        return results[0] if len(results) == 1 else results  # what is under way still is of use to a product alone

    def _thread(self, body: Callable[..., None], *args: Any) -> threading.Thread:
        def run() -> None:
            try:
                body(*args)
            except BaseException as failure:
                self.failures.append(failure)

        return threading.Thread(target=run)

    def _specialize(self, parts: Sequence[Any], warps: Sequence[int], registers: Sequence[int]) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        threads = [self._thread(*part[:1], *part[1]) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        if layout is None:
            self.barriers.append([Barrier(self.failures) for _ in range(shape[0])])
            return Shared(self.barriers[-1])
        poison = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 3
        return Shared(torch.full(shape, poison, dtype=dtype))

    def _language(self) -> SimpleNamespace:
        def nothing(*args: Any, **kwargs: Any) -> object:
            return object()

        def tensors(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *values: function(*map(torch.as_tensor, values))

        def where(condition: Any, value: Any, other: Any) -> Tensor:
            value = torch.as_tensor(value)
            return torch.where(torch.as_tensor(condition), value, torch.as_tensor(other).to(value.dtype))

        return SimpleNamespace(
            int32=torch.int32, int64=torch.int64, float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
            float8e4nv=E4M3,
            program_id=lambda axis: torch.tensor(self.program[axis]), num_programs=lambda axis: self.grid[axis],
            load=load, store=store, where=where, minimum=tensors(torch.minimum), maximum=tensors(torch.maximum),
            max=torch.amax, sum=lambda x, axis: x.sum(axis),
            reduce=lambda values, axis, add: tuple(x.sum(axis) for x in values), exp=torch.exp, exp2=torch.exp2,
            abs=torch.abs, rsqrt=torch.rsqrt, static_range=range, join=lambda a, b: torch.stack((a, b), -1),
            arange=lambda begin, end, layout: torch.arange(begin, end),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            max_contiguous=lambda x, hint: x, multiple_of=lambda x, hint: x,
            convert_layout=lambda x, layout: x, SliceLayout=nothing, BlockedLayout=nothing,
            NVMMADistributedLayout=nothing, DotOperandLayout=nothing, SwizzledSharedLayout=nothing,
            allocate_shared_memory=self._allocate,
            warp_specialize=self._specialize, reshape=torch.reshape, permute=torch.permute,
            split=lambda x: x.unbind(-1), expand_dims=torch.unsqueeze, log2=torch.log2,
            num_warps=lambda: self.num_warps, pointer_type=lambda dtype: dtype,
        )  # fmt: skip
