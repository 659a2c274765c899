"""The fields for structured output have the meaning of their APIs, and are checked before admission."""

from __future__ import annotations

import json
from typing import Any

import pytest

from control_plane.api.http.body import check
from control_plane.api.openai.schema import ChatBody
from tandem_engine.grammar import MAX_GRAMMAR_CHARACTERS, Grammar
from tandem_runtime.errors import InvalidRequest
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

EOS = 1
HI = [{"role": "user", "content": "hi"}]
RUN = "/client/v4/accounts/me/ai/run/@tandem/demo"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TEXT = '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"],"additionalProperties":false}'
ANSWER = '{"n": 12345678901234567890123}'
WRAPPED = {"name": "n", "schema": SCHEMA, "strict": True}


def saying(text: str) -> ScriptedDispatcher:
    return ScriptedDispatcher(Script([*ids_of(text), EOS]))


async def post(gateway: Gateway, path: str, **fields: Any) -> Any:
    model = {"model": "demo"} if path.startswith("/v1") else {}
    return await gateway.client.post(path, json={**model, "messages": HI, **fields})


@pytest.mark.parametrize("path", [RUN, "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"response_format": {"type": "json_schema", "json_schema": WRAPPED}}, Grammar("json_schema", TEXT)),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_json": json.dumps(SCHEMA)}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ['say "a"', "b"]}, Grammar("lark", 'start: CHOICE\nCHOICE: "say \\"a\\"" | "b"')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["b"]}}, Grammar("lark", 'start: CHOICE\nCHOICE: "b"')),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
)
async def test_every_form_becomes_the_grammar_it_means(path: str, fields: Any, grammar: Grammar | None) -> None:
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, path, **fields)
    assert response.status_code == 200, response.text
    assert gateway.dispatcher.requests[0].sampling.grammar == grammar


async def test_a_native_answer_of_json_is_a_value_to_the_last_digit() -> None:
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, RUN, response_format={"type": "json_schema", "json_schema": SCHEMA})
    assert json.loads(response.text)["result"]["response"] == {"n": 12345678901234567890123}


async def test_openai_answers_stay_text() -> None:
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, "/v1/chat/completions", response_format={"type": "json_object"})
    assert response.json()["choices"][0]["message"]["content"] == ANSWER


async def test_json_streams_as_text() -> None:
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, RUN, response_format={"type": "json_object"}, stream=True)
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(event["response"] for event in events) == ANSWER


async def test_a_native_answer_that_was_cut_off_is_an_error() -> None:
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, RUN, response_format={"type": "json_object"}, max_tokens=3)
    assert response.status_code == 400
    assert "JSON Mode couldn't be met" in response.json()["errors"][0]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"guided_json": {"not": {}, "uniqueItems": True}},
            "guided_json",
            "not supported here: not, uniqueItems; remove them",
        ),
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_json": {"$ref": "http://x.invalid/y"}}, "guided_json", "does not fetch"),
        ({"guided_json": {"x-guidance": {"lenient": True}}}, "guided_json", "x-guidance"),
        ({"guided_json": "{"}, "guided_json", "not JSON"),
        ({"guided_json": "[]"}, "guided_json", "send an object"),
        ({"guided_json": [1]}, "guided_json", "guided_json must be an object, or an object as JSON text, got [1]"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "guided_json cannot be used: no text matches it"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": "(a{1000}){1000}"}, "guided_regex", "too many expressions"),
        ({"guided_regex": ""}, "guided_regex", "guided_regex is empty; send what"),
        ({"guided_regex": "a" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_regex", "65,537 characters"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": 'start: "a" start'}, "guided_grammar", "cannot be used"),
        ({"guided_grammar": 'start: x "b"\nx[max_tokens=3]: /a*/'}, "guided_grammar", "max_tokens=... or stop=..."),
        ({"guided_choice": []}, "guided_choice", "none of them empty"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "structured_outputs.json is not JSON"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", "here: not; remove them"),
        (
            {"structured_outputs": {"json": 5}},
            "structured_outputs.json",
            "must be an object, or an object as JSON text",
        ),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "structured_outputs.choice must be"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "structured_outputs.regex cannot be"),
        ({"response_format": "json"}, "response_format", 'response_format must be an object, got "json"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**WRAPPED, "stric": True}}},
            "response_format.json_schema.stric",
            "is not a field beside schema; move it into schema, or leave it out",
        ),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "exclude each other"),
        ({"structured_outputs": {"regex": "a", "grammar": 'start: "a"'}}, "structured_outputs.grammar", "exclude each"),
        ({"structured_outputs": {"whitespace_pattern": "a"}}, "structured_outputs.whitespace_pattern", "not a field"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "leave it out"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema needs type json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {}}}, "response_format", "and that type needs it"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "no schema"),
    ],
)
async def test_what_cannot_be_held_to_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, "/v1/chat/completions", **fields)
    assert response.status_code == 400 and gateway.dispatcher.requests == []
    error = response.json()["error"]
    assert words in error["message"] and error["param"] == param


async def test_thousands_of_choices_are_one_grammar_like_any_other() -> None:
    choices = [f"choice {number}" for number in range(4000)]
    async with serve(saying("choice 3999")) as gateway:
        response = await post(gateway, "/v1/chat/completions", guided_choice=choices)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("field", ["messages", "tool_choice", "stop"])
async def test_of_a_wrong_value_that_nests_without_end_the_beginning_is_shown(field: str) -> None:
    value = json.loads("[" * 400 + "]" * 400)
    for _ in range(1200):
        value = [value]
    with pytest.raises(InvalidRequest, match=r"got (\[){60}\.\.\.$"):
        check(ChatBody, {"model": "demo", "messages": HI, field: value})


async def test_a_native_answer_deeper_than_can_be_read_says_so() -> None:
    async with serve(saying("[" * 20_000 + "]" * 20_000), context_length=65_536) as gateway:
        response = await post(gateway, RUN, guided_json={"type": "array"}, max_tokens=40_001)
    assert response.status_code == 400
    assert "nested too deeply to read; limit the schema's depth, or stream" in response.text


async def test_a_schema_nested_without_end_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    async with serve(saying(ANSWER)) as gateway:
        response = await post(gateway, "/v1/chat/completions", guided_json=schema)
    assert response.status_code == 400 and "128 levels deep" in response.json()["error"]["message"]
