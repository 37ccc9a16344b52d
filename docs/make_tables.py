"""Writes the tables of the documents from the files of ``benchmarks/results``: ``make docs``.

Job: one function per table writes between two markers that name the table. Above each table are its files, with the day
of their measurement. Owns: how figures are rounded, what counts as reached. A test fails while a table differs from its
files. Rows whose file is not there are left out.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(<!-- table ([\w-]+): begin \(make docs\) -->\n).*?(<!-- table \2: end -->)", re.DOTALL)

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 8192)
BATCHES = (1, 8, 32, 128)
ENGINES = {"A": "engine-qwen3-0.6b-h200", "B": "engine-qwen3-next-12l-bf16-state-h200"}
MODELS = {"A": "qwen3-0.6b", "B": "qwen3-next-12l"}
PEERS = "peers-h200"
MISSED = ", missed"


@cache
def read(name: str) -> dict[str, Any]:
    """A result file; empty if it is not there."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def shown(value: float | str | None) -> str:
    """Three digits; integers, and what has more before its point, whole."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 if abs(value) < 10 else 1}f}"


def given(value: float | None) -> str:
    """A figure of a peer, or a goal, as precise as it stands in its file."""
    return "" if value is None else f"{value:,.10g}"


def decode(name: str) -> dict[int, dict[str, Any]]:
    return {row["batch_size"]: row for row in read(name).get("decode", [])}


def first_token(name: str) -> dict[int, dict[str, Any]]:
    return {row["prompt_len"]: row for row in read(name).get("prefill", [])}


def step(row: dict[str, Any]) -> str:
    """Milliseconds of a decode step; in square brackets the interval between steps, where it differs by over 1%."""
    ms, interval = row["step_ms"], row["interval_ms"]
    return shown(ms) + (f" [{shown(interval)}]" if abs(interval / ms - 1) > 0.01 else "")


def goal(value: float, target: float, *, least: bool = False) -> str:
    reached = value >= target if least else value <= target
    return given(target) + ("" if reached else MISSED)


# -- tables ----------------------------------------------------------------------------------------------------------

Table = tuple[Sequence[str], Sequence[str], list[list[str]]]
"""Names of files, columns, rows."""


def decode_table() -> Table:
    rows = []
    for model, name in ENGINES.items():
        peers = read(PEERS)["decode_ms"][model]
        for batch, row in decode(name).items():
            ms, at = row["step_ms"], str(batch)
            others = [given(peers[who].get(at)) for who in ("vllm", "sglang")]
            rows.append([model, at, step(row), *others, shown(row["floor_ms"]), goal(ms, peers["goal"][at])])
    return [*ENGINES.values(), PEERS], ("", "batch", "Weft", "vLLM", "SGLang", "floor", "goal"), rows


def gains_table() -> Table:
    files, rows = [], []
    for model, base in MODELS.items():
        eager, graphs = f"engine-{base}-eager-h200", ENGINES[model]
        variants = {"eager": eager, "with graphs": graphs, "graphs and torch.compile": f"engine-{base}-compiled-h200"}
        for what, name in variants.items():
            if figures := decode(name):
                files.append(name)
                row = [step(figures[b]) if b in figures else "" for b in BATCHES]
                rows.append([f"{model}, {what}", *row])
        slow, fast = decode(eager), decode(graphs)
        times = [f"{slow[b]['step_ms'] / fast[b]['step_ms']:.1f}x" if b in slow else "" for b in BATCHES]
        rows.append([f"{model}, graphs over eager", *times])
    return files, ("batch", *map(str, BATCHES)), rows


def first_token_table() -> Table:
    rows = []
    for model, name in ENGINES.items():
        figures, peers = first_token(name), read(PEERS)["first_token_ms"][model]
        rows.append([f"**{model}**", *(shown(figures[n]["first_token_ms"]) for n in LENGTHS)])
        for who, label in (("vllm", "vLLM"), ("sglang", "SGLang")):
            rows.append([label, *(given(peers[who].get(str(n))) for n in LENGTHS)])
        rows.append(["floor", *(shown(figures[n]["floor_ms"]) for n in LENGTHS)])
        rows.append(["goal", *(goal(figures[n]["first_token_ms"], peers["goal"][str(n)]) for n in LENGTHS)])
    return [*ENGINES.values(), PEERS], ("prompt tokens", *(f"{n:,}" for n in LENGTHS)), rows


def modes_table() -> Table:
    files, rows = [], []
    for model, base in MODELS.items():
        variants = {
            "NONE": f"engine-{base}-eager-h200", "PIECEWISE, capture": f"prefill-{base}-piecewise-h200",
            "PIECEWISE, inductor": f"prefill-{base}-inductor-h200",
            "PIECEWISE, split at Gated DeltaNet too": f"prefill-{base}-piecewise-gdn-split-h200",
            "FULL": ENGINES[model],
        }  # fmt: skip
        for mode, name in variants.items():
            if figures := first_token(name):
                files.append(name)
                rows.append([f"{model}, {mode}", *(shown(figures[n]["first_token_ms"]) for n in LENGTHS)])
    return files, ("prompt tokens", *(f"{n:,}" for n in LENGTHS)), rows


def long_prompts_table() -> Table:
    files, rows, lengths = [], [], (4608, 6144, 8192, 12288, 16000)
    variants = {
        "no-graph": "steps of 8,192, without a graph", "one-graph": "steps of 8,192, one graph",
        "segments": "segments of 4,096, a graph each",
    }  # fmt: skip
    for model, base in MODELS.items():
        for key, what in variants.items():
            if figures := first_token(name := f"long-prefill-{base}-{key}-h200"):
                files.append(name)
                rows.append([f"{model}, {what}", *(shown(figures[n]["first_token_ms"]) for n in lengths)])
    return files, ("prompt tokens", *(f"{n:,}" for n in lengths)), rows


def throughput_table() -> Table:
    rows = []
    for model, name in ENGINES.items():
        figures, peers = read(name)["throughput"], read(PEERS)["output_tokens_per_s"].get(model)
        value, target = figures["output_tokens_per_s"], peers["goal"]
        others = [" and ".join(given(v) for v in peers[who]) for who in ("vllm", "sglang")]
        roofline = figures["roofline_tokens_per_s"]
        rows.append([model, shown(value), *others, shown(roofline), goal(value, target, least=True)])
    return [*ENGINES.values(), PEERS], ("output tokens/s", "Weft", "vLLM", "SGLang", "roofline", "goal"), rows


def startup_table() -> Table:
    files, rows = [], []
    for model, base in MODELS.items():
        name, peers = f"startup-{base}-h200", read(PEERS)["start_s"][model]
        files.append(name)
        for kind in ("cold", "warm"):
            figures = read(name)["results"][kind]
            stages = figures["stages"]
            imports = stages.get("libraries", figures["import_s"])
            parts = [imports, *(stages[name] for name in ("kernels", "memory", "graphs"))]
            ours = [shown(figures["total_s"]), _start(peers["vllm"].get(kind)), _start(peers["sglang"].get(kind))]
            target = goal(figures["total_s"], peers["goal"][kind])
            rows.append([model, kind, *ours, target, *(shown(part) for part in parts)])
    columns = ("", "", "Weft", "vLLM", "SGLang", "goal", "import", "kernels", "memory", "graphs")
    return [*files, PEERS], columns, rows


def _start(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ""
    start = figures["start"] if isinstance(figures["start"], list) else [figures["start"]]
    return f"{_range(start)} + import {_range(figures['import'])}"


def _range(values: Iterable[float]) -> str:
    return " to ".join(f"{value:g}" for value in values)


def prefix_table() -> Table:
    ours = {"Weft": "w5-h200", "Weft, caching off": "w5-off-h200"}
    peers = read(PEERS)["prefix_reuse_B"]
    found = {who: read(name)["results"] for who, name in ours.items()} | peers
    keys = {"cached_share": lambda v: f"{100 * v:.1f}%", "ttft_ms": shown, "total_s": shown}
    rows = [[who, *(show(figures[key]) for key, show in keys.items())] for who, figures in found.items()]
    best, target = found["Weft"], peers["goal"]
    rows[-1] = ["goal", *(
        show(target[key]) + ("" if (best[key] >= target[key]) == (key == "cached_share") else MISSED)
        for key, show in keys.items()
    )]  # fmt: skip
    columns = ("", "prompt tokens reused", "median time to first token, ms", "total, s")
    return [*ours.values(), PEERS], columns, rows


def tuned_table() -> Table:
    files, rows = [], []
    for model, base in MODELS.items():
        name = f"tuned-choice-{base}-h200"
        if found := read(name).get("results"):
            files.append(name)
            best, chosen = Counter(r["best"] for r in found), Counter(r["chosen"] for r in found)
            worst, held = max(r["excess"] for r in found), sum(r["holds"] for r in found)
            rows.append([model, str(len(found)), _counted(best), _counted(chosen), f"{100 * worst:.1f}%", str(held)])
    columns = ("", "batches", "fastest", "chosen", "most over the fastest", "within 3% or the spread of repeats")
    return files, columns, rows


def _counted(modes: Counter[str]) -> str:
    return ", ".join(f"{mode} {count}" for mode, count in modes.most_common())


def router_table() -> Table:
    name = "replica-router-cpu"
    found = read(name)
    w5 = found["router_overhead_w5"]
    what = {0.0: "new", 0.5: "half of them cached"}
    rows = [[f"{row['prompt_len']:,} tokens, {what[row['cached_share']]}", row] for row in found["router_overhead"]]
    rows.append([f"prefix reuse: {w5['prompts']} prompts of {w5['least_len']} to {w5['most_len']:,} tokens", w5])
    times = [[what, shown(row["us_per_request"]), shown(row["us_least"])] for what, row in rows]
    times[-1].append(goal(w5["us_per_request"], 100))
    return [name], ("prompt", "median, us", "least", "goal"), [[*row, ""][:4] for row in times]


LOAD = (
    ("processor time of the server per chat, us", "server_us_per_chat", 450),
    ("the same, lowest of the repeats", "lowest_server_us_per_chat", None),
    ("the same, median, with engine and client", "all_us_per_chat", None),
    ("streamed chats of 16 tokens per second", "chats_per_s", 1500),
    ("added to a token with 64 streams, p50, ms", "added_ms_p50", None),
    ("the same, p99, ms", "added_ms_p99", 3),
)


def server_load_table() -> Table:
    """The goal is held against one API process, which the second column is."""
    name, settings = "server-load-cpu", ("before", "now", "now-2")
    found, rows = read(name), []
    for what, key, target in LOAD:
        figures = [found["medians"][setting][key] for setting in settings]
        told = "" if target is None else goal(figures[1], target, least=key == "chats_per_s")
        rows.append([what, *map(shown, figures), told])
    busy = [[round(run["load_average"], 1) for run in found["runs"][setting]] for setting in settings]
    rows.append(["load average of the machine", *(_range(loads) for loads in busy), ""])
    return [name], ("median", "before", "now", "now, 2 API processes", "goal"), rows


LARGE = {
    "200k_messages": "a chat of 200,000 messages of one letter",
    "16k_messages": "a chat of 16,000 messages",
    "60k_tools": "60,000 tools",
    "1m_stops": "1 million stop strings",
    "tokenize_8mb": "`/tokenize`, 8 MB of text",
    "detokenize_1500k_ids": "`/detokenize`, 1,500,000 ids",
    "prompt_of_1500k_ids": "a prompt of 1,500,000 ids",
    "four_8mb_prompts": "four chats of 8 MB at once",
}


def large_bodies_table() -> Table:
    names = ("large-bodies-before-cpu", "large-bodies-cpu")
    before, now = (read(name).get("requests", {}) for name in names)
    rows = []
    for key, what in LARGE.items():
        pauses = [shown(found[key]["pause_ms"]) for found in (before, now)]
        health = [shown(found[key]["health_ms"]["p99"]) for found in (before, now)]
        rows.append([what, *pauses, *health])
    return list(names), ("ms", "longest pause, before", "now", "p99 of `/health`, before", "now"), rows


RANKS = {2: ("C2", "2xh200"), 4: ("C", "4xh200")}
"""By ranks: the model in the peers' file, and our run."""


def _of_ranks(
    what: str, figures: str, sizes: Sequence[int], mine: Callable[[dict[str, Any]], dict[int, tuple[float, str]]]
) -> Table:
    """Rows of Weft, the peer and the goal: ``figures`` of the peers' file, ``mine`` and cells, by size."""
    files, rows = [], []
    for ranks, (model, run) in RANKS.items():
        files.append(name := f"tensor-parallel-qwen3-next-48l-{run}")
        found, peers = mine(read(name)), read(PEERS)[figures][model]
        rows.append([str(ranks), "Weft", *(found[size][1] for size in sizes)])
        rows.append([str(ranks), "vLLM", *(given(peers["vllm"].get(str(size))) for size in sizes)])
        rows.append([str(ranks), "goal", *(goal(found[size][0], peers["goal"][str(size)]) for size in sizes)])
    return [*files, PEERS], ("GPUs", what, *(f"{size:,}" for size in sizes)), rows


def ranks_decode_table() -> Table:
    return _of_ranks("decode, ms by batch", "decode_ms", BATCHES, lambda found: {
        row["batch_size"]: (row["step_ms"], step(row)) for row in found["decode"]
    })  # fmt: skip


def ranks_first_token_table() -> Table:
    lengths = [length for length in LENGTHS if length not in (64, 256)]
    return _of_ranks("first token, ms by prompt", "first_token_ms", lengths, lambda found: {
        row["prompt_len"]: (row["first_token_ms"], shown(row["first_token_ms"])) for row in found["first_token"]
    })  # fmt: skip


def ranks_start_table() -> Table:
    warm = {2: "2xh200-warm", 4: "4xh200-warm"}
    files, rows = [], []
    for ranks, (model, cold) in RANKS.items():
        peers, target = read(PEERS)["start_s"][model], read(PEERS)["output_tokens_per_s"].get(model)
        for kind, run in (("cold", cold), ("warm", warm[ranks])):
            files.append(name := f"tensor-parallel-qwen3-next-48l-{run}")
            start = read(name)["start"]
            parts = [shown(start["stages"][stage]) for stage in ("model", "kernels", "memory", "graphs")]
            told = [_start(peers["vllm"].get(kind)), goal(start["total_s"], peers["goal"][kind])]
            rows.append([str(ranks), f"{kind} start, s", shown(start["total_s"]), *told, *parts])
        rate = read(f"tensor-parallel-qwen3-next-48l-{cold}")["throughput"]["output_tokens_per_s"]
        told = ["", ""] if target is None else [given(target["vllm"][0]), goal(rate, target["goal"], least=True)]
        rows.append([str(ranks), "256 mixed requests, output tokens/s", shown(round(rate)), *told, *[""] * 4])
    columns = ("GPUs", "", "Weft", "vLLM", "goal", "model", "kernels", "memory", "graphs")
    return [*dict.fromkeys(files), PEERS], columns, rows


def all_reduce_table() -> Table:
    sizes, files, rows = (1, 8, 32, 64, 128, 256, 512, 8192), [], []
    for ranks in RANKS:
        files.append(name := f"all-reduce-{ranks}xh200")
        found = {row["rows"]: row for row in read(name)["rows"]}
        variants = (("Weft, packed", "packed_us"), ("Weft, signalled", "fused_us"), ("NCCL and a norm", "plain_us"))
        for who, key in variants:
            if key in found[1]:
                rows.append([str(ranks), who, *(shown(found[size].get(key)) for size in sizes)])
    return files, ("GPUs", "us by rows", *(f"{size:,}" for size in sizes)), rows


HYBRIDS = {
    "Nemotron-H-8B": "nemotron-h-8b", "Granite-4.0-H-Tiny": "granite-4.0-h-tiny", "LFM2-8B-A1B": "lfm2-8b-a1b",
    "Kimi-Linear, 12 layers": "kimi-linear-12l", "Jamba-mini, 8 layers": "jamba-mini-8l", "gpt-oss-20b": "gpt-oss-20b",
}  # fmt: skip


def hybrids_table() -> Table:
    """Milliseconds and the share of the floor, where that is none below the floor."""
    names, rows = [f"engine-{model}-h200" for model in HYBRIDS.values()], []
    for who, name in zip(HYBRIDS, names, strict=True):
        steps, prompts = decode(name), first_token(name)
        found = [(step(steps[n]), steps[n]["step_ms"], steps[n]["floor_ms"]) for n in (1, 32, 128)]
        times = [(prompts[n]["first_token_ms"], prompts[n]["floor_ms"]) for n in (512, 4096)]
        found += [(shown(ms), ms, floor) for ms, floor in times]
        rows.append([who, *(cell + (f" ({floor / ms:.0%})" if floor < ms else "") for cell, ms, floor in found)])
    return names, ("ms", "decode, 1", "32", "128", "first token of 512", "of 4,096"), rows


MODELS_IN_BOTH = {
    "Llama-3.1-8B": "llama-3.1-8b", "Qwen3-8B": "qwen3-8b", "Qwen3-32B": "qwen3-32b",
    "dense hybrid of 27B": "hybrid-27b",
    "Falcon-H1-34B": "falcon-h1-34b", "Nemotron-H-8B": "nemotron-h-8b", "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "Qwen3.5-35B-A3B": "qwen3.5-35b-a3b", "Granite-4.0-H-Tiny": "granite-4.0-h-tiny", "LFM2-8B-A1B": "lfm2-8b-a1b",
}  # fmt: skip


def models_table() -> Table:
    """Milliseconds in bfloat16 and in FP8, each with the floor's share."""
    names, rows = [], []
    for who, model in MODELS_IN_BOTH.items():
        for form in ("bf16", "fp8"):
            name = f"models-{model}-{form}-h200"
            steps, prompts = decode(name), first_token(name)
            if steps:
                names.append(name)
                found = [(row["step_ms"], row["floor_ms"]) for row in steps.values()]
                found += [(row["first_token_ms"], row["floor_ms"]) for row in prompts.values()]
                cells = [f"{shown(ms)} ({floor / ms:.0%})" for ms, floor in found]
                rows.append([who, form, *cells, *["–"] * (6 - len(cells))])
    return names, ("ms", "", "decode, 1", "8", "32", "128", "first token of 512", "of 4,096"), rows


E = "engine-qwen3-next-48l-fp8-fused-h200"


def _of_e(what: str, key: str, figures: dict[int, dict[str, Any]], field: str) -> Table:
    """One row for Weft, vLLM, the goal and the floor each, of the figures of E by size."""
    peers = read(PEERS)[key]["E"]
    rows = [
        ["Weft", *(step(row) if field == "step_ms" else shown(row[field]) for row in figures.values())],
        ["vLLM", *(given(peers["vllm"][str(size)]) for size in figures)],
        ["goal", *(goal(row[field], peers["goal"][str(size)]) for size, row in figures.items())],
        ["floor", *(shown(row["floor_ms"]) for row in figures.values())],
    ]
    return [E, PEERS], (what, *(f"{size:,}" for size in figures)), rows


def e_decode_table() -> Table:
    return _of_e("decode, ms per step", "decode_ms", decode(E), "step_ms")


def e_first_token_table() -> Table:
    return _of_e("first token, ms", "first_token_ms", first_token(E), "first_token_ms")


def e_rest_table() -> Table:
    warm, starts = "startup-qwen3-next-48l-fp8-warm-h200", read(PEERS)["start_s"]["E"]
    rates = read(PEERS)["output_tokens_per_s"]["E"]
    rate = read(E)["throughput"]["output_tokens_per_s"]
    rows = [["256 mixed requests, output tokens/s", shown(rate), given(rates["vllm"][0]),
             goal(rate, rates["goal"], least=True)]]  # fmt: skip
    for kind, name in (("cold", E), ("warm", warm)):
        ready = read(name)["ready_s"]
        told = [_start(starts["vllm"].get(kind)), goal(ready, starts["goal"][kind])]
        rows.append([f"{kind} start, s", shown(ready), *told])
    return [E, warm, PEERS], ("", "Weft", "vLLM", "goal"), rows


def caches_table() -> Table:
    names = {kind: f"decode-long-context-qwen3-0.6b-{kind}-kv-h200" for kind in ("bf16", "fp8")}
    found = [read(name)["batches"] for name in names.values()]
    rows = [
        [f"{batch} requests of {row['context']:,} tokens", *(shown(batches[batch]["replay_ms"]) for batches in found)]
        for batch, row in found[0].items()
    ]
    return [*names.values()], ("ms", "bf16 cache", "FP8 cache"), rows


def beside_fp8_table() -> Table:
    names = {"bf16": "engine-qwen3-0.6b-bf16-beside-fp8-h200", "FP8": "engine-qwen3-0.6b-fp8-h200"}
    rows = []
    for who, name in names.items():
        figures = [*map(step, decode(name).values())]
        figures += [shown(row["first_token_ms"]) for row in first_token(name).values()]
        rows.append([who, *figures, shown(read(name)["throughput"]["output_tokens_per_s"])])
    columns = ("", "decode, ms, 1", "8", "32", "128", "first token, ms, 512", "8,192", "mixed requests, tokens/s")
    return [*names.values()], columns, rows


INT4 = {
    "Qwen3-Next-80B": ("engine-qwen3-next-48l-int4-h200", E),
    "dense hybrid of 27B": ("engine-hybrid-27b-int4-h200", "models-hybrid-27b-fp8-h200"),
}
"""Files of models in INT4 and in FP8."""


def int4_decode_table() -> Table:
    """Milliseconds of decode steps, beside FP8."""
    rows, batches = [], (1, 8, 32, 128)
    for who, (name, fp8) in INT4.items():
        found, older = decode(name), decode(fp8)
        rows += [
            [f"{who}, INT4", *(step(found[b]) if b in found else "" for b in batches)],
            ["floor", *(shown(found[b]["floor_ms"]) if b in found else "" for b in batches)],
            [f"{who}, FP8", *(step(older[b]) if b in older else "" for b in batches)],
        ]
    return [file for files in INT4.values() for file in files], ("ms", "1", "8", "32", "128"), rows


def int4_rest_table() -> Table:
    """First tokens of both models, beside the form that they are compared with."""
    forms = {
        "Qwen3-Next-80B, INT4": INT4["Qwen3-Next-80B"][0], "Qwen3-Next-80B, FP8": E,
        "dense hybrid of 27B, INT4": INT4["dense hybrid of 27B"][0],
        "dense hybrid of 27B, bf16": "engine-hybrid-27b-bf16-h200",
    }  # fmt: skip
    rows = []
    for form, name in forms.items():
        found = first_token(name)
        rows.append([form, *(shown(found[length]["first_token_ms"]) for length in (512, 2048, 8192))])
    return [*forms.values()], ("first token, ms", "512", "2,048", "8,192"), rows


def queue_table() -> Table:
    """Where the time of one run goes, ms."""
    names = [f"step-gaps-{base}-h200" for base in MODELS.values()]
    runs = [read(name)["results"][0] for name in names]

    def of(*kinds: str) -> list[str]:
        return [shown(round(sum(g["device_ms"] for g in run["groups"] if g["kind"] in kinds))) for run in runs]

    total = lambda key: [shown(round(run["ms"][key])) for run in runs]  # noqa: E731
    rows = [
        ["device: decode steps", *of("decode")], ["device: steps with prompts", *of("mixed", "prefill")],
        ["of both: copies of inputs and results, page tables", *total("copies_ms")],
        ["device idle between steps", *total("gap_ms")], ["host busy, in parallel with the device", *total("host_ms")],
        ["steps", *(shown(run["steps"]) for run in runs)],
    ]  # fmt: skip
    return names, ("ms", *MODELS), rows


def beyond_one_step_table() -> Table:
    """The goal is 75% of the FLOPs' floor."""
    names, lengths, rows = [], (12288, 32000), []
    for model, base in MODELS.items():
        names.append(f"first-token-long-{base}-h200")
        found = [first_token(names[-1])[n] for n in lengths]
        shares = [row["floor_ms"] / row["first_token_ms"] for row in found]
        rows.append([model, *(shown(row["first_token_ms"]) for row in found)])
        told = [f"{share:.0%}" + (MISSED if share < 0.75 else "") for share in shares]
        rows.append(["floor", *(f"{shown(row['floor_ms'])} ({share})" for row, share in zip(found, told, strict=True))])
    return names, ("ms", *(f"{n:,}" for n in lengths)), rows


def _beside_vllm(models: dict[str, str], lengths: Sequence[int], starts: Sequence[float]) -> list[list[str]]:
    """For README: rows of figures, in pairs of Weft's and vLLM's for each model of the peers' file."""
    peers, steps, prompts, rates = read(PEERS), {}, {}, {}
    for model, name in models.items():
        found = read(name)
        steps[model] = {row["batch_size"]: row["step_ms"] for row in found["decode"]}
        tokens = found.get("prefill") or found["first_token"]
        prompts[model] = {row["prompt_len"]: row["first_token_ms"] for row in tokens}
        rates[model] = found["throughput"]["output_tokens_per_s"]
    sized = [("decode at batch", ", ms per step", steps, "decode_ms", (1, 32, 128))]
    sized.append(("first token of", " prompt tokens, ms", prompts, "first_token_ms", lengths))
    rows = []
    for what, unit, ours, key, sizes in sized:
        for size in sizes:
            pairs = [(shown(ours[m][size]), given(peers[key][m]["vllm"][str(size)])) for m in models]
            rows.append([f"{what} {size:,}" + (unit if size == sizes[0] else ""), *chain(*pairs)])
    theirs = {m: " and ".join(given(v) for v in peers["output_tokens_per_s"][m]["vllm"]) for m in models}
    rows.append(["256 mixed requests, output tokens/s", *chain(*((shown(round(rates[m])), theirs[m]) for m in models))])
    cold = [f"{given(peers['start_s'][m]['vllm']['cold']['start'])} and imports" for m in models]
    return [*rows, ["start to ready, cold, s", *chain(*zip(map(shown, starts), cold, strict=True))]]


def readme_one_gpu_table() -> Table:
    starts = [read(f"startup-{base}-h200")["results"]["cold"]["total_s"] for base in MODELS.values()]
    rows = _beside_vllm(ENGINES, (128, 1024, 8192), starts)
    shares = [read("w5-h200")["results"]["cached_share"], read(PEERS)["prefix_reuse_B"]["vllm"]["cached_share"]]
    rows.insert(-1, ["prompt tokens reused, 16 conversations", "", "", *(f"{share:.1%}" for share in shares)])
    return [], ("", "Qwen3-0.6B", "vLLM", "Qwen3-Next, 12 layers", "vLLM"), rows


def readme_whole_table() -> Table:
    two = "tensor-parallel-qwen3-next-48l-2xh200"
    starts = [read(two)["start"]["total_s"], read(E)["ready_s"]]
    rows = _beside_vllm({"C2": two, "E": E}, (1024, 8192), starts)
    return [], ("", "bf16, two H200s", "vLLM", "FP8, one H200", "vLLM"), rows


DETERMINISTIC = "deterministic-h200"


def _deterministic() -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Model, and its figures without the mode and with it."""
    rows = {(row["model"], row["deterministic"]): row for row in read(DETERMINISTIC).get("rows", [])}
    return [(letter, rows[name, False], rows[name, True]) for letter, name in MODELS.items() if (name, True) in rows]


def deterministic_cost_table() -> Table:
    """Figures without the mode, and with it."""
    rows = []
    for model, plain, fixed in _deterministic():
        for what, key in (("decoding", "decode_ms"), ("first token", "first_token_ms")):
            for size, before in plain["cost"][key].items():
                after = fixed["cost"][key][size]
                rows.append([f"{model}, {what} at {int(size):,}", shown(before), shown(after)])
        before, after = (row["cost"]["queue_tokens_per_s"] for row in (plain, fixed))
        rows.append([f"{model}, tokens per second", shown(before), shown(after)])
    return [DETERMINISTIC] * bool(rows), ["model and figure", "without", "with"], rows


def deterministic_company_table() -> Table:
    """Shares of equal bits."""
    rows = []
    for model, *both in _deterministic():
        for name, row in zip(("without", "with"), both, strict=True):
            shares = [f"{row['company'][key]:.1%}" for key in ("batch_of_8", "prefix_hit", "chunks_of_256")]
            rows.append([f"{model} {name}", *shares])
    return [DETERMINISTIC] * bool(rows), ["model", "in a batch of 8", "after a prefix hit", "in chunks of 256"], rows


def deterministic_scoring_table() -> Table:
    """Generated log probabilities beside those of scoring."""
    rows = []
    for model, *both in _deterministic():
        for name, row in zip(("without", "with"), both, strict=True):
            found = row["scoring"]
            others = [f"{found[key]:.1e}" for key in ("mean_difference", "largest_difference", "kl")]
            rows.append([f"{model} {name}", f"{found['equal_share']:.1%}", *others])
    return [DETERMINISTIC] * bool(rows), ["model", "equal bits", "mean difference", "largest difference", "KL"], rows


SCORING, COUNT = "scoring-cpu", "scoring-count"


def scoring_cpu_table() -> Table:
    """Generated log probabilities beside those of both ways of scoring, without the mode and with it."""
    found = read(SCORING).get("rows", [])
    rows = []
    for plain, fixed in zip(found[::2], found[1::2], strict=True):
        pair = (plain, fixed)
        equal, forced = (", ".join(f"{row[way]['equal_share']:.1%}" for row in pair) for way in ("prompt", "forced"))
        keys = ("mean_difference", "largest_difference", "kl")
        others = [", ".join(f"{row['prompt'][key]:.1e}" for row in pair) for key in keys]
        rows.append([f"{plain['model']}, {plain['dtype']}", equal, *others, forced])
    columns = ["model, dtype", "equal bits", "mean difference", "largest difference", "KL", "equal bits, tokens fixed"]
    return [SCORING] * bool(rows), columns, rows


def scoring_count_table() -> Table:
    """Work of a decoding step as it is, and with the order of prompts in recurrent layers."""
    rows = []
    for row in read(COUNT).get("counted", []):
        steps = [f"{step['gflops']:,.2f}, {step['gflops_in_chunks']:,.2f}" for step in row["steps"].values()]
        name = row["model"].partition(".")[0]  # a version is no figure
        rows.append([name, *steps, f"{max(step['floor_ratio'] for step in row['steps'].values()):.3f}"])
    return [COUNT] * bool(rows), ["model", "1 sequence", "32", "128", "floor, at most times"], rows


TABLES: dict[str, Callable[[], Table]] = {
    "scoring-cpu": scoring_cpu_table,
    "scoring-count": scoring_count_table,
    "deterministic-cost": deterministic_cost_table,
    "deterministic-company": deterministic_company_table,
    "deterministic-scoring": deterministic_scoring_table,
    "decode": decode_table, "gains": gains_table, "first-token": first_token_table, "modes": modes_table,
    "long-prompts": long_prompts_table, "throughput": throughput_table, "start-up": startup_table,
    "prefix": prefix_table, "tuned": tuned_table, "router": router_table, "server-load": server_load_table,
    "large-bodies": large_bodies_table,
    "ranks-decode": ranks_decode_table, "ranks-first-token": ranks_first_token_table, "ranks-start": ranks_start_table,
    "all-reduce": all_reduce_table, "hybrids": hybrids_table, "models": models_table, "e-decode": e_decode_table,
    "e-first-token": e_first_token_table, "e-rest": e_rest_table, "caches": caches_table,
    "beside-fp8": beside_fp8_table, "int4-decode": int4_decode_table,
    "int4-rest": int4_rest_table, "queue": queue_table, "readme-one-gpu": readme_one_gpu_table,
    "readme-whole": readme_whole_table, "beyond-one-step": beyond_one_step_table,
}  # fmt: skip


# -- the documents ---------------------------------------------------------------------------------------------------


def rendered(table: Table) -> str:
    """Its files, if it names any, with their days, and the table."""
    files, columns, rows = table
    named = ", ".join(f"`{name}.json` ({read(name)['date'][:10]})" for name in dict.fromkeys(files))
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return (f"{named}:\n\n" if files else "\n") + "\n".join(lines) + "\n" if rows else "Not measured yet.\n"


def updated(document: str) -> str:
    """``document`` with fresh tables."""
    make = lambda name: summary() if name == "summary" else rendered(TABLES[name]())  # noqa: E731
    return BLOCK.sub(lambda found: found[1] + make(found[2]) + found[3], document)


def compared() -> list[tuple[str, str, float, list[float], float]]:
    """Figures with a goal: what, which size, our figure, the peers', the goal. Less is better: rates are negative."""
    peers, rows = read(PEERS), []
    for model, name in ENGINES.items():
        for what, key, figures, field in (
            ("decode", "decode_ms", decode(name), "step_ms"),
            ("first tokens", "first_token_ms", first_token(name), "first_token_ms"),
        ):
            theirs = peers[key][model]
            for at, row in figures.items():
                others = [theirs[who][str(at)] for who in ("vllm", "sglang")]
                rows.append((f"{what} of {model}", f"{at:,}", row[field], others, theirs["goal"][str(at)]))
        rates = peers["output_tokens_per_s"][model]
        rate = read(name)["throughput"]["output_tokens_per_s"]
        others = [-value for who in ("vllm", "sglang") for value in rates[who]]
        rows.append((f"throughput of {model}", "", -rate, others, -rates["goal"]))
        starts = read(f"startup-{MODELS[model]}-h200")["results"]
        for kind, target in peers["start_s"][model]["goal"].items():
            rows.append((f"starts of {model}", kind, starts[kind]["total_s"], [], target))
    reuse, theirs = read("w5-h200")["results"], peers["prefix_reuse_B"]
    for what, key, sign in (("hits", "cached_share", -1), ("first tokens", "ttft_ms", 1), ("total", "total_s", 1)):
        others = [sign * f[key] for who, f in theirs.items() if who != "goal"]
        rows.append((f"{what} of prefix reuse", "", sign * reuse[key], others, sign * theirs["goal"][key]))
    return rows


def summary() -> str:
    """Where Weft is behind a peer, and which goals are reached and missed."""
    behind, reached, missed = dict[str, list[str]](), dict[str, list[str]](), dict[str, list[str]]()
    for what, at, ours, others, target in compared():
        (reached if ours <= target else missed).setdefault(what, []).append(at)
        if any(other < ours - 0.001 * abs(ours) for other in others):  # theirs are rounded
            behind.setdefault(what, []).append(at)
    lines = [f"Behind vLLM or SGLang, of all that is compared in these tables: {_listed(behind) or 'nothing'}."]
    lines += [f"Goals reached: {_listed(reached)}.", f"Goals missed: {_listed(missed)}."]
    return "\n".join(f"* {line}" for line in lines) + "\n"


def _listed(found: dict[str, list[str]]) -> str:
    parts = [f"{what} at {', '.join(sizes)}" if any(sizes) else what for what, sizes in found.items()]
    return re.sub(r"at (cold|warm)(, warm)?", lambda m: m[1] + " and warm" * bool(m[2]), "; ".join(parts))


if __name__ == "__main__":
    for path in DOCUMENTS:
        path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")
