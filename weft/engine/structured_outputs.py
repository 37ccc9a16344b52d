"""Structured outputs: from a request's parameters to one grammar in llguidance's format.

The offline interface and the server use it. ``grammars.py`` compiles grammars.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import RequestError
from weft.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLTokenizer


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint. ``rules``: a lark grammar that begins at ``answer``. ``param``: the field of the constraint."""

    rules: str
    param: str

    def grammar(self, end_of_reasoning: str | None = None) -> str:
        """Make the whole grammar. ``end_of_reasoning``: the symbol that ends reasoning which the prompt has opened. The
        reasoning comes first and is unconstrained."""
        if end_of_reasoning is None:
            return f"start: answer\n{self.rules}"
        return f"start: reasoning {end_of_reasoning} /\\s*/ answer\nreasoning: /(.|\\n)*/\n{self.rules}"


@dataclass(frozen=True, slots=True)
class WholeGrammar:
    """A complete lark grammar from the caller."""

    rules: str
    param: str

    def grammar(self, end_of_reasoning: str | None = None) -> str:
        """Return the grammar. Raises RequestError after opened reasoning, since two grammars cannot be concatenated."""
        if end_of_reasoning is not None:
            raise RequestError(
                "a grammar cannot follow reasoning; set chat_template_kwargs={'enable_thinking': false}", self.param
            )
        return self.rules


def constraint_of_params(given: StructuredOutputsParams) -> Constraint | WholeGrammar:
    """Make the constraint of the parameters. Raises RequestError if their content makes no grammar."""
    param = "structured_outputs"
    if given.json is not None:
        return json_schema(given.json, param)
    if given.regex is not None:
        return regex(given.regex, param)
    if given.choice is not None:
        return choice(given.choice, param)
    if given.grammar is not None:
        return whole_grammar(given.grammar, param)
    return json_schema({"type": "object"}, param)


def json_schema(schema: Any, param: str) -> Constraint:
    """Parse ``schema``, a JSON schema or its text. Raises RequestError for anything else."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not a JSON schema: {error}", param) from error
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{param} is not a JSON schema: it must be an object", param)
    try:
        return Constraint(f"answer: {json_rule(schema)}", param)
    except RecursionError as error:
        raise RequestError(f"{param} is nested too deeply", param) from error
    except TypeError as error:
        raise RequestError(f"{param} is not a JSON schema: {error}", param) from error


def json_rule(schema: dict[str, Any] | bool) -> str:
    """Make a rule for JSON. White space is limited to that of pretty printing, since small models might never stop
    otherwise."""
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": "\\n? {0,16}"}} | schema
    return f"%json {json.dumps(schema)}"


def regex(pattern: str, param: str) -> Constraint:
    """Make a rule from a regular expression in the syntax of Rust's regex crate, without look-around."""
    if not pattern or "\n" in pattern:
        raise RequestError(f"{param} must be a non-empty expression on one line (write \\n for a line break)", param)
    escaped = re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern)
    return Constraint(f"answer: /{escaped}/", param)


def choice(options: Sequence[str], param: str) -> Constraint:
    """Make a rule that allows one of these texts."""
    if not options or not all(options):
        raise RequestError(f"{param} needs at least one option, and none of them empty", param)
    return Constraint("answer: " + " | ".join(json.dumps(option) for option in options), param)


MAX_GBNF = 1 << 12
"""Most characters of a GBNF grammar that is converted, which takes up to 50 ms."""


def whole_grammar(grammar: str, param: str) -> WholeGrammar:
    """Make a constraint of a grammar in Lark's syntax, or in llama.cpp's GBNF (``root ::= ...``), which is converted.

    Raises:
        RequestError: llguidance cannot convert it.
    """
    if "::=" not in grammar or re.search(r"(?m)^\s*(%llguidance\b|start\s*:[^:])", grammar):
        return WholeGrammar(grammar, param)
    if len(grammar) > MAX_GBNF:
        raise RequestError(
            f"{param} is a GBNF grammar of {len(grammar):,} characters; up to {MAX_GBNF:,} are converted: write it in "
            "Lark's syntax, with a rule 'start: ...'",
            param,
        )
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        return WholeGrammar(gbnf_to_lark(grammar), param)
    except ImportError as error:
        raise RequestError(f"{param} needs llguidance; install it with: pip install 'weft[server]'", param) from error
    except (Exception, RecursionError) as error:  # the converter raises anything
        raise RequestError(
            f"{param} cannot be converted from GBNF ({str(error)[:200]}); write it in Lark's syntax, with a rule "
            "'start: ...'",
            param,
        ) from error


def grammar_tokenizer(file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read ``tokenizer.json`` with llguidance. Raises RequestError if that fails, or if no token ends a text."""
    from llguidance import LLTokenizer

    if not eos_token_ids:
        raise RequestError(
            "a constraint needs a token that ends the text, and this checkpoint names none; add eos_token_id to its "
            "generation_config.json"
        )
    try:
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    except Exception as error:
        raise RequestError(f"llguidance cannot read {file} ({error}); constraints need another checkpoint") from error


def check_grammar(grammar: str, param: str) -> None:
    """Raise RequestError if llguidance is missing, or refuses the grammar."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise RequestError(f"{param} needs llguidance; install it with: pip install 'weft[server]'", param) from error
    problem = LLMatcher.validate_grammar(grammar, None)
    if problem and not problem.startswith("WARNING"):
        raise RequestError(f"{param} cannot be used: {problem[:500]}", param)
