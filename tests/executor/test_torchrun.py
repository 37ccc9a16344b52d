"""``torchrun --nproc-per-node 2``: rank 0 leads, the other process follows; the tokens are those of one rank."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint
from tests.whole import takes_long
from weft import LLM, SamplingParams
from weft.config import resolve
from weft.config.parallelism import TORCHRUN
from weft.errors import ConfigError
from weft.executor import external
from weft.executor.ring import Writer
from weft.executor.worker import WorkerStart

SCRIPT = """
import sys
from weft import LLM, SamplingParams

with LLM(sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2) as llm:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate([5, 6, 7], params, use_tqdm=False)
    print(llm.config.distributed_executor_backend, output.outputs[0].token_ids)
print("the end of the script")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("Qwen3ForCausalLM", tmp_path_factory.mktemp("tiny"))


@takes_long
def test_one_script_in_two_processes(folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), str(folder)],
        capture_output=True, text=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    with LLM(str(folder), skip_tokenizer_init=True) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        want = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    assert done.stdout.splitlines() == [f"external_launcher {want}", "the end of the script"]


@pytest.mark.parametrize(
    ("world", "local", "message"),
    [
        ("4", "4", "torchrun has started 4 processes; use --nproc-per-node 2"),
        ("2", "1", "on several machines, 1 of them"),
    ],
)
def test_other_launches_are_refused(
    world: str, local: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(TORCHRUN, ("0", world, "0", local, "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    config = resolve(model=str(folder), tensor_parallel_size=2)
    assert config.distributed_executor_backend == "external_launcher"
    ring = Writer(1)
    with pytest.raises(ConfigError, match=message):
        external.lead(WorkerStart(2, config, ring.address, 1, 0.0), ring)
    ring.close()


def test_without_torchrun(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"torchrun has not started this process .*RANK, WORLD_SIZE.* use mp"):
        resolve(model=str(folder), tensor_parallel_size=2, distributed_executor_backend="external_launcher")
