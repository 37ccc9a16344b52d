"""What a tier in host memory does on a GPU: a prefix of 100,000 tokens leaves the device and comes back.

    python -m benchmarks.offload --models qwen3-0.6b qwen3-next-12l --json FILE

For every model with dummy weights: the bandwidth of the restore, the first token of the returning conversation against
computing it again, what a restore costs 32 others that decode meanwhile, and what a tier costs that nobody uses.
Before that, tokens after a restore equal those of an engine without a tier.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.decode_profile import CONFIGS
from weft import LLM, SamplingParams
from weft.bench import report

NUM_OTHERS, OTHERS_TOKENS, WARM_STEPS = 32, 64, 60
CEILING = 55e9
"""Bytes per second of the link, measured on an H200 with PCIe 5."""


def folder_of(model: str, length: int, into: Path) -> str:
    """The configuration of a model, with positions for ``length`` tokens."""
    config = json.loads((CONFIGS / model / "config.json").read_text())
    config["max_position_embeddings"] = max(config["max_position_embeddings"], length)
    folder = into / model
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000, 50_000) for _ in range(count)]


def generate(llm: LLM, prompt: list[int], count: int = 1) -> Any:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    return llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0]


def step_times(llm: LLM, until: Any) -> list[float]:
    """Seconds of each step until ``until`` holds."""
    times: list[float] = []
    while not until(len(times)):
        began = time.perf_counter()
        llm.step()
        times.append(time.perf_counter() - began)
    return times


def begin_others(llm: LLM, count: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    for index in range(NUM_OTHERS):
        llm.add_request({"prompt_token_ids": tokens(1000 + index, OTHERS_TOKENS)}, params, request_id=f"other{index}")
    step_times(llm, lambda done: done == 20)


def drain(llm: LLM) -> None:
    for name in list(llm._streams):
        llm.abort(name)
    while not llm.is_finished() or llm._core.has_work:
        llm.step()


def is_correct(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Tokens of prompts that come back from the tier, against an engine without reuse, in float32."""
    base = {"device": "cuda", "dtype": "float32", "max_model_len": 1024, "max_num_seqs": 4} | settings
    prompts = [tokens(index, 700) if model else [t % 400 for t in tokens(index, 700)] for index in range(8)]
    with LLM(model, **base, num_kv_pages=110, num_state_slots=12, kv_offloading_size=1.0) as llm:
        found = [generate(llm, prompt, 16) for _ in range(2) for prompt in prompts]
        stats = llm.stats()
    with LLM(model, **base, enable_prefix_caching=False) as llm:
        expected = [list(generate(llm, prompt, 16).outputs[0].token_ids) for prompt in prompts]
    equal = sum(list(o.outputs[0].token_ids) == expected[i % 8] for i, o in enumerate(found))
    return {
        "model": model or "weft-mini", "prompts": len(found), "equal": equal,
        "restored_tokens": stats.num_external_hit_tokens, "restores": stats.num_restores,
        "failed_restores": stats.num_failed_restores,
    }  # fmt: skip


def unused_ms(folder: str, settings: dict[str, Any]) -> float:
    """Median milliseconds of a decode step of 32 requests."""
    with LLM(folder, **settings) as llm:
        begin_others(llm, 1000)
        found = median(step_times(llm, lambda done: done == 200))
        drain(llm)
    return 1e3 * found


def measure(model: str, length: int, size: float, into: Path) -> dict[str, Any]:
    folder = folder_of(model, length + 4096, into)
    pages = (length + NUM_OTHERS * 2048) // 16 + 1000
    settings: dict[str, Any] = {
        "device": "cuda", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": length + 2048,
        "max_num_seqs": NUM_OTHERS + 2, "num_kv_pages": pages, "eviction_policy": "lru",
    }  # fmt: skip
    row: dict[str, Any] = {"model": model, "prefix_tokens": length}
    began = time.perf_counter()
    with LLM(folder, **settings, kv_offloading_size=size) as llm:
        row["start_s"] = time.perf_counter() - began
        core = llm._core
        row["bytes_per_token"] = core.manager.spec.kv_bytes_per_token
        first, second, third = (tokens(seed, length) for seed in range(3))
        computed = generate(llm, first)
        row["computed_first_token_ms"] = 1e3 * computed.metrics.time_to_first_token
        for other in (second, third):  # they evict the first one
            generate(llm, other)
        before = core.stats()
        restored = generate(llm, first)
        after = core.stats()
        row["report"] = str(restored.cache_report)
        row["equal_first_token"] = computed.outputs[0].token_ids == restored.outputs[0].token_ids
        row["restored_first_token_ms"] = 1e3 * restored.metrics.time_to_first_token
        row["restored_tokens"] = after.num_external_hit_tokens - before.num_external_hit_tokens
        restored_bytes = after.restored_bytes - before.restored_bytes
        seconds = after.restored_seconds - before.restored_seconds
        report_seconds = restored.cache_report.restore_seconds
        row["restored_gb"] = restored_bytes / 1e9
        row["copies_gb_s"] = restored_bytes / seconds / 1e9 if seconds else 0.0
        row["restore_ms"] = 1e3 * report_seconds
        row["restore_gb_s"] = restored_bytes / report_seconds / 1e9 if report_seconds else 0.0
        row["share_of_link"] = 1e9 * row["restore_gb_s"] / CEILING
        stored_seconds = after.stored_seconds
        row["stores_gb_s"] = after.stored_bytes / stored_seconds / 1e9 if stored_seconds else 0.0
        row |= beside_others(llm, second)
    return row


def beside_others(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """Times of 32 decodes alone, and while the prefix of ``prompt`` is restored."""
    core = llm._core
    begin_others(llm, 1900)
    alone = step_times(llm, lambda done: done == WARM_STEPS)
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.add_request({"prompt_token_ids": prompt}, params, request_id="returns")
    restores = core.scheduler.restores
    assert restores is not None
    during = step_times(llm, lambda done: (done > 1 and not restores.is_active) or done > 2000)
    drain(llm)
    return {
        "alone_ms": 1e3 * median(alone), "alone_mean_ms": 1e3 * mean(alone), "steps_during": len(during),
        "during_ms": 1e3 * median(during), "during_mean_ms": 1e3 * mean(during), "during_max_ms": 1e3 * max(during),
        "slowdown": mean(during) / mean(alone) - 1,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-next-12l"])
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--size", type=float, default=48.0, help="GiB of host memory")
    parser.add_argument("--no-unused", action="store_true", help="leave out the cost of an unused tier")
    parser.add_argument("--json", required=True)
    args = parser.parse_args()
    result: dict[str, Any] = report.provenance("cuda") | {"benchmark": "offload", "correct": [], "rows": []}
    path = report.open_json(args.json)
    result["correct"].append(is_correct(None, {}))
    print(result["correct"][-1], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for model in args.models:
            row = measure(model, args.tokens, args.size, Path(folder))
            if not args.no_unused:
                settings = {
                    "device": "cuda", "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 4096,
                    "max_num_seqs": 34, "num_kv_pages": 6000,
                }  # fmt: skip
                row["off_ms"] = unused_ms(str(CONFIGS / model), settings)
                row["unused_ms"] = unused_ms(str(CONFIGS / model), settings | {"kv_offloading_size": 4.0})
            result["rows"].append(row)
            report.write_json(path, result)
            print(json.dumps(row, indent=1), flush=True)
    report.write_json(path, result)


if __name__ == "__main__":
    main()
