"""The OpenAPI document describes the server: every route, every field, every answer."""

from __future__ import annotations

import re
from typing import Any

import cloudflare
import pytest

from control_plane.api.console.routes import FILES_PATH
from control_plane.api.openapi.document import document
from control_plane.api.workers_ai.remote_proxy import RemoteProxy
from control_plane.app import create_app
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

HELLO = [*ids_of("Hello"), 1]
PAGES = {"/", FILES_PATH, "/docs", "/openapi.json"}
ANY_APP: Any = create_app(*(None,) * 5)  # type: ignore[arg-type]


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        named = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return named.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


def test_every_route_is_documented_and_every_documented_route_is_there() -> None:
    there = {
        (method.lower(), re.sub(r":\w+}", "}", route.path))
        for route in ANY_APP.routes
        for method in route.methods - {"HEAD"}
        if route.path not in PAGES and not isinstance(route.endpoint, RemoteProxy)
    }
    documented = {(method, path) for path, methods in document("http://x")["paths"].items() for method in methods}
    proxy = {
        ("post", "/client/v4/accounts/{account}/ai/run/proxy")
    }  # also there: GET, which wrangler tries to upgrade, and a trailing slash
    assert documented == there | proxy


def test_every_schema_that_is_named_is_there_and_operations_have_names_of_their_own() -> None:
    documented = document("http://x")
    known = {f"#/components/schemas/{name}" for name in documented["components"]["schemas"]}
    assert references(documented) <= known
    names = [operation["operationId"] for methods in documented["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))


def test_bodies_say_what_the_validation_says() -> None:
    schemas = document("http://x")["components"]["schemas"]
    chat, native = schemas["ChatBody"], schemas["TextGenerationBody"]
    assert chat["additionalProperties"] is False and chat["required"] == ["model", "messages"]
    assert {"maximum": 2, "minimum": 0, "type": "number"} in chat["properties"]["temperature"]["anyOf"]
    assert {"maximum": 5, "minimum": 0, "type": "number"} in native["properties"]["temperature"]["anyOf"]
    assert chat["properties"]["user"] == {"description": "Taken, and changes nothing."}
    assert "functions" not in chat["properties"] and "ToolBody" in schemas
    assert [rule["required"] for rule in native["oneOf"]] == [["prompt"], ["messages"]]


async def test_the_document_names_this_server_and_a_model_that_it_serves() -> None:
    async with serve(model_id="@cf/some/model") as gateway:
        documented = (await gateway.client.get("/openapi.json")).json()
    assert documented["openapi"] == "3.1.0" and documented["servers"] == [{"url": gateway.url}]
    chat = documented["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert chat["example"]["model"] == "@cf/some/model"


async def test_the_reference_page_has_every_operation_and_object_and_loads_nothing_from_elsewhere() -> None:
    async with serve() as gateway:
        page = await gateway.client.get("/docs")
        documented = (await gateway.client.get("/openapi.json")).json()
        landing = await gateway.client.get("/")
    assert page.headers["content-type"].startswith("text/html") and 'href="/docs"' in landing.text
    names = [operation["operationId"] for methods in documented["paths"].values() for operation in methods.values()]
    for name in (*names, *documented["components"]["schemas"]):
        assert f'<article id="{name}">' in page.text and f'<a href="#{name}">' in page.text
    targets = re.findall(r'(?:href|src)="([^"]*)"', page.text)
    assert all(target.startswith("#") or target == "/openapi.json" for target in targets)
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", page.text)
    assert "prefers-color-scheme" in page.text or "light-dark(" in page.text


async def test_a_models_schemas_are_those_that_its_inputs_are_checked_by() -> None:
    url = "/client/v4/accounts/me/ai/models/schema"
    async with serve() as gateway:
        async with cloudflare.AsyncCloudflare(base_url=gateway.url + "/client/v4", api_token="x") as client:
            answer = await client.ai.models.schema.get(account_id="me", model="@tandem/demo")
        unnamed = await gateway.client.get(url)
        unknown = await gateway.client.get(url, params={"model": "other"})
    found: Any = answer.to_dict()
    assert {"prompt", "messages", "max_tokens"} <= set(found["input"]["properties"])
    assert found["output"]["$defs"]["NativeResult"]["required"] == ["finish_reason", "response", "tool_calls", "usage"]
    for schema in found.values():  # each stands by itself
        assert references(schema) <= {f"#/$defs/{name}" for name in schema["$defs"]}
    assert (unnamed.status_code, unnamed.json()["errors"][0]["code"]) == (400, 5006)
    assert (unknown.status_code, unknown.json()["errors"][0]["code"]) == (400, 5007)


async def test_a_models_output_follows_its_wire_format() -> None:
    async with serve(wire_format="openai") as gateway:
        url = "/client/v4/accounts/me/ai/models/schema"
        found = (await gateway.client.get(url, params={"model": "demo"})).json()["result"]["output"]
    assert {"ChatCompletion", "Completion"} <= set(found["$defs"])


@pytest.mark.parametrize(("what", "num"), [("models", 1), ("tasks", 3), ("authors", 1)])
async def test_searches_page_to_an_end_and_refuse_what_they_do_not_know(what: str, num: int) -> None:
    url = f"/client/v4/accounts/me/ai/{what}/search"
    async with serve() as gateway:
        first = (await gateway.client.get(url)).json()
        past = (await gateway.client.get(url, params={"page": 2})).json()
        odd = await gateway.client.get(url, params={"pge": 2})
    assert len(first["result"]) == first["result_info"]["total_count"] == num
    assert past["result"] == [] and past["success"]
    assert odd.status_code == 400 and "pge is not a parameter of this endpoint" in odd.text


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"author": "TANDEM"}, 1),
        ({"author": "meta"}, 0),
        ({"task": "c329a1f9-323d-4e91-b2aa-582dd4188d34"}, 1),
        ({"source": "1"}, 1),
        ({"source": "2"}, 0),
        ({"hide_experimental": "true", "include_deprecated": "false"}, 1),
    ],
)
async def test_a_search_filters_by_everything_it_takes(query: dict[str, str], found: int) -> None:
    async with serve() as gateway:
        answer = await gateway.client.get("/client/v4/accounts/me/ai/models/search", params=query)
    assert len(answer.json()["result"]) == found


@pytest.mark.parametrize(
    ("query", "words"),
    [({"format": "openrouter"}, "format is not supported here"), ({"source": "x"}, "source is 'x'"),
     ({"hide_experimental": "perhaps"}, "must be true or false"), ({"page": "²"}, "page is '²'"),
     ({"page": "9" * 5000}, "must be a number from 1 to")],
)  # fmt: skip
async def test_a_search_says_what_is_wrong_with_it(query: dict[str, str], words: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        answer = await gateway.client.get("/client/v4/accounts/me/ai/models/search", params=query)
    assert answer.status_code == 400 and words in answer.json()["errors"][0]["message"]
