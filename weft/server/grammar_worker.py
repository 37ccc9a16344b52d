"""The worker process that tries grammars: ``python -m weft.server.grammar_worker``, see ``worker.serve``."""

from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from weft.engine.structured_outputs import grammar_tokenizer
from weft.server.grammar_check import GrammarSetup, TryGrammar
from weft.server.worker import Result, decode, serve


class Task:
    def __init__(self, setup: bytes) -> None:
        given = decode(setup, GrammarSetup)
        self._tokenizer = grammar_tokenizer(Path(given.tokenizer_file), given.vocab_size, given.eos_token_ids)
        problem_of("start: /a*/", self._tokenizer)  # whatever is set up on first use belongs to the idle size

    def __call__(self, content: bytes, blob: bytes) -> Result:
        return problem_of(decode(content, TryGrammar).grammar, self._tokenizer), b""


def problem_of(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return the problem of a grammar, or an empty text."""
    error = LLMatcher.validate_grammar(grammar, tokenizer)
    if error and not error.startswith("WARNING"):
        return error
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher.get_error()


if __name__ == "__main__":
    serve(Task)
