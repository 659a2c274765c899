"""Prepares a chat with tools: messages for the template, and the grammar of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from control_plane.generation import ModelFacts
from control_plane.text.request import ChatRequest
from control_plane.text.structure import GrammarCheck
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text.tool import Tool, ToolUse
from control_plane.text.tools.call_grammar import ArgumentSchemas, call_grammar
from control_plane.text.tools.forms import CONTROL_TOKENS, GENERIC, HARMONY, ToolForm
from control_plane.text.tools.harmony import MARKS, harmony_grammar
from control_plane.text.tools.schema import ANY_OBJECT, argument_schema, grammar_of, loosened
from control_plane.text.tools.template_traits import TemplateTraits, traits_of
from control_plane.text.tools.tool_messages import messages_for
from tandem_engine.grammar import Grammar
from tandem_runtime.errors import InvalidRequest, Unsupported


@dataclass(frozen=True)
class ToolPlan:
    """The form of the calls in one answer."""

    form: ToolForm
    control_ids: Mapping[str, int] = field(default_factory=dict)
    """Tokens of their own that are parts of the form. In this answer, the detokenizer returns them by name."""


def call_id(request_id: str, choice_index: int, call_index: int) -> str:
    """Return the id of a call. It is the same after a stream is moved to another worker."""
    digest = blake2b(f"{request_id} {choice_index} {call_index}".encode(), digest_size=12)
    return f"call_{digest.hexdigest()}"


def plan_tools(
    request: ChatRequest, model: ModelFacts, tokenizer: TextTokenizer, check: GrammarCheck
) -> tuple[ChatRequest, ToolPlan | None]:
    """Return the request with messages, tools and grammar for its model, and the plan for its calls.

    Raise InvalidRequest naming a tool whose schema cannot be used.
    """
    use = request.tools
    if not model.chat_template:
        return request, None
    traits = traits_of(model.chat_template, tokenizer.special_tokens)
    offered = () if use is None else use.tools
    in_words = () if traits.offers_tools else offered
    needs = traits.needs_description
    request = replace(
        request,
        messages=tuple(messages_for(traits, request.messages, in_words)),
        template_tools=() if in_words else tuple(tool.for_template(needs_description=needs) for tool in offered),
    )
    if use is None:
        return request, None
    known = tokenizer.grammar_ids
    names = CONTROL_TOKENS if traits.form is not HARMONY else MARKS
    plan = ToolPlan(traits.form, {name: known[name] for name in names if name in known})
    grammar = _grammar(plan, use, traits, request.options.grammar, check)
    return replace(request, options=replace(request.options, grammar=grammar)), plan


def _grammar(
    plan: ToolPlan, use: ToolUse, traits: TemplateTraits, text: Grammar | None, check: GrammarCheck
) -> Grammar:
    rules: dict[str, Any] = {
        "must_call": use.must_call,
        "at_most_one": use.at_most_one or not traits.takes_several_calls,
        "text": None if text is None else _text_schema(plan.form, use, text),
    }
    schemas: ArgumentSchemas = [(tool.name, argument_schema(tool)) for tool in use.callable_tools]
    # The check has a vocabulary of bytes: there, a control token is its name. Of harmony the schemas are checked.
    checked_form = GENERIC if plan.form is HARMONY else plan.form
    try:
        check.check(call_grammar(checked_form, schemas, {}, **rules), field="tools")
    except InvalidRequest:  # find the tool at fault; its own check names it
        schemas = [(tool.name, _enforceable_schema(tool, use, check)) for tool in use.callable_tools]
        check.check(call_grammar(checked_form, schemas, {}, **rules), field="tools")
    if plan.form is HARMONY:
        return harmony_grammar(schemas, plan.control_ids, must_call=use.must_call, text=rules["text"])
    return call_grammar(plan.form, schemas, plan.control_ids, **rules)


def _enforceable_schema(tool: Tool, use: ToolUse, check: GrammarCheck) -> Mapping[str, Any]:
    """Return the schema that the grammar enforces for a tool's arguments.

    If the grammar cannot enforce the tool's own schema, and need not, this is the schema without the keywords that most
    often are the reason, else any object.
    """
    schema = argument_schema(tool)
    try:
        check.check(grammar_of(schema, tool), tool.field)
        return schema
    except InvalidRequest as error:
        if tool.is_strict or use.must_call:
            raise
        first = error
    try:
        check.check(grammar_of(loosened(schema), tool), tool.field)
        return loosened(schema)
    except Unsupported:
        return ANY_OBJECT
    except InvalidRequest:
        raise first from None


def _text_schema(form: ToolForm, use: ToolUse, text: Grammar) -> Mapping[str, Any]:
    """Return the JSON Schema of answers without calls. Raise Unsupported if the form cannot have one."""
    if text.kind not in ("json_object", "json_schema"):
        raise Unsupported(
            "tools can be combined with response_format, and with no other structure; send one of the two",
            field="tools",
        )
    if form.looks_like_json and not use.must_call:
        raise Unsupported(
            "this model writes tool calls as JSON and cannot also answer in JSON; leave out response_format, "
            "or send tool_choice required",
            field="response_format",
        )
    schema: dict[str, Any] = json.loads(text.text) if text.text else ANY_OBJECT
    return schema
