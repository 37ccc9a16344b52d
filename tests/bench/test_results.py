"""Result files say what measured them: command, device, versions, date, and the commit since it is recorded.

``LOST_SCRIPT`` and ``LACKING`` name files that are older than this test. They stay as the record of trials in the log.
The lists may only shrink: remove a name when its file is removed or measured again, and never add one.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
FILES = sorted(RESULTS.glob("*.json"))
FOLDERS = ("benchmarks", "demo", "docs", "tests", "weft")
SCRIPTS = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}

PRESENT = (
    "README.md", *(f"docs/{name}.md" for name in (
        "architecture", "cuda-graphs", "images", "kernels", "parallelism", "performance", "prefix-cache",
        "quantization", "serving", "speculation",
    )),
)  # fmt: skip
"""Documents of present figures. Decisions and the log tell what was once measured."""

COMMIT_SINCE = "2026-11-23T23"
"""The hour from which a measurement must record its commit."""

# fmt: off
LOST_SCRIPT = frozenset("""
all-reduce-trials-2xh200.json
batch-layout-trials-cpu.json
compile-times-cpu.json
decode-ablation-qwen3-0.6b-h200.json
decode-attention-tables-qwen3-0.6b-fp8-h200.json
decode-attention-tables-qwen3-0.6b-h200.json
decode-attention-tables-qwen3-next-12l-h200.json
decode-experts-sum-trials-h200.json
decode-experts-sum-trials-share-2-h200.json
decode-experts-trials-share-2-h200.json
decode-fp8-cache-qwen3-0.6b-h200.json
decode-fp8-cache-trials-qwen3-0.6b-h200.json
decode-fp8-lanes-qwen3-0.6b-h200.json
decode-fp8-lanes-qwen3-next-12l-h200.json
decode-fp8-very-few-rows-qwen3-0.6b-h200.json
decode-fp8-very-few-rows-qwen3-next-12l-h200.json
decode-fusion-qwen3-0.6b-h200.json
decode-fusion-qwen3-next-12l-h200.json
decode-grid-programs-qwen3-0.6b-h200.json
decode-half-batches-first-qwen3-0.6b-h200.json
decode-half-batches-qwen3-0.6b-h200.json
decode-mixed-lengths-qwen3-0.6b-h200.json
decode-padding-lanes-qwen3-0.6b-h200.json
decode-releases-qwen3-0.6b-h200.json
decode-releases-qwen3-next-12l-h200.json
decode-split-rules-mixed-qwen3-0.6b-h200.json
decode-split-rules-qwen3-0.6b-h200.json
decode-splits-qwen3-0.6b-h200.json
decode-sums-again-qwen3-next-12l-fp8-h200.json
decode-sums-more-qwen3-0.6b-fp8-h200.json
decode-sums-more-qwen3-0.6b-h200.json
decode-sums-more-qwen3-next-12l-h200.json
decode-sums-over-ranks-qwen3-next-12l-2xh200.json
decode-sums-over-ranks-releases-qwen3-next-12l-2xh200.json
decode-sums-qwen3-0.6b-fp8-h200.json
decode-sums-qwen3-0.6b-h200.json
decode-sums-qwen3-next-12l-fp8-h200.json
decode-sums-qwen3-next-12l-h200.json
decode-tiles-of-256-qwen3-next-4l-h200.json
decode-trials-qwen3-0.6b-h200.json
decode-weights-asked-for-qwen3-0.6b-h200.json
first-token-parts-qwen3-0.6b-h200.json
first-token-passes-cpu.json
fp8-very-few-rows-trials-qwen3-0.6b-h200.json
fp8-very-few-rows-trials-qwen3-next-12l-h200.json
gdn-decode-hints-h200.json
gdn-decode-states-h200.json
gdn-decode-tiles-h200.json
gdn-scan-early-h200.json
gdn-verify-two-launches-h200.json
gdn-walk-late-h200.json
gdn-walk-split-h200.json
gluon-registers-cpu.json
host-launch-cpu.json
kda-decode-early-h200.json
kda-first-kernels-h200.json
kda-scan-hopper-h200.json
kernels-decode-fp8-cache-h200.json
kernels-gdn-decode-trials-h200.json
kernels-gdn-decode-two-launches-h200.json
kernels-gdn-products-trials-h200.json
kernels-gdn-scan-hopper-h200.json
kernels-gdn-scan-trials-h200.json
kernels-moe-grouping-h200.json
kernels-moe-many-trials-h200.json
kernels-moe-spans-h200.json
kernels-moe-spans-kept-h200.json
kernels-moe-trials-h200.json
kernels-prefill-fp8-cache-h200.json
library-workspaces-h200.json
linear-scan-h200.json
multicast-trials-h200.json
peers-h200.json
persistent-step-qwen3-0.6b-h200.json
prefill-conv-tiles-h200.json
prefill-fp8-cache-qwen3-0.6b-h200.json
prefill-moe-trials-h200.json
prefill-parts-exchanged-h200.json
prefill-parts-first-qwen3-0.6b-h200.json
prefill-parts-mixed-h200.json
prefill-profile-qwen3-next-12l-share-2-h200.json
prefill-profile-qwen3-next-12l-share-4-h200.json
prefill-shared-rows-qwen3-0.6b-h200.json
prefill-timeline-qwen3-0.6b-h200.json
prefill-timelines-h200.json
prefill-trials-h200.json
recurrent-trials-h200.json
sampling-relative-scores-h200.json
sampling-trials-h200.json
second-stream-qwen3-next-12l-h200.json
selective-scan-gluon-h200.json
selective-scan-trials-h200.json
start-compiled-twice-cpu.json
start-import-trials-h200.json
start-imports-h200.json
start-timeline-qwen3-0.6b-h200.json
start-trials-qwen3-0.6b-h200.json
start-trials-warm-qwen3-0.6b-h200.json
startup-trials-qwen3-0.6b-h200.json
step-copies-h200.json
step-gaps-mixed-graph-qwen3-0.6b-h200.json
step-results-qwen3-0.6b-h200.json
step-results-qwen3-next-12l-h200.json
verification-releases-qwen3-0.6b-h200.json
w1-variants-qwen3-0.6b-h200.json
""".split())
# fmt: on
"""Results of trials whose script was removed with the trial, and the figures of other engines (``peers-h200.json``)."""

LACKING = {
    "step-tuner-mamba-2-h200.json": {"command", "date"},
    "step-tuner-qwen3-0.6b-h200.json": {"command", "date"},
    "step-tuner-qwen3-next-12l-fp8-few-rows-h200.json": {"command", "date"},
    "step-tuner-qwen3-next-12l-fp8-h200.json": {"command", "date"},
    "step-tuner-qwen3-next-12l-fp8-more-rows-h200.json": {"command", "date"},
    "step-tuner-qwen3-next-12l-h200.json": {"command", "date"},
    "step-tuner-qwen3-next-12l-share-2-h200.json": {"command", "date"},
    "triton-versions-qwen3-next-12l-h200.json": {"versions"},
}
"""Keys that files lack. The tuner did not write its keys then. A comparison of versions stores versions by run."""


def _read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _command(found: dict[str, Any]) -> str:
    command = found.get("command") or found.get("commands") or ""
    return command if isinstance(command, str) else json.dumps(command)


def _script_exists(command: str) -> bool:
    """Whether a command runs Weft itself, or a script or a module of the repository."""
    if "not kept" in command:
        return False
    if module := re.search(r"-m ([\w.]+)", command):
        path = ROOT / module[1].replace(".", "/")
        return path.with_suffix(".py").exists() or path.is_dir()
    script = re.search(r"[\w./-]+\.py\b", command)
    if script is None or script[0] == "__main__.py":
        return re.search(r"(^|\W)(weft|__main__\.py|-c) (bench|eval)\b", command) is not None
    return (ROOT / script[0]).exists() if "/" in script[0] else script[0] in SCRIPTS


def _lacking(found: dict[str, Any]) -> set[str]:
    has = {"device": found.get("device") or found.get("processor"), "versions": found.get("versions")}
    has |= {"date": re.match(r"\d{4}-\d\d-\d\d", str(found.get("date"))), "command": _command(found)}
    if found.get("date", "") >= COMMIT_SINCE:
        has["commit"] = found.get("commit")
    return {key for key, value in has.items() if not value}


def test_results_say_what_measured_them() -> None:
    lacking, lost = {}, {}
    for file in FILES:
        found = _read(file.name)
        if names := _lacking(found):
            lacking[file.name] = names
        if (command := _command(found)) and not _script_exists(command):
            lost[file.name] = command
    assert lacking == LACKING
    assert lost.keys() == LOST_SCRIPT, lost


def test_no_result_holds_the_path_of_a_machine() -> None:
    """Models are named from the root of the repository."""
    placed = re.compile(r'"/[^"]*/(benchmarks|tests|weft)/')
    assert [file.name for file in FILES if placed.search(file.read_text(encoding="utf-8"))] == []


def test_the_lists_name_files_that_exist() -> None:
    assert {*LOST_SCRIPT, *LACKING} <= {file.name for file in FILES}
    assert len(LOST_SCRIPT) <= 105 and len(LACKING) <= 8  # both lists may only shrink


@pytest.mark.parametrize("document", PRESENT)
def test_present_figures_rest_on_scripts_that_exist(document: str) -> None:
    """Except those of other engines, whose interfaces ran without a script of the repository."""
    named = set(re.findall(r"[\w*.-]+\.json", (ROOT / document).read_text(encoding="utf-8")))
    named = {name for name in named if not name.startswith("*")}
    lost = LOST_SCRIPT - {"peers-h200.json"} | LACKING.keys() - {"triton-versions-qwen3-next-12l-h200.json"}
    assert [name for name in lost if any(fnmatchcase(name, pattern) for pattern in named)] == []


def test_a_lost_script_is_noticed() -> None:
    for command in (
        "weft bench latency --model m", "python -m weft eval", "__main__.py bench prefix",
        "python -m benchmarks.vision -x", "python benchmarks/gpu_report.py --model m", "vision.py --json a",
        "env A=1 python -m tests.server.fuzz",
    ):  # fmt: skip
        assert _script_exists(command), command
    for command in ("trial.py", "not kept: vision.py", "python -m benchmarks.gone", "python benchmarks/no.py", "x"):
        assert not _script_exists(command), command
    assert _lacking({"date": "2026-12-01"}) == {"device", "versions", "command", "commit"}


@pytest.mark.parametrize("script", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_a_script_that_writes_results_records_its_origin(script: Path) -> None:
    """And writes neither command nor commit of its own beside it."""
    text = script.read_text(encoding="utf-8")
    if "write_json(" in text or ('"--json"' in text and script.name != "gpu_tables.py"):  # that one runs the others
        assert re.search(r"report\.(provenance|origin)\(|dummy_engine\.head\(|import .*\bwrite_json\b", text)
    assert '"command":' not in text and '"commit":' not in text
