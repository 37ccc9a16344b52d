"""The roofline of a step: bytes to move and FLOPs, over the device's ceilings.

Job: bytes and FLOPs of a decode step and of a prefill from the model's geometry, and their time at the device's
ceilings. Owns: the model of the work. Does not know: how Weft does the work.

The work is counted once, as if caches were perfect. Every weight that is used is read once. Keys and values are read
once, recurrent states are read and written once, and the output head runs for sampled rows only. Experts are used as
with uniform routing: of E experts, n tokens that choose k each use ``E * (1 - (1 - k/E)^n)`` on average. Activations
are left out, since they could stay on the chip.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from weft.cache.spec import CacheSpec, cache_dtypes
from weft.config import EngineConfig
from weft.config.layer_spec import DTYPE_BYTES, CacheDtypes
from weft.config.model import ModelConfig
from weft.config.weights import linear_weight_bytes, router_weights


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best that a device reaches: bytes per second (read plus written), and FLOPs per second in bfloat16 and FP8.
    ``source`` names the origin of the numbers."""

    bytes_per_s: float
    flops_per_s: float
    fp8_flops_per_s: float
    source: str


H200 = Ceilings(
    4.25e12,
    785e12,
    1520e12,
    "measured on an NVIDIA H200: device copy (read + write), matrix products in bfloat16 and FP8",
)

_KNOWN = {"NVIDIA H200": H200}


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to move and floating-point operations to do, ``fp8_flops`` of them in FP8."""

    num_bytes: float
    flops: float
    fp8_flops: float = 0.0

    def floor_s(self, ceilings: Ceilings) -> float:
        """Seconds at the ceilings: the slower of the two."""
        arithmetic = (self.flops - self.fp8_flops) / ceilings.flops_per_s + self.fp8_flops / ceilings.fp8_flops_per_s
        return max(self.num_bytes / ceilings.bytes_per_s, arithmetic)


class Roofline:
    """The work of steps of one model.

    Args:
        model: the geometry.
        dtypes: dtypes of activations and unquantised weights, of keys and values, of the recurrent state.
    """

    def __init__(self, model: ModelConfig, dtypes: CacheDtypes) -> None:
        self._model = model
        page_size = math.lcm(*(spec.page_multiple for spec in model.layer_specs(dtypes).values()))  # any that fits
        self._spec = CacheSpec.from_model(model, page_size=page_size, dtypes=dtypes)
        self._plain_bytes = DTYPE_BYTES[dtypes.model]
        self._linear_bytes = linear_weight_bytes(model, dtypes.model)
        self._router_weights = router_weights(model)
        self._head_weights = model.hidden_size * model.vocab_size
        chosen = 0
        if model.moe is not None:
            chosen = model.moe.num_experts_per_tok * len(model.moe.sparse_layers)
        # Every token uses what one token uses, except its experts.
        self._common_weights = self._spec.weights_per_token - chosen * model.expert_weights
        # The FLOPs of one token with quantised weights.
        is_fp8 = model.quantization is not None and model.quantization.main.form == "fp8"
        self._fp8_flops = 2.0 * (self._spec.weights_per_token - self._router_weights) if is_fp8 else 0.0

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        return cls(config.model_config, cache_dtypes(config))

    def decode(self, batch_size: int, context_len: float, num_drafts: int = 0) -> Work:
        """The work of a decode step of ``batch_size`` sequences with ``context_len`` tokens on average.

        Args:
            num_drafts: number of drafts that each sequence verifies. They add as many tokens, and states to write. If
                the model's own head drafts, the output head is read once more for each.
        """
        spec, tokens = self._spec, batch_size * (1 + num_drafts)
        caches = context_len * spec.kv_bytes_per_token + (2 + num_drafts) * spec.slot_bytes
        per_token = spec.flops_per_token + spec.flops_per_pair * context_len + 2.0 * self._head_weights
        head_passes = num_drafts if self._model.runs_mtp else 0
        num_bytes = self._weights_read(tokens) + head_passes * self._plain_bytes * self._head_weights
        flops = tokens * per_token + 2.0 * head_passes * batch_size * self._head_weights
        return Work(num_bytes + batch_size * caches, flops, tokens * self._fp8_flops)

    def prefill(self, num_tokens: int) -> Work:
        """The work of a prompt of ``num_tokens`` from an empty cache to its first sampled token."""
        spec = self._spec
        written = num_tokens * spec.kv_bytes_per_token + spec.slot_bytes
        flops = spec.prefill_flops(0, num_tokens) + 2.0 * self._head_weights
        return Work(self._weights_read(num_tokens) + written, flops, num_tokens * self._fp8_flops)

    def queue_s(self, prompt_lens: Sequence[int], output_lens: Sequence[int], ceilings: Ceilings) -> float:
        """Seconds for a queue of requests that all run at once.

        The prompts are computed as one batch, which samples the first tokens. Then step t decodes every request that
        wants more than t tokens. Limits on the batch are left out, since they only add time.
        """
        spec = self._spec
        total = sum(prompt_lens)
        flops = sum(spec.prefill_flops(0, n) for n in prompt_lens) + 2.0 * self._head_weights * len(prompt_lens)
        written = total * spec.kv_bytes_per_token + len(prompt_lens) * spec.slot_bytes
        seconds = Work(self._weights_read(total) + written, flops, total * self._fp8_flops).floor_s(ceilings)
        for step in range(1, max(output_lens)):
            running = [n for n, wanted in zip(prompt_lens, output_lens, strict=True) if wanted > step]
            context = sum(running) / len(running) + step
            seconds += self.decode(len(running), context).floor_s(ceilings)
        return seconds

    def _weights_read(self, num_tokens: int) -> float:
        """Bytes of the weights that ``num_tokens`` tokens use, the output head included."""
        experts = self._experts_hit(num_tokens) * self._model.expert_weights
        plain = self._router_weights + self._head_weights
        return self._linear_bytes * (self._common_weights - self._router_weights + experts) + self._plain_bytes * plain

    def _experts_hit(self, num_tokens: int) -> float:
        """Number of distinct experts that ``num_tokens`` tokens use on average, over all layers."""
        moe = self._model.moe
        if moe is None:
            return 0.0
        missed = (1.0 - moe.num_experts_per_tok / moe.num_experts) ** num_tokens
        return len(moe.sparse_layers) * moe.num_experts * (1.0 - missed)


def ceilings_of(device: str) -> Ceilings | None:
    """The ceilings of ``device`` (``cpu`` or ``cuda``): known ones, else measured now; None for a CPU."""
    if device == "cpu":
        return None
    import torch

    return _KNOWN.get(torch.cuda.get_device_name()) or _measured()


def _measured() -> Ceilings:
    """Measure a copy of 1 GiB, a bfloat16 product of 8192-square matrices, and one in FP8 if the device has it. Each is
    the best of ten."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    a = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    copy_s = min(_gpu_seconds(lambda: target.copy_(source)) for _ in range(10))
    product_s = min(_gpu_seconds(lambda: torch.mm(a, a, out=out)) for _ in range(10))
    fp8_s = product_s
    if torch.cuda.get_device_capability() >= (8, 9):
        b, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")
        fp8_s = min(_gpu_seconds(lambda: torch._scaled_mm(b, b.t(), one, one, out=out)) for _ in range(10))
    flops = 2 * 8192**3
    return Ceilings(2 * 2**30 / copy_s, flops / product_s, flops / fp8_s, "measured here: copy of 1 GiB, products")


def _gpu_seconds(run: Any) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def floor_columns(work: Work, seconds: float, ceilings: Ceilings | None) -> dict[str, float | None]:
    """The columns ``floor_ms``, and ``floor_share``: the floor as a share of ``seconds`` (1.0: as fast as possible)."""
    if ceilings is None:
        return {"floor_ms": None, "floor_share": None}
    floor = work.floor_s(ceilings)
    return {"floor_ms": round(floor * 1e3, 3), "floor_share": round(floor / seconds, 3)}
