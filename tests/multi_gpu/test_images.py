"""Images on several GPUs: every rank encodes them, and the tokens are transformers'.

``python -m tests.multi_gpu.test_images ARCHITECTURE FOLDER RANKS MODE`` prints the tokens of one engine as JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.media import (
    GLM,
    HYBRID_MOE,
    INDEXED,
    INKLING,
    INKLING2,
    VL,
    Engine,
    Prompt,
    make_vision_checkpoint,
    reference_logits,
)

pytestmark = pytest.mark.multi_gpu


def prompts_of(arch: str) -> list[Prompt]:
    empty = Prompt.of(arch)
    return [
        empty.text(5).image(4, 6, 1).text(7),
        empty.text(3).image(2, 10, 3).image(6, 4, 4).text(2).video(3, 2, 4, 5),
        empty.text(30),
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize(
    ("arch", "mode"),
    [(HYBRID_MOE, "NONE"), *((arch, "FULL") for arch in (VL, INDEXED, GLM, INKLING2, INKLING))],
)
def test_two_ranks_with_images(arch: str, mode: str, tmp_path: Path) -> None:
    folder, reference = make_vision_checkpoint(arch, tmp_path)
    command = [sys.executable, "-m", "tests.multi_gpu.test_images", arch, str(folder), "2", mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr[-3000:]
    outputs = json.loads(done.stdout.splitlines()[-1])
    for prompt, output in zip(prompts_of(arch), outputs, strict=True):
        tokens = prompt.token_ids + output
        logits = reference_logits(reference.double(), tokens, prompt.media)[len(prompt.token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == output


def main(arch: str, folder: str, ranks: str, mode: str) -> None:
    torch.set_float32_matmul_precision("highest")
    engine = Engine(Path(folder), dtype="float32", tensor_parallel_size=int(ranks), cuda_graph_mode=mode,
                    max_model_len=200, max_num_batched_tokens=16, max_num_seqs=4)  # fmt: skip
    print(json.dumps([request.output_token_ids for request in engine.run(*prompts_of(arch), max_tokens=6)]))
    engine.core.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
