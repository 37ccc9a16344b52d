"""Real server processes for tests: started on a free port, watched, and ended."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from tests.patience import GUARD_S, stretched

ROOT = Path(__file__).parent.parent.parent
START_LIMIT_S = GUARD_S


class RunningServer:
    """A server process. ``module``: what ``python -m`` runs, with the flags of ``weft serve``."""

    def __init__(self, *flags: str, module: str = "tests.server.fake_server", **environment: str) -> None:
        command = [sys.executable, "-m", module, "--port", "0", *flags]
        if module == "weft":
            command.insert(3, "serve")
        env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env)
        self.log: list[str] = []
        self._urls: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @functools.cached_property
    def url(self) -> str:
        """The server's address, once it answers."""
        return self._urls.get(timeout=START_LIMIT_S)

    @functools.cached_property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=GUARD_S)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            found = re.search(r'weft \S+: (http://[^\s"]+)', line)
            if found:
                self._urls.put(found.group(1))

    def wait_ready(self) -> RunningServer:
        wait_until(lambda: self.client.get("/ready").status_code == 200, START_LIMIT_S, pause_s=0.05)
        return self

    @property
    def engine_pid(self) -> int:
        """The child that is the engine; others try grammars, read large bodies, or answer calls."""
        engines = [pid for pid, what in self._children if "engine" in what]
        assert len(engines) == 1
        return engines[0]

    @property
    def api_pids(self) -> list[int]:
        """The API processes, of a server with several."""
        return [pid for pid, what in self._children if "api_process" in what]

    @property
    def _children(self) -> list[tuple[int, str]]:
        """Pid and command line of each."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [(int(pid), Path(f"/proc/{pid}/cmdline").read_text()) for pid in pids]

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json=chat_body(text, **fields))

    def stop(self) -> int:
        """SIGTERM and wait. Returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(GUARD_S)

    def close(self) -> None:
        if "client" in vars(self):
            self.client.close()
        for end in (self.process.terminate, self.process.terminate, self.process.kill):
            if self.process.poll() is None:
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(stretched(3))


def chat_body(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **fields}


def wait_until(condition: Any, limit_s: float, *, pause_s: float = 0.01) -> float:
    """Ask every ``pause_s`` whether ``condition()`` holds. Returns the seconds it took. ``limit_s``: if nothing else
    runs."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < stretched(limit_s), f"not within {limit_s} s, or as much longer as is fair"
        time.sleep(pause_s)
    return time.monotonic() - start


def is_alive(pid: int) -> bool:
    """True if the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
