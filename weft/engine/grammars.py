"""Constrained output: the tokens that each constrained request may sample next.

Job: compile grammars in a thread, hold back a request until its grammar is compiled, follow its tokens, and compute the
masks of its next token and of the tokens after its drafts. Owns: compiled grammars and the matchers (llguidance) of all
constrained requests. Does not know: logits, schedules, text.

A grammar is a text in llguidance's format. The server has compiled the grammar before, in a process that could be
killed, so compiling terminates here. llguidance's own limits apply as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.structured_outputs import grammar_tokenizer
from weft.errors import RequestError
from weft.messages import ScheduledRequest
from weft.request import Request

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED = 128

_COMPILE_POLL_S = 0.01


class GrammarCompiler:
    """A thread that compiles grammars, and a bounded cache of compiled ones. Arguments as for ``Grammars``."""

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def compile(self, grammar: str) -> Future[LLMatcher]:
        """Start to compile a grammar, or return the cached one. The future raises RequestError for an invalid
        grammar."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return self._compiled[grammar]
        future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
        if len(self._compiled) > MAX_CACHED:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(self._tokenizer_path / "tokenizer.json", self._vocab_size, self._eos)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar does not compile: {matcher.get_error()[:500]}")
        return matcher

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Grammars:
    """Matchers of all constrained requests.

    Args:
        tokenizer_path: folder with ``tokenizer.json``.
        vocab_size: size of the model's vocabulary, and number of bits in a mask.
        eos_token_ids: ids that end a text.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._compiler = GrammarCompiler(tokenizer_path, vocab_size, eos_token_ids)
        self._compiling: dict[str, tuple[Request, Future[LLMatcher]]] = {}  # by request id
        self._matchers: dict[str, tuple[LLMatcher, int]] = {}  # and the number of tokens consumed, by request id

    def add(self, request: Request) -> None:
        """Start to compile the grammar of ``request``. ``compiled`` returns the request afterwards."""
        assert request.sampling.grammar is not None
        self._compiling[request.request_id] = (request, self._compiler.compile(request.sampling.grammar))

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def requests(self) -> list[Request]:
        """The requests that wait for their grammar."""
        return [request for request, _ in self._compiling.values()]

    def compiled(self, *, may_wait: bool) -> list[tuple[Request, BaseException | None]]:
        """Return requests whose compilation ended, each with the error of an invalid grammar or None.

        Args:
            may_wait: wait a moment for the compiler, since nothing else is to be done. (A request may be aborted
                meanwhile.)
        """
        if self._compiling and may_wait:
            wait([future for _, future in self._compiling.values()], _COMPILE_POLL_S, FIRST_COMPLETED)
        done = [entry for entry in self._compiling.values() if entry[1].done()]
        for request, future in done:
            del self._compiling[request.request_id]
            if future.exception() is None:
                self._matchers[request.request_id] = (future.result().deep_copy(), 0)
        return [(request, future.exception()) for request, future in done]

    def drop(self) -> list[Request]:
        """Drop all matchers. Returns the requests that waited for their grammar."""
        waiting = self.requests
        self._compiling.clear()
        self._matchers.clear()
        return waiting

    def cancel(self, request_id: str) -> Request | None:
        """Drop a request that ended from outside. Returns the request if it waited for its grammar."""
        self._matchers.pop(request_id, None)
        request, _ = self._compiling.pop(request_id, (None, None))
        return request

    def update(self, requests: Iterable[Request]) -> None:
        """Consume the new tokens of constrained requests, and drop those that have ended."""
        for request in requests if self._matchers else ():
            entry = self._matchers.get(request.request_id)
            if entry is None:
                continue
            if request.finish_reason is not None:
                del self._matchers[request.request_id]
                continue
            matcher, consumed = entry
            matcher.consume_tokens(request.output_token_ids[consumed:])
            self._matchers[request.request_id] = (matcher, len(request.output_token_ids))

    def masks(
        self, sampling: Iterable[tuple[int, Request]], scheduled: Sequence[ScheduledRequest]
    ) -> dict[int, list[bytes]]:
        """The masks of constrained requests by row: for the next token, and for the token after each scheduled
        draft."""
        if not self._matchers:
            return {}
        drafts = {request.row: request.draft_token_ids for request in scheduled}
        masks = ((row, self.masks_after(request, drafts.get(row, ()))) for row, request in sampling)
        return {row: found for row, found in masks if found}

    def masks_after(self, request: Request, drafts: Sequence[int]) -> list[bytes]:
        """The masks of one request's next token and of the token after each of ``drafts``; empty if every token is
        allowed. A draft that the grammar forbids is never accepted, so the masks after it do not matter."""
        entry = self._matchers.get(request.request_id)
        if entry is None:
            return []
        matcher = entry[0]
        masks, consumed = [self._mask(matcher)], 0
        for draft in drafts:
            allowed = masks[-1][draft // 8] >> draft % 8 & 1 if 0 <= draft < self._vocab_size else 0
            if draft in self._eos or not allowed or not matcher.consume_token(draft):
                break
            consumed += 1
            masks.append(self._mask(matcher))
        masks += [masks[-1]] * (1 + len(drafts) - len(masks))
        if consumed:
            matcher.rollback(consumed)
        return masks

    def _mask(self, matcher: LLMatcher) -> bytes:
        """The tokens that may come next, as ``ceil(vocab_size / 8)`` bytes, lowest bit first."""
        if matcher.is_stopped() or matcher.is_error():  # nothing but an end may follow
            return self._only(self._eos)
        return matcher.compute_bitmask()[: (self._vocab_size + 7) // 8]

    def _only(self, token_ids: Sequence[int]) -> bytes:
        bits = bytearray((self._vocab_size + 7) // 8)
        for token in token_ids:
            bits[token // 8] |= 1 << token % 8
        return bytes(bits)

    def close(self) -> None:
        self._compiler.close()
