"""The OpenAPI document of the server.

Paths and request bodies are described from the types that read them. A path may hold ``{name:path}``, as Starlette
writes it.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from weft import __version__

_ERROR = {
    "description": "refused; see error.message and error.param",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_CHANGE_REPLICA = {
    "parameters": [
        {"name": "replica", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}},
        {"name": "change", "in": "path", "required": True, "schema": {"type": "string", "enum": ["drain", "start"]}},
    ],
    "responses": {"202": {"description": "begun", "content": {"application/json": {}}}}
    | dict.fromkeys(("400", "401", "403", "404", "409", "503"), _ERROR),
}
_STATUSES = ("400", "401", "403", "404", "413", "429", "503", "504")


def openapi_document(posts: Mapping[str, type[msgspec.Struct]], gets: Mapping[str, str]) -> dict[str, Any]:
    """The document, as plain values.

    Args:
        posts: body type by path.
        gets: media type of the answer by path.
    """
    _, schemas = msgspec.json.schema_components(posts.values(), ref_template="#/components/schemas/{name}")
    paths = {_plain(path): {"get": _get(path, media_type)} for path, media_type in gets.items()}
    for path, kind in posts.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        streams = "stream" in kind.__struct_fields__
        types = ["application/json", "text/event-stream"] if streams else ["application/json"]
        post = {"requestBody": {"required": True, "content": body}, "responses": _responses(types)}
        paths[path] = {"post": post}
    paths["/replicas/{replica}/{change}"] = {"post": _CHANGE_REPLICA}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR_SCHEMA}},
    }


def _plain(path: str) -> str:
    return re.sub(r"{(\w+):\w+}", r"{\1}", path)


def _get(path: str, media_type: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"responses": _responses([media_type])}
    names = re.findall(r"{(\w+)", path)
    if names:
        text = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": n, "in": "path", "required": True, "schema": text} for n in names]
    if path in ("/health", "/ready"):  # 503 is one of their answers, and no error of the request
        operation["responses"]["503"] = {"description": "no", "content": {media_type: {}}}
    if path == "/inspect":
        ids = {"type": "array", "items": {"type": "string"}}
        operation["parameters"] = [
            {"name": "request", "in": "query", "description": "ids of the caller's own requests", "schema": ids},
            {"name": "replica", "in": "query", "description": "which one to look into", "schema": {"type": "integer"}},
        ]
    return operation


def _responses(media_types: Sequence[str]) -> dict[str, Any]:
    return {"200": {"description": "done", "content": {name: {} for name in media_types}}} | dict.fromkeys(
        _STATUSES, _ERROR
    )
