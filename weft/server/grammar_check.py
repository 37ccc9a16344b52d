"""Trial compilation of grammars in worker processes.

Job: give a grammar to a worker, and remember the answer. Does not know: what grammars are for.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from weft.errors import RequestError
from weft.server.worker import decode, encode
from weft.server.worker_pool import TooSlowError, WorkerDiedError, WorkerKind, WorkerPool

TIMEOUT_S = 2.0
"""Processor time that a compilation may take."""

MEMORY_BYTES = 256 << 20

_MAX_REMEMBERED = 512


class GrammarSetup(msgspec.Struct, frozen=True):
    """The tokenizer to compile for."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]


class TryGrammar(msgspec.Struct, frozen=True):
    """Compile a grammar. The result is its problem, or an empty text."""

    grammar: str


class GrammarChecker:
    """Tries grammars.

    Args:
        tokenizer_path: folder with ``tokenizer.json``.
        vocab_size, eos_token_ids: of the model.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        setup = GrammarSetup(str(tokenizer_path / "tokenizer.json"), vocab_size, list(eos_token_ids))
        self._workers = WorkerPool(
            WorkerKind("grammars", "weft.server.grammar_worker", encode(setup), MEMORY_BYTES, TIMEOUT_S, small=0)
        )
        self._answers: OrderedDict[str, str] = OrderedDict()

    async def check(self, grammar: str, param: str) -> None:
        """Try a grammar.

        Raises:
            RequestError: it cannot be compiled within the limits; ``param`` is to blame.
            ApiError: 503, the machine is too busy to try.
        """
        problem = self._answers.get(grammar)
        if problem is None:
            problem = self._answers[grammar] = await self._ask(grammar)
            if len(self._answers) > _MAX_REMEMBERED:
                self._answers.popitem(last=False)
        if problem:
            raise RequestError(f"{param} cannot be used: {plain(problem)[:500]}", param)

    async def _ask(self, grammar: str) -> str:
        """Return the problem of a grammar, or an empty text. Raises ApiError as above."""
        try:
            content, _ = await self._workers.run(TryGrammar(grammar))
        except TooSlowError:
            return f"compiling it takes longer than {TIMEOUT_S:g} s; make it simpler"
        except WorkerDiedError:
            return "compiling it takes too much memory; make it simpler"
        except RequestError as error:  # no grammar can be tried for this tokenizer
            return str(error)
        return decode(content, str)

    def close(self) -> None:
        self._workers.close()


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
