"""Constrained output: which tokens each constrained request may draw next.

Job: compile grammars off the step's path, follow the tokens of each request, and give the mask of its next one.
Owns: the matchers (llguidance) and a bounded cache of compiled grammars. Does not know: logits, schedules, text.

A grammar is a text in llguidance's format. It was tried before, in a process that could be killed, so compiling it here
is known to end; llguidance's own limits hold all the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import RequestError
from weft.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 128


class Grammars:
    """Matchers of all constrained requests.

    Args:
        tokenizer_path: folder with ``tokenizer.json``.
        vocab_size: of the model; masks have that many bits.
        eos_token_ids: ids that end a text.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._matchers: dict[str, tuple[LLMatcher, int]] = {}  # with the number of tokens consumed, by request id

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

    def follow(self, request: Request, compiled: LLMatcher) -> None:
        """From now on ``request`` obeys a matcher of its own."""
        self._matchers[request.request_id] = (compiled.deep_copy(), 0)

    def update(self, request: Request) -> None:
        """Take in the request's new tokens; forget it when it has ended."""
        entry = self._matchers.get(request.request_id)
        if entry is None:
            return
        if request.finish_reason is not None:
            del self._matchers[request.request_id]
            return
        matcher, consumed = entry
        matcher.consume_tokens(request.output_token_ids[consumed:])
        self._matchers[request.request_id] = (matcher, len(request.output_token_ids))

    def forget(self, request_id: str) -> None:
        self._matchers.pop(request_id, None)

    def mask(self, request: Request) -> bytes | None:
        """Bits of the tokens that may come next, ``ceil(vocab_size / 8)`` bytes, lowest bit first; None: any token."""
        entry = self._matchers.get(request.request_id)
        if entry is None:
            return None
        matcher = entry[0]
        if matcher.is_stopped() or matcher.is_error():  # complete, or beyond a limit of llguidance: nothing but the end
            return self._only(self._eos)
        return matcher.compute_bitmask()[: (self._vocab_size + 7) // 8]

    def _only(self, token_ids: Sequence[int]) -> bytes:
        bits = bytearray((self._vocab_size + 7) // 8)
        for token in token_ids:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
