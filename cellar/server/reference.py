"""`/docs`: every route with its fields, as a page without scripts; it is made of the OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from cellar.server.page import HEADERS

PATH = "/docs"
_NAMED = 160
"""Characters of a type that are shown."""


def install(app: FastAPI) -> None:
    """Serve it. The document has all routes that were added by the time that somebody asks."""

    async def reference() -> Response:
        return Response(as_page(app.openapi()), headers=HEADERS, media_type="text/html; charset=utf-8")

    app.add_api_route(PATH, reference, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)


def as_page(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as HTML."""
    schemas = document.get("components", {}).get("schemas", {})
    info = document["info"]
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])}: API</title>'
        '<meta name="viewport" content="width=device-width"><link rel="stylesheet" href="page/reference.css"></head>'
        f"<body><main><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        "<p>The routes of this server, and the fields of their bodies. To programs "
        '<a href="openapi.json">openapi.json</a> says the same.</p>'
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts += _operation(path, method, operation, schemas)
    return "".join([*parts, "</main></body></html>"])


def _operation(path: str, method: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield f"<section><h2><b>{escape(method.upper())}</b> <code>{escape(path)}</code></h2>"
    yield f"<p>{escape(operation.get('description', ''))}</p>"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    rows = [(one["name"], one["schema"], one.get("required", False)) for one in operation.get("parameters", ())]
    if body is not None:
        found = _resolved(body, schemas)
        required = found.get("required", ())
        rows += [(name, field, name in required) for name, field in found.get("properties", {}).items()]
    if rows:
        yield "<table><thead><tr><th>Field</th><th>Type</th><th>Required</th></tr></thead><tbody>"
        for name, field, required in rows:
            said = escape(_type(field, schemas))
            yield f"<tr><td><code>{escape(name)}</code></td><td>{said}</td><td>{'yes' if required else ''}</td></tr>"
        yield "</tbody></table>"
    yield "</section>"


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    reference = schema.get("$ref")
    found: Mapping[str, Any] = schema if reference is None else schemas[reference.rpartition("/")[2]]
    return found


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """A field's type in words; null, which every field may be that is not required, is left out."""
    said = _words(schema, schemas)
    return said if len(said) <= _NAMED else f"{said[:_NAMED]}…"


def _words(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(_resolved(schema, schemas).get("title", "object"))
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if "const" in schema:
        return str(schema["const"])
    for many in ("anyOf", "oneOf"):
        if many in schema:
            parts = (_words(one, schemas) for one in schema[many] if one.get("type") != "null")
            return " | ".join(dict.fromkeys(parts))
    kind = str(schema.get("type", "any"))
    return f"list of {_words(schema['items'], schemas)}" if kind == "array" and schema.get("items") else kind
