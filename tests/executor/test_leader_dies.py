"""The process of rank 0 is killed: the other ranks end by themselves, and leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.patience import GUARD_S
from tests.tiny import make_checkpoint

SCRIPT = """
import json, sys
from weft import LLM, SamplingParams

llm = LLM(sys.argv[1], skip_tokenizer_init=True, tensor_parallel_size=2, num_kv_pages=100)
llm.add_request([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
llm.step()
executor = llm._core._executor
print(json.dumps([executor._workers.ranks[0].pid, executor._folder.name]), flush=True)
while True:
    llm.step()
"""


def test_ranks_end_with_their_leader(tmp_path: Path) -> None:
    folder = make_checkpoint("Qwen3ForCausalLM", tmp_path / "tiny")
    shared = set(os.listdir("/dev/shm"))
    leader = subprocess.Popen([sys.executable, "-c", SCRIPT, str(folder)], stdout=subprocess.PIPE, text=True)
    assert leader.stdout is not None
    pid, store = json.loads(leader.stdout.readline())
    assert Path(f"/proc/{pid}").exists() and Path(store).exists()
    leader.kill()
    leader.wait()
    deadline = time.monotonic() + GUARD_S
    while is_alive(pid):
        assert time.monotonic() < deadline, "the rank lives on"
        time.sleep(0.05)
    assert not Path(store).exists()
    assert {name for name in os.listdir("/dev/shm") if "weft" in name} <= shared


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
