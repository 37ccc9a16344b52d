"""What constrains an output: from the fields of a request to one grammar.

Job: ``response_format``, ``structured_outputs``, the older ``guided_*`` fields and forced tool calls, each as a text in
llguidance's format. Owns: the rule of one constraint per request, and sizes. Does not know: how grammars are compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.errors import RequestError
from weft.server.answers import CALL, END_CALL, END_THINK
from weft.server.protocol import SamplingFields, StructuredOutputs
from weft.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Constraint:
    """``rules``: a lark grammar that begins at ``answer``; ``param``: the field it came from."""

    rules: str
    param: str

    def grammar(self, tokenizer: Tokenizer, *, in_reasoning: bool) -> str:
        """The whole grammar; reasoning that the prompt has opened comes first, unconstrained."""
        if not in_reasoning:
            return f"start: answer\n{self.rules}"
        end = symbol(tokenizer, END_THINK)
        return f"start: reasoning {end} /\\s*/ answer\nreasoning: /(.|\\n)*/\n{self.rules}"


@dataclass(frozen=True, slots=True)
class WholeGrammar:
    """A lark grammar of the caller's own."""

    rules: str
    param: str

    def grammar(self, tokenizer: Tokenizer, *, in_reasoning: bool) -> str:
        """Raises RequestError after opened reasoning: two grammars cannot be put in a row."""
        if in_reasoning:
            raise RequestError(
                "a grammar cannot follow reasoning; set chat_template_kwargs={'enable_thinking': false}", self.param
            )
        return self.rules


_Constrains = TypeVar("_Constrains", bound=Constraint | WholeGrammar)


def constraint_of(request: SamplingFields, max_bytes: int) -> Constraint | WholeGrammar | None:
    """The one constraint of a request, or None.

    Raises:
        RequestError: more than one, too large, or contradicted by ``min_tokens`` or ``ignore_eos``.
    """
    found = [*_response_format(request), *_structured(request.structured_outputs, "structured_outputs.")]
    found += _guided(request)
    if not found:
        return None
    if len(found) > 1:
        raise RequestError(f"{found[0].param} and {found[1].param} exclude each other; give one", found[1].param)
    constraint = found[0]
    _limited(constraint, max_bytes)
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise RequestError(f"{name} contradicts {constraint.param}, which decides where the text ends", name)
    return constraint


def _limited(constraint: _Constrains, max_bytes: int) -> _Constrains:
    """The constraint. Raises RequestError if it is too large."""
    size = len(constraint.rules.encode("utf-8", "replace"))
    if size > max_bytes:
        raise RequestError(f"{constraint.param} has {size:,} bytes; this server takes {max_bytes:,}", constraint.param)
    return constraint


def _response_format(request: SamplingFields) -> list[Constraint | WholeGrammar]:
    given = request.response_format
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [json_schema({"type": "object"}, "response_format")]
    if given.type == "json_schema":
        schema = (given.json_schema or {}).get("schema")
        if schema is None:
            raise RequestError("response_format.json_schema.schema is missing", "response_format")
        return [json_schema(schema, "response_format")]
    raise RequestError(
        f"response_format.type={given.type[:40]!r} is not known; allowed: text, json_object, json_schema",
        "response_format",
    )


def _structured(given: StructuredOutputs | None, prefix: str) -> list[Constraint | WholeGrammar]:
    if given is None:
        return []
    param = prefix.rstrip(".")
    found: list[Constraint | WholeGrammar] = []
    if given.json_object:
        found.append(json_schema({"type": "object"}, param))
    if given.json is not None:
        found.append(json_schema(given.json, param))
    if given.regex is not None:
        found.append(regex(given.regex, param))
    if given.choice is not None:
        found.append(choice(given.choice, param))
    if given.grammar is not None:
        found.append(WholeGrammar(given.grammar, param))
    return found


def _guided(request: SamplingFields) -> list[Constraint | WholeGrammar]:
    """The fields that vLLM had before ``structured_outputs``."""
    found: list[Constraint | WholeGrammar] = []
    if request.guided_json is not None:
        found.append(json_schema(request.guided_json, "guided_json"))
    if request.guided_regex is not None:
        found.append(regex(request.guided_regex, "guided_regex"))
    if request.guided_choice is not None:
        found.append(choice(request.guided_choice, "guided_choice"))
    if request.guided_grammar is not None:
        found.append(WholeGrammar(request.guided_grammar, "guided_grammar"))
    return found


def json_schema(schema: Any, param: str) -> Constraint:
    """``schema``: a JSON schema or its text. Raises RequestError for anything else."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not a JSON schema: {error}", param) from error
    if not isinstance(schema, (dict, bool)):
        raise RequestError(f"{param} is not a JSON schema: it must be an object", param)
    try:
        return Constraint(f"answer: {_json_rule(schema)}", param)
    except RecursionError as error:
        raise RequestError(f"{param} is nested too deeply", param) from error


def _json_rule(schema: dict[str, Any] | bool) -> str:
    """Space between JSON's parts is limited to what pretty printing needs: small models would go on for ever."""
    if isinstance(schema, dict):
        schema = {"x-guidance": {"whitespace_pattern": "\\n? {0,16}"}} | schema
    return f"%json {json.dumps(schema)}"


def regex(pattern: str, param: str) -> Constraint:
    """A regular expression in the syntax of Rust's regex crate, without look-around."""
    if not pattern or "\n" in pattern:
        raise RequestError(f"{param} must be a non-empty expression on one line (write \\n for a line break)", param)
    escaped = pattern.replace("\\/", "/").replace("/", "\\/")
    return Constraint(f"answer: /{escaped}/", param)


def choice(options: Sequence[str], param: str) -> Constraint:
    """One of these texts."""
    if not options or not all(options):
        raise RequestError(f"{param} needs at least one option, and none of them empty", param)
    return Constraint("answer: " + " | ".join(json.dumps(option) for option in options), param)


def forced_calls(schemas: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, max_bytes: int) -> Constraint:
    """One tool call of these functions, or, with ``several``, one or more. Raises RequestError if too large."""
    rules = ['answer: call ("\\n" call)*' if several else "answer: call"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    begin, end = symbol(tokenizer, CALL), symbol(tokenizer, END_CALL)
    for i, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f"call_{i}: {begin} {head} arguments_{i} {json.dumps('}' + chr(10))} {end}")
        rules.append(f"arguments_{i}: {_json_rule(schema or {'type': 'object'})}")
    return _limited(Constraint("\n".join(rules), "tools"), max_bytes)


def symbol(tokenizer: Tokenizer, tag: str) -> str:
    """A tag as grammars name it: bare if it is a token of its own, quoted if it is spelled out."""
    return tag if len(tokenizer.encode(tag, add_special_tokens=False)) == 1 else json.dumps(tag)
