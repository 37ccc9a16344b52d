"""Tool use: which tools the template shows, how calls are parsed, ``tool_choice``."""

from dataclasses import dataclass
from typing import Any

from weft.errors import RequestError
from weft.server.protocol import ChatCompletionRequest


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a call.

    Attributes:
        schemas: parameters by function name; None: tool calls are not looked for.
        shown: the tools that the template sees.
        forced: one of these must be called; None: the model decides.
        several: an answer may have more than one call.
    """

    schemas: dict[str, Any] | None
    shown: list[dict[str, Any]] | None
    forced: dict[str, Any] | None = None
    several: bool = True


def tool_use(request: ChatCompletionRequest, parser: str) -> ToolUse:
    """Decide which tools are shown and which calls are read. Raises RequestError."""
    schemas = tool_schemas(request.tools)
    choice = request.tool_choice if request.tool_choice is not None else ("auto" if schemas else "none")
    if choice == "none" or (choice == "auto" and (parser == "none" or not schemas)):
        return ToolUse(None, request.tools if choice != "none" else None)
    if not schemas:
        raise RequestError("tool_choice needs tools; give some or leave it out", "tool_choice")
    several = request.parallel_tool_calls is not False
    if choice == "auto":
        return ToolUse(schemas, request.tools, several=several)
    if choice == "required":
        return ToolUse(schemas, request.tools, schemas, several)
    name = _named_function(choice)
    if name not in schemas:
        raise RequestError(f"tool_choice={choice!r} is not auto, none, required, or one of the tools", "tool_choice")
    return ToolUse(schemas, request.tools, {name: schemas[name]}, several=False)


def _named_function(choice: str | dict[str, Any]) -> str | None:
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def tool_schemas(tools: Any) -> dict[str, Any]:
    """Parameters by function name: schemas of objects. Raises RequestError for tools that are not functions."""
    schemas: dict[str, Any] = {}
    for i, tool in enumerate(tools or ()):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"tools[{i}] is not {{'type': 'function', 'function': {{'name': …}}}}", "tools")
        parameters = function.get("parameters") or {}
        kinds = parameters.get("type", "object") if isinstance(parameters, dict) else type(parameters).__name__
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise RequestError(
                f"tools[{i}].function.parameters has type {str(kinds)[:40]!r}; arguments have names: give a JSON "
                "schema of type 'object'",
                "tools",
            )
        schemas[function["name"]] = {"type": "object"} | parameters
    return schemas
