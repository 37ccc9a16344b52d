"""Decode attention over an FP8 cache for Hopper against plain attention in float64: on such a GPU, or emulated."""

# ruff: noqa: E402 (the imports need a version of Triton)
from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.platforms.triton_version import is_known

triton = pytest.importorskip("triton")
if not is_known(triton.__version__):
    pytest.skip("the kernel is for versions of Triton that Weft knows", allow_module_level=True)

from tests.ops.attention import test_gluon_attention
from tests.ops.attention.test_gluon_attention import DEVICE, ON_HOPPER, Case
from tests.ops.gluon_emulator import Emulator
from weft.forward_context import Verification
from weft.ops.attention import decode as attention_decode
from weft.ops.attention import decode_hopper as attention_decode_hopper
from weft.ops.attention import paged_attention
from weft.ops.backend import Backend
from weft.ops.fp8 import E4M3
from weft.ops.triton.launch import Kernel, launches_handled

CONTEXTS = [4, 63, 64, 300, 512]  # one split or several, whose last tiles and pages are full or not


class Fp8Case(Case):
    """A case whose cache holds e4m3, of values over a scale."""

    def __init__(self, layout: str, query_lens: list[int], contexts: list[int], padding: int = 2) -> None:
        super().__init__(layout, query_lens, contexts, padding, padding_seqs=padding, cache=E4M3)
        self.batch = dataclasses.replace(self.batch, num_decodes=len(query_lens))

    def run(self, skip_decodes: bool = False) -> Tensor:
        """Run the dispatcher with this kernel and return its output, with NaN where nothing is written."""
        launches: list[str] = []

        def handle(kernel: Kernel, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> None:
            launches.append(kernel.__name__)
            if ON_HOPPER:
                kernel.run(*args, grid=grid, warmup=False, **options)
            else:
                Emulator().handle(kernel, grid, args, options)

        out = torch.full(self.q.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
        with launches_handled(handle):
            paged_attention(
                self.q, self.k, self.v, self.batch, scale=self.scale, sinks=self.sinks, v_scale=self.v_scale, out=out,
                backend=Backend.TRITON,
            )  # fmt: skip
        assert launches[0] == "decode_hopper_kernel"
        return out.cpu()

    def verifying(self, query_len: int) -> Fp8Case:
        slots = torch.zeros(len(self.lens), query_len, dtype=torch.int32, device=DEVICE)
        self.batch = dataclasses.replace(self.batch, verification=Verification(query_len, slots))
        return self


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a GPU, where few sequences take no other way and few programs have no work."""
    monkeypatch.setattr(attention_decode_hopper, "runs_gluon", lambda device: True)
    monkeypatch.setitem(test_gluon_attention.LAYOUTS, "128 of 8", (8, 1, 128, 32))
    monkeypatch.setattr(attention_decode, "_HELD_WORK", 0)
    monkeypatch.setattr(attention_decode, "_MIXTURE_PROGRAMS", 4)


@pytest.mark.parametrize("layout", ["128 of 2", "128 of 8"])
def test_equals_plain_attention(layout: str) -> None:
    tensors = Fp8Case(layout, [1] * 5, CONTEXTS)
    tensors.check(tensors.run())


@pytest.mark.parametrize("largest", [60000.0, 70000.0])
def test_queries_reach_as_far_as_float16_does(largest: float) -> None:
    """Beyond, results are NaN, which the sampler reports, and not wrong numbers."""
    tensors = Fp8Case("128 of 8", [1], [64])
    tensors.q[0, :, 0] = largest
    out = tensors.run()
    if largest < 65504.0:
        tensors.check(out)
    else:
        assert out[0].isnan().all()


def test_queries_of_a_verification() -> None:
    """Four tokens of two heads; the first ones see nothing of the last split."""
    tensors = Fp8Case("128 of 2", [4, 4], [254, 20], padding=0).verifying(4)
    tensors.check(tensors.run())


def test_any_mixture_is_read_on_the_device() -> None:
    tensors = Fp8Case("128 of 2", [1, 1, 1, 2], [300, 5, 63, 7], padding=1).as_mixture(3, max_prefills=0)
    out = tensors.run()
    assert out[3:].isnan().all(), "prefills and padding are the other kernel's"
    tensors.lens, tensors.num_real = tensors.lens[:3], len(out)
    tensors.check(out)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["A", "128 of 8"])
@pytest.mark.parametrize("contexts", [CONTEXTS, [30000, 5, 9000], [1087] * 64])
def test_many_and_long_sequences_on_the_gpu(contexts: list[int], layout: str) -> None:
    if not ON_HOPPER:
        pytest.skip("needs compute capability 9")
    tensors = Fp8Case(layout, [1] * len(contexts), contexts)
    tensors.check(tensors.run())


TAKEN = {"head_dim": 128, "page": 16, "rows": 8, "dtype": torch.bfloat16, "cache": E4M3, "hopper": True}


@pytest.mark.parametrize(
    "change, taken",
    [
        ({}, True), ({"page": 64}, True), ({"page": 8}, False), ({"head_dim": 256}, False), ({"head_dim": 64}, False),
        ({"rows": 9}, False), ({"dtype": torch.float32}, False), ({"cache": torch.bfloat16}, False),
        ({"hopper": False}, False),
    ],
)  # fmt: skip
def test_only_what_it_was_made_for(monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], taken: bool) -> None:
    case = TAKEN | change
    monkeypatch.setattr(attention_decode_hopper, "runs_gluon", lambda device: case["hopper"])
    q = torch.empty(1, 2, case["head_dim"], dtype=case["dtype"])
    cache = torch.empty(2, case["page"], 1, case["head_dim"]).to(case["cache"])
    assert attention_decode_hopper.takes(q, cache, case["rows"]) == taken
