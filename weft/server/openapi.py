"""The OpenAPI document of the server.

Job: describe paths and request bodies, from the types that read them. Owns: the document's frame.
Does not know: handlers.
"""

from __future__ import annotations

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
_STATUSES = ("400", "401", "403", "404", "413", "429", "503", "504")


def openapi_document(posts: Mapping[str, type[msgspec.Struct]], gets: Sequence[str]) -> dict[str, Any]:
    """The document, as plain values. ``posts``: body type by path."""
    _, schemas = msgspec.json.schema_components(posts.values(), ref_template="#/components/schemas/{name}")
    paths: dict[str, Any] = {path: {"get": {"responses": _responses()}} for path in gets}
    for path, kind in posts.items():
        body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}
        paths[path] = {"post": {"requestBody": {"required": True, "content": body}, "responses": _responses()}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR_SCHEMA}},
    }


def _responses() -> dict[str, Any]:
    return {"200": {"description": "done"}} | dict.fromkeys(_STATUSES, _ERROR)
