"""Images on one GPU: the encoder against its ceiling, first tokens, a second turn, and what text alone pays.

    python -m benchmarks.vision --json FILE [--model qwen3-vl-2b] [--text-model qwen3-1.7b]

Dummy weights, random pixels. Requests are given to the engine with their patches, so what the processor does before
(decoding, resizing) is not in the figures; the copy of the patches to the device is.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import os
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.bench import report
from weft.bench.roofline import ceilings_of
from weft.config import resolve
from weft.config.vision import VisionConfig
from weft.engine.core import EngineCore
from weft.messages import RowSampling
from weft.multimodal.items import MediaItem, pixel_bytes
from weft.request import Request, RequestSpec

CONFIGS = Path(__file__).parent / "configs"
_numbers = itertools.count()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Requests:
    """Requests of one engine."""

    def __init__(self, core: EngineCore, vision: VisionConfig | None, side: int = 0, seed: int = 0) -> None:
        self._side, self._dtype = side, core._executor._runner.config.dtype  # type: ignore[attr-defined]
        self._core, self._vision, self._rng = core, vision, np.random.default_rng(seed)
        self._num_ids = vision.tokens.start if vision is not None else 150_000

    def image(self) -> tuple[tuple[int, int, int], bytes]:
        """The grid and the patches of a new image."""
        assert self._vision is not None
        grid = (1, self._side, self._side)
        values = self._rng.standard_normal((self._side**2, self._vision.patch_dim), dtype=np.float32)
        return grid, pixel_bytes(values, self._dtype)

    def text(self, count: int) -> list[int]:
        return self._rng.integers(0, self._num_ids, count).tolist()

    def with_image(self, image: tuple[tuple[int, int, int], bytes], text: list[int], max_tokens: int = 1) -> Request:
        """An image, then text."""
        assert self._vision is not None
        grid, pixels = image
        count, tokens = self._vision.num_tokens(grid), self._vision.tokens
        assert tokens.start is not None and tokens.end is not None
        ids = [tokens.start, *[tokens.image] * count, tokens.end, *text]
        digest = hashlib.sha256(f"{grid}".encode() + pixels).digest()
        item = MediaItem("image", digest, [(1, count)], grid, pixels, self._dtype)
        return self.of(ids, max_tokens, [item])

    def of(self, ids: list[int], max_tokens: int = 1, media: Sequence[MediaItem] = ()) -> Request:
        number = next(_numbers)
        sampling = RowSampling(temperature=0.0)
        return Request.of(
            RequestSpec(f"{number}", array("I", ids), sampling, max_tokens, arrival=number, media=list(media))
        )

    def seconds(self, requests: Sequence[Request]) -> float:
        """Until the last of them has ended."""
        synchronize()
        started = time.perf_counter()
        for request in requests:
            self._core.add(request)
        while not all(request.is_finished for request in requests):
            self._core.step()
        seconds = time.perf_counter() - started
        while self._core.step() or self._core.scheduler.has_work:
            pass
        assert all(request.finish_reason == "length" for request in requests), "a request ended early"
        return seconds


def ms(values: Sequence[float]) -> dict[str, Any]:
    return {"median_ms": round(1e3 * median(values), 3), "repeats_ms": [round(1e3 * value, 3) for value in values]}


def first_tokens(requests: Requests, repeats: int) -> dict[str, Any]:
    """One image and 100 text tokens: alone, eight at once, and a second turn about the same image against one of the
    same length about text."""
    alone, eight, second, text_turn = [], [], [], []
    for _ in range(repeats + 1):
        image = requests.image()
        first = requests.with_image(image, requests.text(100))
        alone.append(requests.seconds([first]))
        history = [*first.prompt_token_ids[-100:], *first.output_token_ids]  # behind the image
        second.append(requests.seconds([requests.with_image(image, [*history, *requests.text(100)])]))
        plain = requests.of(requests.text(len(first.prompt_token_ids)))
        requests.seconds([plain])
        more = [*plain.prompt_token_ids, *plain.output_token_ids, *requests.text(100)]
        text_turn.append(requests.seconds([requests.of(more)]))
        eight.append(requests.seconds([requests.with_image(requests.image(), requests.text(100)) for _ in range(8)]))
    result: dict[str, Any] = {
        "first_token": ms(alone[1:]), "eight_at_once": ms(eight[1:]), "second_turn": ms(second[1:]),
        "text_second_turn": ms(text_turn[1:]),
    }  # fmt: skip
    result["second_turn_ratio"] = round(median(second[1:]) / median(text_turn[1:]), 3)
    return result


def device_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds from an idle device until it is idle again."""
    times = []
    for _ in range(repeats + 3):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return median(times[3:])


def encoder_flops(vision: VisionConfig, grids: Sequence[tuple[int, int, int]]) -> float:
    """Return the FLOPs of the tower's products, with full attention within each frame."""
    size, total = vision.hidden_size, 0.0
    merged = size * vision.merge_unit
    for t, h, w in grids:
        frame, patches = h * w, t * h * w
        block = 2.0 * patches * (4 * size**2 + 2 * size * vision.intermediate_size) + 4.0 * frame * patches * size
        merger = 2.0 * patches / vision.merge_unit * (merged**2 + merged * vision.out_hidden_size)
        total += vision.depth * block + vision.num_features * merger + 2.0 * patches * vision.patch_dim * size
    return total


@torch.inference_mode()
def encoder(core: EngineCore, vision: VisionConfig, side: int) -> list[dict[str, Any]]:
    """The tower's time by patches, as it serves (by a graph where one fits) and launched kernel by kernel, and its
    share of the bfloat16 ceiling."""
    media = core._executor._runner.media  # type: ignore[attr-defined]
    ceilings = ceilings_of(media.embeddings.device.type)
    rows = []
    quarter, half = side // 4, side // 2
    squares = [[(1, n, n)] for n in (side // 8, quarter, half, 3 * side // 4 // 2 * 2, side, 2 * side)]
    squares.insert(3, [(1, half, side)])
    for grids in [*squares, [(1, side, side)] * 8, [(16, half, half)]]:
        count = sum(t * h * w for t, h, w in grids)
        patches = torch.randn(count, vision.patch_dim, device=media.embeddings.device, dtype=media.embeddings.dtype)
        eager = device_ms(partial(media.run_eager, patches, grids))
        took = device_ms(partial(media.run, patches, grids))
        flops = encoder_flops(vision, grids)
        row = {"grids": f"{len(grids)} x {grids[0]}", "patches": count, "captured": media.graphs.size_for(count),
               "ms": round(took, 3), "eager_ms": round(eager, 3),
               "tflops_per_s": round(flops / took / 1e9, 1)}  # fmt: skip
        if ceilings is not None:
            row["share_of_ceiling"] = round(flops / took * 1e3 / ceilings.flops_per_s, 3)
        rows.append(row)
        print(row, flush=True)
    return rows


@torch.inference_mode()
def encoder_kernels(core: EngineCore, vision: VisionConfig, side: int) -> list[dict[str, Any]]:
    """Where the device's time goes in one image, kernel by kernel."""
    media = core._executor._runner.media  # type: ignore[attr-defined]
    grids, device = [(1, side, side)], media.embeddings.device
    patches = torch.randn(side**2, vision.patch_dim, device=device, dtype=media.embeddings.dtype)
    media.run_eager(patches, grids)
    with torch.profiler.profile() as profile:
        media.run_eager(patches, grids)
        synchronize()
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    return [{"kernel": event.key[:100], "launches": event.count, "us": round(event.self_device_time_total, 1)}
            for event in events if event.self_device_time_total][:24]  # fmt: skip


@torch.inference_mode()
def attention_backends(vision: VisionConfig, patches: int) -> dict[str, Any]:
    """Device milliseconds of one block's attention under torch's backends, to choose among them."""
    heads, dim = vision.num_heads, vision.hidden_size // vision.num_heads
    device = "cuda" if torch.cuda.is_available() else "cpu"
    qkv = torch.randn(1, patches, 3, heads, dim, device=device, dtype=torch.bfloat16)
    q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
    found: dict[str, Any] = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                found[backend.name] = round(device_ms(lambda: F.scaled_dot_product_attention(q, k, v)), 4)
        except RuntimeError as error:
            found[backend.name] = str(error).split("\n")[0]
    found["default"] = round(device_ms(lambda: F.scaled_dot_product_attention(q, k, v)), 4)
    found["tflops_per_s_at_1_ms"] = round(4.0 * patches**2 * heads * dim / 1e9, 1)
    return found


def text_alone(requests: Requests, repeats: int) -> dict[str, Any]:
    """First token of 1,024 text tokens, and a decode step of 1 and 8 sequences, in milliseconds."""
    result: dict[str, Any] = {}
    result["first_token"] = ms([requests.seconds([requests.of(requests.text(1024))]) for _ in range(repeats + 1)][1:])
    for batch in (1, 8):
        steps = []
        for _ in range(repeats + 1):
            prompts = [requests.text(256) for _ in range(batch)]
            short = requests.seconds([requests.of(prompt, 1) for prompt in prompts])
            long = requests.seconds([requests.of([*prompt[:-1], 7], 129) for prompt in prompts])
            steps.append((long - short) / 128)
        result[f"decode_step_{batch}"] = ms(steps[1:])
    return result


def make(model: str, args: argparse.Namespace, **more: Any) -> EngineCore:
    settings = {"max_model_len": 32768, "max_num_seqs": 64, "load_format": "dummy", "skip_tokenizer_init": True}
    return EngineCore(resolve(model=os.path.relpath(CONFIGS / model), **(settings | more | json.loads(args.settings))))


def release(core: EngineCore) -> None:
    core.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-vl-2b")
    parser.add_argument("--text-model", default="qwen3-1.7b")
    parser.add_argument("--side", type=int, default=64, help="of an image, in patches: 64 of 16 are 1024 pixels")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--settings", default="{}", help="more settings of the engines, as JSON")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "vision", "model": args.model, "text_model": args.text_model}

    def save() -> None:
        Path(args.json).write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    core = make(args.model, args)
    config = core._executor._runner.config  # type: ignore[attr-defined]
    vision = config.model_config.vision
    assert vision is not None and config.model_config.runs_vision
    plan = core.plan
    result["memory"] = {"caches": plan.cache_bytes, "encoder_cache": plan.encoder_bytes, "reasons": plan.reasons}
    print(result["memory"], flush=True)
    result["startup_s"] = core.startup
    result["encoder"] = encoder(core, vision, args.side)
    result["encoder_kernels"] = encoder_kernels(core, vision, args.side)
    for row in result["encoder_kernels"]:
        print(row, flush=True)
    result["attention"] = attention_backends(vision, args.side**2)
    print(result["attention"], flush=True)
    requests = Requests(core, vision, args.side)
    result["images"] = first_tokens(requests, args.repeats)
    print(json.dumps({k: v["median_ms"] if isinstance(v, dict) else v for k, v in result["images"].items()}))
    result["stats"] = {name: getattr(core.stats(), name) for name in ("encoder_seconds", "num_encoder_queries",
                       "num_encoder_hits", "steps_by_mode")}  # fmt: skip
    print(result["stats"], flush=True)
    result |= report.provenance(config.device) | {"settings": {k: str(v) for k, v in report.settings(config).items()}}
    save()
    result["text_with_tower"] = text_alone(requests, args.repeats)
    save()
    release(core)
    core = make(args.text_model, args)
    result["text_model_alone"] = text_alone(Requests(core, None), args.repeats)
    release(core)
    for name in ("text_with_tower", "text_model_alone"):
        print(name, {k: v["median_ms"] for k, v in result[name].items()}, flush=True)
    save()


if __name__ == "__main__":
    main()
