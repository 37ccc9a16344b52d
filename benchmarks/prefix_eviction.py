"""Eviction by FLOPs saved per byte against recency, over workloads, cache sizes and seeds; no model, no timing.

python benchmarks/prefix_eviction.py --seeds 0 1 2 3 4 --json benchmarks/results/prefix-eviction.json

Every figure is FLOPs saved as a share of those that an unbounded cache saves, with exact checkpoints and the geometry
of Qwen3-Next cut to 12 layers (bfloat16 states). ``cache`` is the memory as a share of what the unbounded cache holds
in the end; ``gain`` is the figure of ``flops`` over that of ``lru``, less one.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from weft.bench import report
from weft.bench.prefix import PrefixWorkload, replay
from weft.bench.prefix_workloads import MAX_TOKEN_ID, WORKLOADS
from weft.cache.spec import CacheSpec
from weft.config.checkpoint import read_checkpoint_config
from weft.config.layer_spec import CacheDtypes

MODEL = Path(__file__).parent / "configs" / "qwen3-next-12l"
SHARES = (1 / 3, 1 / 6, 1 / 12)


def compare(spec: CacheSpec, name: str, seed: int) -> list[dict[str, Any]]:
    """One row per cache size."""
    rows = replay(spec, PrefixWorkload(name, seed), MAX_TOKEN_ID, SHARES, policies=("exact",))
    saved = {(row["cache"], row["eviction"]): row["flops_saved_of_unbounded"] for row in rows}
    return [_row(name, seed, share, *(saved[round(share, 3), e] for e in ("lru", "flops"))) for share in SHARES]


def _row(name: str, seed: int, share: float, lru: float, flops: float) -> dict[str, Any]:
    gain = round(flops / lru - 1, 4) if lru else None
    return {"workload": name, "seed": seed, "cache": round(share, 3), "lru": lru, "flops": flops, "gain": gain}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per workload and cache size: medians over the seeds, and the smallest gain."""
    result = []
    for name, share in dict.fromkeys((row["workload"], row["cache"]) for row in rows):
        group = [row for row in rows if (row["workload"], row["cache"]) == (name, share)]
        gains = [row["gain"] for row in group if row["gain"] is not None]
        result.append(
            {
                "workload": name,
                "cache": share,
                "lru": round(median(row["lru"] for row in group), 4),
                "flops": round(median(row["flops"] for row in group), 4),
                "median_gain": round(median(gains), 4) if gains else None,
                "least_gain": min(gains, default=None),
            }
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], metavar="N")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    args = parser.parse_args()
    target = report.open_json(args.json)
    dtypes = CacheDtypes("bfloat16", "bfloat16", "bfloat16")
    spec = CacheSpec.from_model(read_checkpoint_config(MODEL), page_size=16, dtypes=dtypes)
    rows = [row for name in args.workloads for seed in args.seeds for row in compare(spec, name, seed)]
    found = summary(rows)
    head = {"benchmark": "prefix-eviction"} | report.provenance("cpu") | {"model": MODEL.name}
    report.write_json(target, head | {"summary": found, "results": rows})
    report.table("FLOPs saved of unbounded", tuple(found[0]), [[str(v) for v in row.values()] for row in found])


if __name__ == "__main__":
    main()
