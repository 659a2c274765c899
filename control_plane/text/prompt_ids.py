"""Which token ids does a request begin with?"""

from __future__ import annotations

from control_plane.generation import ModelDescription
from control_plane.text.request import ChatRequest, CompletionRequest, check_token_ids
from control_plane.text.template import ChatTemplate
from control_plane.text.tokenizer import TextTokenizer
from tandem_runtime.errors import InvalidRequest


async def prompt_ids(
    request: CompletionRequest | ChatRequest, model: ModelDescription, tokenizer: TextTokenizer
) -> list[int]:
    """Return a prompt or a rendered chat as token ids; raises InvalidRequest."""
    if isinstance(request, CompletionRequest):
        return await _completion_ids(request, model, tokenizer)
    if not request.messages:
        raise InvalidRequest("messages is empty; send at least one message", field="messages")
    if not model.chat_template:
        raise InvalidRequest(f"{model.model_id} has no chat template; send a prompt instead", field="messages")
    template = ChatTemplate(model.chat_template, tokenizer.special_tokens)
    return await tokenizer.chat_ids(template, request.messages, request.template_tools)


async def _completion_ids(request: CompletionRequest, model: ModelDescription, tokenizer: TextTokenizer) -> list[int]:
    if not request.prompt:
        raise InvalidRequest("prompt is empty; send at least one character or token id", field="prompt")
    if isinstance(request.prompt, str):
        return await tokenizer.prompt_ids(request.prompt, control_tokens=request.control_tokens)
    check_token_ids("prompt", request.prompt, model)
    return list(request.prompt)
