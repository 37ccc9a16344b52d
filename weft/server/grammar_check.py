"""Trial compilation of grammars in a process that can be killed.

Job: keep one worker process, give it a grammar, wait a limited time, remember the answer.
Owns: the worker. Does not know: what grammars are for.
"""

import asyncio
import os
import re
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from weft.errors import RequestError
from weft.processes.liveness import processor_s
from weft.server.errors import ApiError

TIMEOUT_S = 2.0
"""Processor time that a compilation may take. Not time by the clock: on a busy machine a small grammar may wait long
for its turn, and that is no fault of the caller's."""

_PATIENCE_S = 30.0
"""Time by the clock after which a worker is given up, whatever it used."""

_POLL_S = 0.05
_MAX_REMEMBERED = 512
_MAX_LINE = 4 << 20


class GrammarChecker:
    """Tries grammars one at a time.

    Args:
        tokenizer_path: folder with ``tokenizer.json``.
        vocab_size, eos_token_ids: of the model.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        file = str(tokenizer_path / "tokenizer.json")
        self._hello = {
            "tokenizer_file": file,
            "vocab_size": vocab_size,
            "eos_token_ids": list(eos_token_ids),
            "parent_pid": os.getpid(),
        }
        self._turn = asyncio.Lock()
        self._worker: asyncio.subprocess.Process | None = None
        self._answers: OrderedDict[str, str] = OrderedDict()

    async def check(self, grammar: str, param: str) -> None:
        """Try a grammar.

        Raises:
            RequestError: it cannot be compiled within the limits; ``param`` is to blame.
            ApiError: 503, the machine is too busy to try.
        """
        problem = self._answers.get(grammar)
        if problem is None:
            async with self._turn:
                problem = await self._ask(grammar)
            self._answers[grammar] = problem
            if len(self._answers) > _MAX_REMEMBERED:
                self._answers.popitem(last=False)
        if problem:
            raise RequestError(f"{param} cannot be used: {plain(problem)[:500]}", param)

    async def _ask(self, grammar: str) -> str:
        """Return the problem of a grammar, or an empty text. Raises ApiError as above."""
        try:
            worker = await self._running()
        except _UnfitError as error:
            return str(error)
        try:
            return await self._answer(worker, grammar)
        except _TooLongError:
            await self.close()
            return f"compiling it takes longer than {TIMEOUT_S:g} s; make it simpler"
        except TimeoutError as error:
            await self.close()
            raise _busy() from error
        except (EOFError, OSError, ValueError, msgspec.DecodeError):
            await self.close()
            return "compiling it takes too much memory; make it simpler"
        except asyncio.CancelledError:
            self._kill()  # an answer that nobody reads would be taken for the next one's
            raise

    async def _answer(self, worker: asyncio.subprocess.Process, grammar: str) -> str:
        """Raises _TooLongError, TimeoutError, or what ``_exchange`` raises."""
        answer = asyncio.ensure_future(_exchange(worker, grammar))
        used = processor_s(worker.pid)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                while not (await asyncio.wait((answer,), timeout=_POLL_S))[0]:
                    if processor_s(worker.pid) - used > TIMEOUT_S:
                        raise _TooLongError
            return answer.result()
        finally:
            answer.cancel()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "weft.server.grammar_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_LINE,
                start_new_session=True,  # a Ctrl-C in the terminal is the server's to handle
            )
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    problem = await _exchange(self._worker, self._hello)
            except (TimeoutError, EOFError, OSError) as error:
                await self.close()
                raise _busy() from error
            except asyncio.CancelledError:
                self._kill()
                raise
            if problem:
                await self.close()
                raise _UnfitError(problem)
        return self._worker

    async def close(self) -> None:
        """End the worker; the next check starts another."""
        worker = self._kill()
        if worker is not None:
            await worker.wait()

    def _kill(self) -> asyncio.subprocess.Process | None:
        worker, self._worker = self._worker, None
        if worker is not None and worker.returncode is None:
            worker.kill()
        return worker


def plain(problem: str) -> str:
    """Rewrite a message of llguidance without the grammar's source and without llguidance's notation."""
    lines = problem.strip().splitlines()
    kept = [line for line in lines if line.strip() and not re.match(r"\s*(\d+ \||\^+\s*$)", line)]
    text = " ".join(line.strip() for line in kept)
    text = re.sub(r"^at \d+\(\d+\): ", "", text).partition(" <state>")[0]
    text = text.replace("NoExtensionBias", "no text of finite length matches it")
    text = text.replace("failed to compile JSON schema: ", "the schema cannot be compiled: ")
    text = re.sub(r"Unimplemented keys: \[(.*)\]", r"these keywords are not supported: \1", text)
    reason = re.search(r"regex parse error: (.*) error: (.*)", text)
    if reason is not None:
        return f"the regular expression {reason.group(1)} is not valid: {reason.group(2)}"
    return text


class _TooLongError(Exception):
    """The worker has used up its processor time."""


class _UnfitError(Exception):
    """No grammar can be tried for this tokenizer."""


def _busy() -> ApiError:
    return ApiError(
        503,
        "the process that tries grammars does not answer; the machine may be overloaded, try again later",
        type="server_error",
        code="busy",
        retry_after_s=1,
    )


async def _exchange(worker: asyncio.subprocess.Process, question: object) -> str:
    """One line there, one back. Raises EOFError if the worker has died."""
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(msgspec.json.encode(question) + b"\n")
    await worker.stdin.drain()
    line = await worker.stdout.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the worker has died")
    return msgspec.json.decode(line, type=str)
