"""Compiling grammars off the step's path.

Job: one thread that compiles, and a bounded cache of what it compiled. Owns: llguidance's tokenizer and compiled
grammars. Does not know: requests.

A grammar is a text in llguidance's format. The server tried it before, in a process that could be killed, so compiling
it here is known to end; llguidance's own limits hold all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 128


class GrammarCompiler:
    """See ``Grammars`` for the arguments."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Begin to compile, or find it done. The future raises RequestError for a grammar that does not compile."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher, LLTokenizer

        if self._tokenizer is None:
            file = str(self._tokenizer_path / "tokenizer.json")
            self._tokenizer = LLTokenizer(file, n_vocab=self._vocab_size, eos_token=self._eos)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar does not compile: {matcher.get_error()[:500]}")
        return matcher

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
