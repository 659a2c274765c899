"""Requests with tools, and the answers of the scripted model, for tests of tools."""

from __future__ import annotations

import json
from typing import Any

from tandem_engine.grammar import Grammar
from tests.control_plane.api.gateway import Gateway
from tests.control_plane.api.model import byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher

EOS = 1
HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
RUN = "/client/v4/accounts/me/ai/run/@tandem/demo"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
BARE = {"name": "get", "description": "Gets", "parameters": CITY}
TOOL = {"type": "function", "function": BARE}
OTHER = {"type": "function", "function": {"name": "put"}}
ARGUMENTS = '{"city": "Grünau 😀"}'
CALL = f'<tool_call>\n{{"name": "get", "arguments": {ARGUMENTS}}}\n</tool_call>'
CUT = len(ids_of(CALL[: CALL.index("ünau")]))
"""So many tokens end in the midst of the arguments."""
OSLO = {"name": "get", "arguments": {"city": "Oslo"}}
OSLO_AS_TEXT = {"name": "get", "arguments": '{"city": "Oslo"}'}
TWO = f'I look.\n{CALL}\n<tool_call>\n{{"name": "put", "arguments": {{}}}}\n</tool_call>'


def saying(text: str, **script: Any) -> ScriptedDispatcher:
    return ScriptedDispatcher(Script([*ids_of(text), EOS], **script))


async def post(gateway: Gateway, path: str, **fields: Any) -> Any:
    model = {"model": "demo"} if path.startswith("/v1") else {}
    return await gateway.client.post(path, json={**model, "messages": HI, "tools": [TOOL, OTHER], **fields})


def grammar_of(gateway: Gateway) -> Grammar:
    grammar = gateway.dispatcher.requests[0].sampling.grammar
    assert grammar is not None and grammar.kind == "lark"
    return grammar


def prompt_of(gateway: Gateway) -> str:
    return byte_level_tokenizer().decode(list(gateway.dispatcher.requests[0].token_ids), skip_special_tokens=False)


def events(text: str) -> list[Any]:
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
