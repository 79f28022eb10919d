"""Own the page /docs: the OpenAPI document for people, in one answer; `app` makes the document.

The page has no script and loads nothing, so it is complete without a network, and no foreign code runs at its origin.
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, Final

from kvleased.api.rest.conversion import Json

STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code, td:first-child { font-family: ui-monospace, monospace; font-size: 0.9em; }
summary { cursor: pointer; padding: 0.3rem 0; }
details { border-bottom: 1px solid #8884; }
details > :not(summary) { margin-left: 1rem; }
table { border-collapse: collapse; }
th, td { padding: 0.2rem 1rem 0.2rem 0; text-align: left; vertical-align: top; }
.method { display: inline-block; font-weight: bold; min-width: 4.5rem; }
"""
"""The style of the page."""

_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY: Final = (
    f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""What the page may load and do: nothing but its own style."""
HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-cache",
}
"""The headers of the page."""

_LIMITS: Final = (
    ("minimum", "from"),
    ("exclusiveMinimum", "above"),
    ("maximum", "to"),
    ("maxLength", "characters at most:"),
    ("maxItems", "entries at most:"),
    ("default", "default:"),
)
"""The limits of a value that are told beside its type, and their words."""


def docs_page(document: Json) -> str:
    """Return an OpenAPI document as one page of HTML: operations by tag, then the records that they take and return."""
    info = document["info"]
    title = escape(f"{info['title']} API, version {info['version']}")
    return "".join(
        (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{STYLE}</style></head><body><h1>{title}</h1><p>{escape(info['description'])}</p>",
            '<p>For programs: <a href="/openapi.json">/openapi.json</a>.</p>',
            f"<p>{escape(document['components']['securitySchemes']['bearer']['description'])}</p>",
            *_operations(document),
            "<h2>Records</h2>",
            *(_record(*one) for one in sorted(document["components"]["schemas"].items())),
            "</body></html>",
        )
    )


def _operations(document: Json) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2><p>{escape(tag['description'])}</p>"
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                if tag["name"] in operation["tags"]:
                    yield _operation(method.upper(), path, operation)


def _operation(method: str, path: str, operation: Json) -> str:
    name = escape(operation["operationId"])
    parameters = [
        (one["name"], f"{one['in']}, {_kind(one['schema'])}", one.get("description", ""))
        for one in operation.get("parameters", ())
    ]
    body = operation.get("requestBody", {}).get("content", {})
    answers = [
        (status, _kinds(answer.get("content", {})), answer["description"])
        for status, answer in operation["responses"].items()
    ]
    return (
        f'<details><summary><code><span class="method">{method}</span> {escape(path)}</code> '
        f"{escape(operation['summary'])}</summary>{_opened(name)}"
        f"<p>Who may call it: {escape(', '.join(operation['x-roles']))}. Its name: <code>{name}</code>.</p>"
        + _table(("parameter", "where and what", "meaning"), parameters)
        + (f"<p>Body: {_kinds(body)}</p>" if body else "")
        + _table(("status", "answer", "meaning"), answers)
        + "</div></details>"
    )


def _record(name: str, schema: Json) -> str:
    needed = schema.get("required", ())
    fields = [
        (
            field,
            _kind(value) + (", required" if field in needed else ""),
            value.get("description", ""),
        )
        for field, value in schema.get("properties", {}).items()
    ]
    meaning = f"<p>{escape(schema['description'])}</p>" if "description" in schema else ""
    shown = _table(("field", "what", "meaning"), fields) or f"<p>{_kind(schema)}</p>"
    return (
        f"<details><summary><code>{escape(name)}</code></summary>"
        f"{_opened(f'record-{name}')}{meaning}{shown}</div></details>"
    )


def _opened(name: str) -> str:
    """Return the start of a `details` element's content: browsers unfold it if a link leads to an element inside."""
    return f'<div id="{escape(name)}">'


def _table(head: tuple[str, ...], rows: list[tuple[str, str, str]]) -> str:
    """Return a table; each row has a name, something that is HTML already, and a sentence. Empty without rows."""
    if not rows:
        return ""
    names = "".join(f"<th>{escape(one)}</th>" for one in head)
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{kind}</td><td>{escape(text)}</td></tr>"
        for name, kind, text in rows
    )
    return f"<table><tr>{names}</tr>{cells}</table>"


def _kinds(content: Mapping[str, Json]) -> str:
    return ", ".join(f"{_kind(one['schema'])} as {escape(media)}" for media, one in content.items())


def _kind(schema: Json) -> str:
    """Return the type of a value and its limits, as HTML."""
    limits = [
        f"{words} {escape(_value(schema[name]))}"
        for name, words in _LIMITS
        if schema.get(name) not in (None, "")
    ]
    return ", ".join([_type(schema), *limits])


def _type(schema: Json) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#record-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(map(_kind, schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    if schema.get("contentEncoding"):
        return f"bytes as {escape(schema['contentEncoding'])}"
    return escape(str(schema.get("type", "anything")))


def _value(value: Any) -> str:
    """Return a value as text; a whole number has no fraction."""
    is_whole = isinstance(value, float) and value.is_integer()
    return f"{int(value):,}" if is_whole else str(value)
