"""/tokenize and /detokenize: token ids as a request for an answer would have them."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.text_processes.pool import TextProcesses
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.model import byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.api.test_openai import HELLO, HI

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "Hello world"}, "/v1/completions"),
        ({"prompt": "a <|im_end|> b"}, "/v1/completions"),
        ({"messages": HI}, "/v1/chat/completions"),
        ({"messages": HI, "tools": [TOOL]}, "/v1/chat/completions"),
        ({"messages": HI, "chat_template_kwargs": {"a": 1}}, "/v1/chat/completions"),
    ],
)
async def test_the_ids_are_those_of_a_request(body: dict[str, Any], path: str) -> None:
    async with serve(ScriptedDispatcher(Script(HELLO))) as gateway:
        await gateway.client.post(path, json={"model": "demo", **body})
        found = (await gateway.client.post("/tokenize", json={"model": "demo", **body})).json()
    assert found["tokens"] == list(gateway.dispatcher.requests[0].token_ids)
    assert found["count"] == len(found["tokens"]) and found["max_model_len"] == 2048 and found["token_strs"] is None


async def test_texts_of_tokens_and_the_first_token() -> None:
    async with serve() as gateway:
        body = {"prompt": "Hello 你好", "return_token_strs": True, "add_special_tokens": False}
        found = (await gateway.client.post("/tokenize", json=body)).json()
        whole = (await gateway.client.post("/tokenize", json={"prompt": "Hello 你好"})).json()
    assert found["tokens"] == ids_of("Hello 你好") == whole["tokens"][1:] and whole["tokens"][0] == 0
    assert found["token_strs"][0].startswith("H") and len(found["token_strs"]) == found["count"]


async def test_a_longer_text_than_the_context_is_counted() -> None:
    async with serve(context_length=16) as gateway:
        found = (await gateway.client.post("/tokenize", json={"prompt": "x " * 30})).json()
    assert found["count"] > found["max_model_len"] == 16


async def test_ids_become_text_with_control_tokens() -> None:
    ids = list(byte_level_tokenizer().encode("<|im_start|>Hi 😀</s>").ids)
    async with serve() as gateway:
        text = (await gateway.client.post("/detokenize", json={"model": "demo", "tokens": ids})).json()
        none = (await gateway.client.post("/detokenize", json={"tokens": []})).json()
    assert text == {"prompt": "<s><|im_start|>Hi 😀</s>"} and none == {"prompt": ""}


async def test_text_processes_convert_too() -> None:
    processes = TextProcesses()
    processes.start()
    try:
        async with serve(preparer=processes) as gateway:
            for _ in range(2):  # the second one assumes the model that the first one asked for
                found = (await gateway.client.post("/tokenize", json={"prompt": "Hello world"})).json()
                text = (await gateway.client.post("/detokenize", json={"tokens": found["tokens"]})).json()
                assert text == {"prompt": "<s>Hello world"}
    finally:
        await processes.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/tokenize", {}, 400, "send exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": HI}, 400, "send exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, 400, "add_generation_prompt: false is not"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, 400, "chat_template is not supported here"),
        ("/tokenize", {"prompt": "a", "max_tokens": 3}, 400, "max_tokens is not a field of this request"),
        ("/tokenize", {"messages": []}, 400, "messages is empty"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "no model 'other'"),
        ("/detokenize", {}, 400, "tokens is missing"),
        ("/detokenize", {"tokens": [420_000]}, 400, "tokens has token id 420000"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens must be a list"),
    ],
)
async def test_bad_bodies_are_refused_by_name(path: str, body: dict[str, Any], status: int, words: str) -> None:
    async with serve() as gateway:
        response = await gateway.client.post(path, json=body)
    assert response.status_code == status and words in response.json()["error"]["message"]


async def test_several_models_need_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.control_plane.api.model.OneModel.list", lambda self: [self.model, self.model])
    async with serve() as gateway:
        response = await gateway.client.post("/tokenize", json={"prompt": "a"})
    assert response.status_code == 400
    assert "model is missing, and the models served here are @tandem/demo" in response.json()["error"]["message"]
