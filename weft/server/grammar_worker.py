"""The process for trial compilation of grammars: ``python -m weft.server.grammar_worker``.

The process may be killed at any time. Its memory is limited to its idle size plus a fixed amount.

One JSON line in, one out. First a ``Hello``, then one grammar per line; the answers are ``""`` or what is wrong. If
something is wrong with the tokenizer, it ends.
"""

import resource
import sys
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLTokenizer

from weft.engine.structured_outputs import grammar_tokenizer
from weft.errors import RequestError
from weft.processes.lifeline import die_with_parent

EXTRA_BYTES = 256 << 20
"""Memory that a compilation may take."""


class Hello(msgspec.Struct, frozen=True):
    """The tokenizer to compile for, and whose child this is."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]
    parent_pid: int


def main() -> None:
    hello = msgspec.json.decode(sys.stdin.buffer.readline(), type=Hello)
    die_with_parent(hello.parent_pid)
    try:
        tokenizer = grammar_tokenizer(Path(hello.tokenizer_file), hello.vocab_size, hello.eos_token_ids)
    except RequestError as error:
        print(msgspec.json.encode(str(error)).decode(), flush=True)
        return
    _try("start: /a*/", tokenizer)  # whatever is set up on first use belongs to the idle size
    limit = _virtual_bytes() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    print('""', flush=True)
    for line in sys.stdin.buffer:
        print(msgspec.json.encode(_try(msgspec.json.decode(line, type=str), tokenizer)).decode(), flush=True)


def _try(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return the problem of a grammar, or an empty text."""
    error = LLMatcher.validate_grammar(grammar, tokenizer)
    if error and not error.startswith("WARNING"):
        return error
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
