"""Structured outputs of the API: request fields to one grammar.

Job: ``response_format``, ``structured_outputs``, the older ``guided_*`` fields and forced tool calls, each as a
``Constraint``. Owns: the rule of one constraint per request, and sizes. Does not know: how grammars are compiled.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from weft.engine.structured_outputs import (
    Constraint,
    WholeGrammar,
    choice,
    constraint_of_params,
    json_rule,
    json_schema,
    regex,
    whole_grammar,
)
from weft.errors import RequestError
from weft.server.output_parser import CALL, END_CALL, END_THINK
from weft.server.protocol import SamplingFields
from weft.text.tokenizer import Tokenizer

_Constrains = TypeVar("_Constrains", bound=Constraint | WholeGrammar)


def constraint_of(request: SamplingFields, max_bytes: int) -> Constraint | WholeGrammar | None:
    """The one constraint of a request, or None.

    Raises:
        RequestError: more than one, too large, or contradicted by ``min_tokens`` or ``ignore_eos``.
    """
    found = [*_response_format(request), *_structured(request)]
    found += _guided(request)
    if not found:
        return None
    if len(found) > 1:
        raise RequestError(f"{found[0].param} and {found[1].param} exclude each other; give one", found[1].param)
    check_end(request, found[0].param)
    return _limited(found[0], max_bytes)


def check_end(request: SamplingFields, param: str) -> None:
    """Raises RequestError if something else than the constraint of ``param`` is to decide where the text ends."""
    for name in ("min_tokens", "ignore_eos"):
        if getattr(request, name):
            raise RequestError(f"{name} contradicts {param}, which decides where the text ends", name)


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


def _structured(request: SamplingFields) -> list[Constraint | WholeGrammar]:
    given = request.structured_outputs
    return [] if given is None else [constraint_of_params(given)]


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
        found.append(whole_grammar(request.guided_grammar, "guided_grammar"))
    return found


def forced_calls(schemas: Mapping[str, Any], tokenizer: Tokenizer, *, several: bool, max_bytes: int) -> Constraint:
    """Constrain the text to one tool call, or with ``several`` to one or more. Raises RequestError if too large."""
    rules = ['answer: call ("\\n" call)*' if several else "answer: call"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    begin, end = symbol(tokenizer, CALL), symbol(tokenizer, END_CALL)
    for i, (name, schema) in enumerate(schemas.items()):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f"call_{i}: {begin} {head} arguments_{i} {json.dumps('}' + chr(10))} {end}")
        rules.append(f"arguments_{i}: {json_rule(schema)}")
    return _limited(Constraint("\n".join(rules), "tools"), max_bytes)


def symbol(tokenizer: Tokenizer, tag: str) -> str:
    """Name a tag in a grammar: bare if it is a single token, otherwise quoted."""
    return tag if len(tokenizer.encode(tag, add_special_tokens=False)) == 1 else json.dumps(tag)


def end_of_reasoning(tokenizer: Tokenizer) -> str:
    """The symbol that ends reasoning, for ``Constraint.grammar``."""
    return symbol(tokenizer, END_THINK)
