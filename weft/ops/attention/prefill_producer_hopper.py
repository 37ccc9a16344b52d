"""The producer of ``prefill_hopper.py``: it fills the ring of stages with tiles of keys and values.

Job: order tiles, and have them in the ring as the matrix units read them. Owns: how many are under way. Does not know:
what the consumers do with them.

Over a cache in the queries' dtype the producer is one warp, which orders tiles from the copy engine (TMA), page by
page. For an FP8 cache the producer is four warps. They copy a tile of keys and a tile of values into a separate buffer
and widen both into the ring. The copy engine is not used, because all four warps would wait for one another before each
order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from weft.ops.attention.hopper_tiles import fetch, widen
from weft.ops.triton.gluon import threads_load

COPIED = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
"""Assignment of the 64 dims of a tile to the threads that copy and widen them."""
NARROW = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))


@gluon.jit
def _slots(desc, page_table, j, keys, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """Compute where the pages of tile ``j`` begin, for pages that hold the first ``keys`` keys."""
    num_pages = (keys + PAGE_SIZE - 1) // PAGE_SIZE
    absent = desc.shape[0].to(gl.int32)  # past the end of the cache: the copy engine writes zeros
    slots = ()
    for p in gl.static_range(KEYS // PAGE_SIZE):
        index = j * (KEYS // PAGE_SIZE) + p
        page = gl.load(page_table + index, mask=index < num_pages, other=0)
        slots = slots + (gl.where(index < num_pages, page * PAGE_SIZE, absent),)  # type: ignore[assignment]  # noqa: RUF005
    return slots


@gluon.jit
def _produce_as_stored(
    k_desc, v_desc, k_tiles, v_tiles, barriers, page_table, column, keys,
    PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The producer: fetch the tiles that hold the first ``keys`` keys, each as soon as its stage is free."""
    k_ready, k_empty, v_ready, v_empty, _turns, _merged = barriers
    v_column = column
    if V_DIM != HEAD_DIM:
        v_column = column // DIM * V_DIM
    for j in range((keys + KEYS - 1) // KEYS):
        slots = _slots(k_desc, page_table, j, keys, PAGE_SIZE, KEYS)
        stage = j % STAGES
        before = (j // STAGES & 1) ^ 1
        mbarrier.wait(k_empty.index(stage), before)
        fetch(k_desc, k_tiles.index(stage), k_ready.index(stage), slots, column, PAGE_SIZE, KEYS, HEAD_DIM)
        mbarrier.wait(v_empty.index(stage), before)
        fetch(v_desc, v_tiles.index(stage), v_ready.index(stage), slots, v_column, PAGE_SIZE, KEYS, V_DIM)


@gluon.jit
def _rows(page_table, j, keys, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr):
    """Compute the slot of each key of tile ``j``, and whether the key is among the first ``keys``."""
    tokens = j * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPIED))
    pages = gl.load(page_table + tokens // PAGE_SIZE, mask=tokens < keys, other=0)
    return pages * PAGE_SIZE + tokens % PAGE_SIZE, tokens < keys


@gluon.jit
def _copy(cache, narrow, rows, column, stride, KEYS: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Order a tile of e4m3; absent keys and dimensions are zeros."""
    slots, present = rows
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, COPIED))
    at = (slots.to(gl.int64) * stride)[:, None] + (column + dims)[None, :]
    for panel in gl.static_range(HEAD_DIM // 64):
        box = narrow.slice(panel * KEYS, KEYS, dim=0)
        mask = present[:, None]
        if panel * 64 + 64 > DIM:
            mask = mask & (panel * 64 + dims < DIM)[None, :]
        threads_load(box, cache + (at + panel * 64), mask)
    commit_group()


@gluon.jit
def _produce_widened(
    k_cache, v_cache, k_tiles, v_tiles, barriers, narrow, page_table, column, keys,
    PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copy one tile of keys and one of values at a time from an FP8 cache, and widen both into the ring."""
    k_ready, k_empty, v_ready, v_empty, _turns, _merged = barriers
    stride = gl.num_programs(0) * DIM
    if keys > 0:
        rows = _rows(page_table, 0, keys, PAGE_SIZE, KEYS)
        _copy(k_cache, narrow.index(0), rows, column, stride, KEYS, DIM, HEAD_DIM)
        _copy(v_cache, narrow.index(1), rows, column, stride, KEYS, DIM, HEAD_DIM)
    for j in range((keys + KEYS - 1) // KEYS):
        rows = _rows(page_table, j + 1, keys, PAGE_SIZE, KEYS)  # beyond the last tile: all absent, nothing is read
        stage = j % STAGES
        before = (j // STAGES & 1) ^ 1
        wait_group(1)
        mbarrier.wait(k_empty.index(stage), before)
        widen(narrow.index(0), k_tiles.index(stage), COPIED, KEYS, HEAD_DIM)
        mbarrier.arrive(k_ready.index(stage), count=1)
        _copy(k_cache, narrow.index(0), rows, column, stride, KEYS, DIM, HEAD_DIM)
        wait_group(1)
        mbarrier.wait(v_empty.index(stage), before)
        widen(narrow.index(1), v_tiles.index(stage), COPIED, KEYS, HEAD_DIM)
        mbarrier.arrive(v_ready.index(stage), count=1)
        _copy(v_cache, narrow.index(1), rows, column, stride, KEYS, DIM, HEAD_DIM)
    wait_group(0)


@gluon.jit
def produce(
    k_source, v_source, k_tiles, v_tiles, barriers, narrow, page_table, column, keys,
    PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, DIM: gl.constexpr, HEAD_DIM: gl.constexpr, V_DIM: gl.constexpr,
    STAGES: gl.constexpr, WIDENED: gl.constexpr,
):  # fmt: skip
    """Fill the ring from descriptors of the caches, or, to be ``WIDENED``, from pointers to them."""
    if WIDENED:
        _produce_widened(
            k_source, v_source, k_tiles, v_tiles, barriers, narrow, page_table, column, keys,
            PAGE_SIZE, KEYS, DIM, HEAD_DIM, STAGES,
        )  # fmt: skip
    else:
        _produce_as_stored(
            k_source, v_source, k_tiles, v_tiles, barriers, page_table, column, keys,
            PAGE_SIZE, KEYS, DIM, HEAD_DIM, V_DIM, STAGES,
        )  # fmt: skip
