"""The OpenAPI document, made from the table of endpoints and the table of fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from jaxinfer.server.endpoints import Endpoint
from jaxinfer.server.errors import ANTHROPIC_PATH, ERROR_TYPES
from jaxinfer.server.field_table import FATES
from jaxinfer.server.fields import Alias, Fate, Ignored, Implemented, Refused

_REF = "#/components/schemas/{model}"
# Of a route that takes a body. Keys, header sizes and time limits are checked only if set.
_FAILURES = (400, 401, 404, 413, 429, 431, 500, 503, 504)
_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
# Of each event; the dialects' own documents say what stands in `data`.
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["integer", "string"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}


def document(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """Return the document as JSON types."""
    endpoints = list(endpoints)
    requests = {e.call.schema for e in endpoints if e.call is not None}
    answers = {answer for e in endpoints for answer in e.answers}
    _, definitions = models_json_schema(
        [
            *((schema, "validation") for schema in sorted(requests, key=_name)),
            *((answer, "serialization") for answer in sorted(answers, key=_name)),
        ],
        ref_template=_REF,
    )
    schemas: dict[str, Any] = definitions.get("$defs", {})
    for schema in requests:
        _describe(schemas[schema.__name__], FATES[schema.endpoint])
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = re.sub(r"\{(\w+):\w+\}", r"{\1}", endpoint.path)
        for method in endpoint.methods:
            paths.setdefault(path, {})[method.lower()] = _operation(endpoint, method, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jaxinfer",
            "version": version,
            "description": "The OpenAI API as vLLM and llama.cpp serve it, and Anthropic's.",
        },
        "paths": paths,
        # Either key, or none where the server has none.
        "security": [{}, *({name: []} for name in _KEYS)],
        "components": {
            "schemas": {**schemas, "Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR},
            "securitySchemes": _KEYS,
        },
    }


def explain(fate: Fate) -> str:
    """Return in a sentence or two what becomes of a field."""
    match fate:
        case Implemented():
            return fate.meaning
        case Alias():
            condition = f" Only with `{fate.needs[0]}: {fate.needs[1]}`." if fate.needs else ""
            return f"Another name of `{fate.of}`.{condition}"
        case Ignored():
            return f"Accepted and ignored: {fate.why}."
        case Refused():
            return f"Not supported, except where it asks for nothing. {fate.hint}".rstrip()


def _name(model: type[BaseModel]) -> str:
    return model.__name__


def _describe(schema: dict[str, Any], fates: Mapping[str, Fate]) -> None:
    """Add to a body's schema what pydantic does not know: meanings, and the fields refused."""
    properties: dict[str, Any] = schema["properties"]
    field: dict[str, Any]
    for name, fate in fates.items():
        match fate:
            case Implemented():
                field = properties[name]
                field.pop("title", None)
            case Alias():
                field = {k: v for k, v in properties[fate.of].items() if k != "description"}
                field = {"anyOf": [field, {"type": "null"}]}
            case Ignored():
                field = {}
            case Refused():
                field = {"enum": [None, *fate.neutral]}
        field["description"] = explain(fate)
        properties[name] = field


def _operation(endpoint: Endpoint, method: str, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_"),
        "responses": _responses(endpoint, path),
    }
    if "{model}" in path:
        operation["parameters"] = [
            {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    if endpoint.call is not None:
        body = {"$ref": _REF.format(model=endpoint.call.schema.__name__)}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return operation


def _responses(endpoint: Endpoint, path: str) -> dict[str, Any]:
    refs = [{"$ref": _REF.format(model=answer.__name__)} for answer in endpoint.answers]
    content: dict[str, Any] = {endpoint.media_type: {}}
    if refs:
        content = {endpoint.media_type: {"schema": {"anyOf": refs}}}
    if endpoint.streams:
        content["text/event-stream"] = {"schema": _EVENT}
    error = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    failure = {"application/json": {"schema": {"$ref": _REF.format(model=error)}}}
    codes = _FAILURES if endpoint.call is not None else (401, 503)
    if "{model}" in path:
        codes = (401, 404, 503)
    return {
        "200": {"description": "The answer.", "content": content},
        **{str(c): {"description": ERROR_TYPES[c], "content": failure} for c in codes},
    }
