"""/tokenize and /detokenize, in the form that vLLM gave them: tools count prompts with them."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypedDict

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from control_plane.api.chat_fields import ChatTemplateFields, Messages, Tools, messages_for_template, tool_use
from control_plane.api.generation_fields import TokenId
from control_plane.api.http.body import Body, check, parse_object, read_body, refuse_extras
from control_plane.api.http.bounds import MAX_MODEL_CHARACTERS, MAX_PROMPT_TOKENS
from control_plane.api.http.request_context import caller_of, services_of
from control_plane.api.http.sse import while_connected
from control_plane.generation import TokenIds
from control_plane.text.prepared import NOBODY, Asked, Conversion, TextJob
from control_plane.text.request import ChatRequest, CompletionRequest
from tandem_runtime.errors import InvalidRequest, Unsupported


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    """Tokens of prompt and answer together that the model takes."""
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


Model = Annotated[str, Field(max_length=MAX_MODEL_CHARACTERS)] | None


class TokenizeBody(ChatTemplateFields):
    """Exactly one of `prompt` and `messages`."""

    unsupported: ClassVar[frozenset[str]] = frozenset(
        {"chat_template", "continue_final_message", "mm_processor_kwargs"}
    )

    model: Model = None
    """The model's name or alias; may be absent while one model is served."""
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = None
    """Tools that a chat offers."""
    add_special_tokens: bool | None = None
    """Begin a prompt as its completion does, with the model's first token. Without effect on messages."""
    add_generation_prompt: Annotated[bool | None, Field(json_schema_extra={"enum": [True, None]})] = None
    """End a chat with the beginning of the answer, as every chat does here."""
    return_token_strs: bool | None = None
    """Return also the text of each token."""

    def request(self) -> CompletionRequest | ChatRequest:
        """Return what is to be tokenized. Raise InvalidRequest."""
        refuse_extras(self)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send exactly one of prompt and messages", field="prompt")
        if self.add_generation_prompt is False:
            raise Unsupported(
                "add_generation_prompt: false is not supported here; leave it out", field="add_generation_prompt"
            )
        model = self.model or ""
        if self.messages is None:
            assert self.prompt is not None, "one of the two is there"
            return CompletionRequest(model, self.prompt, NOBODY)
        variables = self.template_variables
        tools = tool_use(self.tools, None, None)
        return ChatRequest(
            model, messages_for_template(self.messages), NOBODY, tools=tools, template_variables=variables
        )


class DetokenizeBody(Body):
    model: Model = None
    """The model's name or alias; may be absent while one model is served."""
    tokens: Annotated[list[TokenId], Field(max_length=MAX_PROMPT_TOKENS, fail_fast=True)]


def routes() -> list[Route]:
    return [
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
    ]


def parse(job: TextJob, raw: bytes) -> Conversion:
    """Check a body as far as that is possible without its model. Raise InvalidRequest."""
    value = parse_object(raw)
    if job.endpoint == "detokenize":
        ids = check(DetokenizeBody, value)
        refuse_extras(ids)
        return Conversion(Asked(ids.model or "", "text_completion"), token_ids=ids.tokens)
    body = check(TokenizeBody, value)
    request = body.request()
    return Conversion(
        Asked.of(request),
        request,
        with_texts=bool(body.return_token_strs),
        with_first_token=body.add_special_tokens is not False,
    )


async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt or a chat: {count, max_model_len, tokens, token_strs}."""
    text = services_of(request).text
    converting = text.convert(TextJob("tokenize"), await read_body(request), caller_of(request), parse)
    model, found = await while_connected(request, converting)
    tokens = TokenIds.unpack(found.token_ids)
    texts = None if found.texts is None else list(found.texts)
    return _json(
        Tokenized(count=len(tokens), max_model_len=model.context_length, tokens=list(tokens), token_strs=texts)
    )


async def detokenize(request: Request) -> Response:
    """Return the text of token ids: {prompt}."""
    text = services_of(request).text
    converting = text.convert(TextJob("detokenize"), await read_body(request), caller_of(request), parse)
    _, found = await while_connected(request, converting)
    return _json(Detokenized(prompt=found.text))


def _json(value: Tokenized | Detokenized) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
