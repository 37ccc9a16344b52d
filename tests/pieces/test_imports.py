"""An engine that uses no pieces imports nothing of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from tests.whole import takes_long

RUN = """
import json, sys
from weft import LLM, SamplingParams
folder, mode = sys.argv[1:]
with LLM(folder, skip_tokenizer_init=True, device="cpu", cuda_graph_mode=mode, max_num_seqs=2,
         max_num_batched_tokens=32) as llm:
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3
print(json.dumps(sorted(sys.modules)))
"""


@takes_long  # tests/bench/test_startup.py asks an engine without graphs
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE", "FULL_DECODE_ONLY"])
def test_pieces_and_tiers_are_imported_only_by_engines_that_use_them(tmp_path: Path, mode: str) -> None:
    folder = make_checkpoint("Qwen3NextForCausalLM", tmp_path)
    done = subprocess.run([sys.executable, "-c", RUN, str(folder), mode], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout.splitlines()[-1])
    assert not [name for name in modules if name.startswith(("weft.offload", "weft.runner.host"))]
    loaded = [name for name in modules if name.startswith("weft.pieces")]
    assert ("weft.pieces.capture" in loaded) if mode == "PIECEWISE" else loaded == []


def test_layers_ask_for_no_tracer() -> None:
    layers = Path(__file__).parents[2] / "weft/layers"
    for path in layers.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "compiling" not in text and "weft.pieces" not in text, f"{path.name} knows of pieces or tracers"
