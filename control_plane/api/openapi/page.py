"""Renders the reference page from the OpenAPI document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from control_plane.api.openapi.operations import EVENTS, JSON

_STYLE = """
  :root { color-scheme: light dark; --ink: light-dark(#1c1b1a, #ece9e4); --soft: light-dark(#6d6862, #a39d94);
          --paper: light-dark(#faf8f5, #171614); --card: light-dark(#fff, #211f1c);
          --line: light-dark(#e6e1d9, #35322d); --accent: light-dark(#b4481e, #f0905f); }
  html { scroll-behavior: smooth; scroll-padding-top: 1.5rem; }
  body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.6 ui-sans-serif, system-ui, sans-serif; }
  a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
  code, pre { font: 13.5px/1.6 ui-monospace, monospace; }
  .page { display: grid; grid-template-columns: 17rem minmax(0, 50rem); gap: 3.5rem; max-width: 76rem; margin: 0 auto;
          padding: 0 1.5rem; }
  aside { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; box-sizing: border-box;
          padding: 3rem 0; font-size: 14px; }
  aside h3 { margin: 1.6rem 0 .3rem; color: var(--soft); font-size: 12px; font-weight: 600; letter-spacing: .06em;
             text-transform: uppercase; }
  aside a { display: block; padding: .12rem 0; color: var(--ink); }
  main { padding: 3rem 0 30vh; }
  h1 { font-size: 2.4rem; letter-spacing: -.03em; margin: 0; } h1 span { color: var(--accent); }
  h2 { margin: 3.5rem 0 .2rem; font-size: 1.5rem; letter-spacing: -.015em; }
  p { color: var(--soft); margin: .4rem 0 1rem; }
  article { margin: 1.2rem 0; padding: 1.1rem 1.4rem; background: var(--card); border: 1px solid var(--line);
            border-radius: 12px; }
  article h3 { margin: 0; font-size: 1.05rem; }
  .path { margin: .25rem 0 .9rem; overflow-wrap: anywhere; } .path b { color: var(--accent); font-weight: 600; }
  h4 { margin: 1.1rem 0 .2rem; color: var(--soft); font-size: 13px; font-weight: 600; }
  .wide { overflow-x: auto; }
  table { width: 100%; border-collapse: collapse; font-size: 14.5px; }
  td { padding: .35rem 1.2rem .35rem 0; border-top: 1px solid var(--line); vertical-align: top; color: var(--soft); }
  td:first-child { width: 11rem; color: var(--ink); overflow-wrap: anywhere; } td i { color: var(--accent); }
  pre { margin: .3rem 0 0; padding: .8rem 1rem; background: var(--paper); border: 1px solid var(--line);
        border-radius: 8px; overflow-x: auto; }
  summary { margin-top: 1rem; color: var(--soft); font-size: 13px; font-weight: 600; cursor: pointer; }
  @media (max-width: 60rem) { .page { display: block; }
                              aside { position: static; max-height: none; padding-bottom: 0; } }
"""


def reference_page(document: Mapping[str, Any]) -> str:
    """Return the page. Its content comes from `document` only, and it loads nothing from other hosts."""
    info = document["info"]
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(info['title'])}: reference</title>\n<style>{_STYLE}</style>\n"
        f'<div class="page"><aside>{"".join(_contents(document))}</aside>\n<main>\n'
        f"<h1>{escape(info['title'])}<span>.</span></h1>\n<p>{escape(info['description'])}</p>\n"
        '<p>Made from <a href="/openapi.json">/openapi.json</a> (OpenAPI 3.1).</p>\n'
        f"{''.join(_operations(document))}{''.join(_schemas(document))}</main></div>\n</html>\n"
    )


def _contents(document: Mapping[str, Any]) -> Iterator[str]:
    for tag in document["tags"]:
        yield f"<h3>{escape(tag['name'])}</h3>"
        for _, _, operation in _of_tag(document, tag["name"]):
            yield f'<a href="#{escape(operation["operationId"])}">{_text(operation["summary"])}</a>'
    yield "<h3>Objects</h3>"
    yield from (f'<a href="#{escape(name)}">{escape(name)}</a>' for name in sorted(document["components"]["schemas"]))


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    server = document["servers"][0]["url"]
    for tag in document["tags"]:
        yield f"<h2>{escape(tag['name'])}</h2>\n<p>{_text(tag['description'])}</p>\n"
        for method, path, operation in _of_tag(document, tag["name"]):
            yield _operation(method, path, operation, server)


def _of_tag(document: Mapping[str, Any], tag: str) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    for path, methods in document["paths"].items():
        yield from ((method, path, each) for method, each in methods.items() if tag in each["tags"])


def _operation(method: str, path: str, operation: Mapping[str, Any], server: str) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get(JSON, {})
    parts = [
        f'<article id="{escape(operation["operationId"])}"><h3>{_text(operation["summary"])}</h3>',
        f'<div class="path"><code><b>{method.upper()}</b> {escape(path)}</code></div>',
        _parameters(operation.get("parameters", ())),
    ]
    if body:
        parts.append(f"<h4>Body</h4>{_body(body['schema'])}")
    if "example" in body:
        parts.append(f"<h4>Example</h4><pre>{escape(_curl(path, operation, body['example'], server))}</pre>")
    parts.append(f"<h4>Answer</h4>{_answer(operation['responses']['200']['content'])}")
    return "".join(parts) + _errors(operation["responses"]) + "</article>\n"


def _parameters(parameters: Any) -> str:
    rows = [
        _row(each["name"], each["required"], f"{kind_html(each['schema'])}, in the {each['in']}", each["description"])
        for each in parameters
    ]
    return f"<h4>Parameters</h4>{_table(rows)}" if rows else ""


def _body(schema: Mapping[str, Any]) -> str:
    return _field_table(schema) if "properties" in schema else f"<div>{kind_html(schema)}</div>"


def _answer(content: Mapping[str, Any]) -> str:
    rows = []
    for media_type, each in content.items():
        schema = each["schema"]
        properties = schema.get("properties", {})
        if media_type == EVENTS:
            kind, note = kind_html(properties["data"]["anyOf"][0]["contentSchema"]), schema["description"]
        elif "result" in properties:
            kind, note = f"envelope with <code>result</code>: {kind_html(properties['result'])}", ""
        else:
            kind, note = kind_html(schema), ""
        rows.append(_row(media_type, False, kind, note))
    return _table(rows)


def _errors(responses: Mapping[str, Any]) -> str:
    rows = []
    for status, each in responses.items():
        if status != "200":
            rows.append(_row(status, False, kind_html(each["content"][JSON]["schema"]), each["description"]))
    return f"<details><summary>Errors</summary>{_table(rows)}</details>" if rows else ""


def _schemas(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Objects</h2>\n"
    for name, schema in sorted(document["components"]["schemas"].items()):
        described = f"<p>{_text(schema['description'])}</p>" if "description" in schema else ""
        yield f'<article id="{escape(name)}"><h3>{escape(name)}</h3>{described}{_field_table(schema)}</article>\n'


def _field_table(schema: Mapping[str, Any]) -> str:
    if not schema.get("properties"):
        return f"<div>{kind_html(schema)}</div>"
    rows = [
        _row(name, is_required, kind_html(each), each.get("description", ""))
        for name, each, is_required in fields_of(schema)
    ]
    return _table(rows)


def _row(name: str, is_required: bool, kind: str, description: str) -> str:
    mark = "<i title='required'>*</i>" if is_required else ""
    note = f"<br>{_text(description)}" if description else ""
    return f"<tr><td><code>{escape(name)}</code>{mark}</td><td>{kind}{note}</td></tr>"


def _table(rows: list[str]) -> str:
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _curl(path: str, operation: Mapping[str, Any], example: Any, server: str) -> str:
    headers = [
        f"  -H '{each['name']}: {_SAMPLE.get(each['name'], '...')}' \\\n"
        for each in operation.get("parameters", ())
        if each["in"] == "header" and each["required"]
    ]
    for name, value in _SAMPLE.items():
        path = path.replace(f"{{{name}}}", value)
    return f"curl {server}{path} \\\n{''.join(headers)}  -d '{json.dumps(example)}'"


_SAMPLE = {
    "account": "default",
    "model": "@tandem/demo",
    "cf-consn-model-id": "@tandem/demo",
    "X-Forwarded": "https://workers-binding.ai/run?version=3",
}


def _text(words: str) -> str:
    """Return plain text as HTML, with `names` as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(words))


_BOUNDS = {"minimum": "from {}", "exclusiveMinimum": "above {}", "maximum": "to {}"}


def kind_html(schema: Mapping[str, Any]) -> str:
    """Return a one-line description of a JSON Schema as HTML. Names of schemas are links; null is omitted."""
    if "$ref" in schema:
        name = escape(str(schema["$ref"]).rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for word in ("anyOf", "oneOf"):
        if word in schema and "type" not in schema:
            kinds = [kind_html(each) for each in schema[word] if each.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values if value is not None)
    return _plain(schema)


def fields_of(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Return (name, schema, is_required) of every field: required fields first, ignored fields last."""
    required = set(schema.get("required", ()))
    fields = [(name, each, name in required) for name, each in schema.get("properties", {}).items()]
    return sorted(fields, key=lambda each: (not each[2], kind_html(each[1]) == "anything"))


def _plain(schema: Mapping[str, Any]) -> str:
    kind = schema.get("type", "anything")
    if kind == "array":
        of = f" of {kind_html(schema['items'])}" if schema.get("items") else ""
        return f"list{of}{_sizes(schema, 'Items', 'items')}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {kind_html(schema['additionalProperties'])}"
    words = {"integer": "whole number", "boolean": "true or false", "string": "text"}
    return f"{words.get(str(kind), str(kind))}{_bounds(schema)}{_sizes(schema, 'Length', 'characters')}"


def _bounds(schema: Mapping[str, Any]) -> str:
    bounds = [words.format(f"{schema[name]:,}") for name, words in _BOUNDS.items() if name in schema]
    return f", {' '.join(bounds)}" if bounds else ""


def _sizes(schema: Mapping[str, Any], what: str, unit: str) -> str:
    least, most = schema.get(f"min{what}"), schema.get(f"max{what}")
    if most is not None:
        return f" ({least or 0} to {most} {unit})"
    return " (not empty)" if least else ""
