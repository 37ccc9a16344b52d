"""A worker process whose tasks are told what to do: ``python -m tests.server.task_worker``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from weft.errors import ContextLengthError, RequestError
from weft.server.worker import Result, decode, serve


class Do(msgspec.Struct):
    """One task."""

    what: str
    path: str = ""
    seconds: float = 0.0


def make(setup: bytes) -> object:
    if setup == b"broken":
        raise RequestError("no tokenizer", "model")

    def run(content: bytes, blob: bytes) -> Result:
        task = decode(content, Do)
        match task.what:
            case "echo":
                return [setup.decode(), len(blob), os.getpid()], b"x" * 3_000_000
            case "spin":
                while True:
                    pass
            case "fill":
                return len([bytes(1 << 20) for _ in range(1 << 12)]), b""
            case "leave":
                os._exit(3)
            case "refuse":
                raise RequestError("m", "p")
            case "too long":
                raise ContextLengthError("m", "p")
            case "break":
                raise KeyError("x")
        with Path(task.path).open("a") as file:
            file.write(f"{task.what}\n")
        time.sleep(task.seconds)
        return None, b""

    return run


if __name__ == "__main__":
    serve(make)  # type: ignore[arg-type]
