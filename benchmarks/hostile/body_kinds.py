"""The kinds of hostile requests whose bodies, or names, cost much."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from typing import Any

from benchmarks.hostile.exchange import Script, post
from benchmarks.hostile.maker import CHAT, Kinds, Maker, user, words

BODIES = Kinds("bodies")


def _call(index: int, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": f"call-{index}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def _result(index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{index}", "content": "x"}


# ---------------------------------------------------------------------------------------------------- calls and results


@BODIES.kind()
def _calls_and_results(make: Maker) -> Sequence[Script]:
    count = make.fill(200)
    calls = [{"role": "assistant", "content": "", "tool_calls": [_call(index)]} for index in range(count)]
    return make.chat([user("go"), *calls, *(_result(index) for index in range(count))])


@BODIES.kind()
def _results_of_no_call(make: Maker) -> Sequence[Script]:
    calls = [_call(index) for index in range(make.fill(170, 0.5))]
    results = [_result(-index) for index in range(make.fill(70, 0.5))]
    return make.chat([user("go"), {"role": "assistant", "content": "", "tool_calls": calls}, *results])


@BODIES.kind()
def _many_calls_in_one_message(make: Maker) -> Sequence[Script]:
    calls = [_call(0) for _ in range(make.fill(110))]
    return make.chat([user("go"), {"role": "assistant", "content": "", "tool_calls": calls}, user("on")])


@BODIES.kind()
def _contents_that_look_like_calls(make: Maker) -> Sequence[Script]:
    content = json.dumps({"name": "look", "arguments": {"a": [1] * 200}})
    pair = [{"role": "assistant", "content": content}, {"role": "tool", "name": "look", "content": "x"}]
    return make.chat([user("go"), *(pair * make.fill(len(content) + 120))])


# ----------------------------------------------------------------------------------------------------- lists of numbers


@BODIES.kind()
def _numbers_as_messages(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[' + "1," * make.fill(2) + "1]")


@BODIES.kind()
def _numbers_as_content(make: Maker) -> Sequence[Script]:
    return make.chat([user([1] * make.fill(3))])


@BODIES.kind()
def _numbers_in_arguments(make: Maker) -> Sequence[Script]:
    arguments = '{"a":[' + "1," * make.fill(2) + "1]}"
    return make.chat(
        [user("go"), {"role": "assistant", "content": "", "tool_calls": [_call(0, arguments)]}, _result(0)]
    )


@BODIES.kind()
def _numbers_in_arguments_as_an_object(make: Maker) -> Sequence[Script]:
    call = _call(0, {"a": [1] * make.fill(3)})
    return make.chat([user("go"), {"role": "assistant", "content": "", "tool_calls": [call]}, _result(0)])


@BODIES.kind()
def _numbers_as_prompt(make: Maker) -> Sequence[Script]:
    return make.completion([7] * make.fill(3))


@BODIES.kind()
def _numbers_as_many_prompts(make: Maker) -> Sequence[Script]:
    return make.completion([[7]] * make.fill(5))


@BODIES.kind()
def _numbers_as_logit_bias(make: Maker) -> Sequence[Script]:
    return make.chat(logit_bias={str(index): 1 for index in range(make.fill(14))})


@BODIES.kind()
def _numbers_as_stop_ids(make: Maker) -> Sequence[Script]:
    return make.chat(stop_token_ids=list(range(make.fill(8))))


@BODIES.kind()
def _numbers_in_metadata(make: Maker) -> Sequence[Script]:
    return make.chat(metadata={"a": [1] * make.fill(3)})


# ------------------------------------------------------------------------------------------------------- odd shapes


@BODIES.kind()
def _deep_content(make: Maker) -> Sequence[Script]:
    depth = make.fill(2)
    return make.raw_chat('"messages":[{"role":"user","content":' + "[" * depth + "]" * depth + "}]")


@BODIES.kind()
def _deep_parameters(make: Maker) -> Sequence[Script]:
    depth, texts = 900, ["x"] * make.fill(6)
    parameters: Any = {"enum": texts}
    for _ in range(depth):
        parameters = {"properties": {"a": parameters}}
    return make.raw_chat(
        '"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function","function":{"name":"f","parameters":'
        + _dumps(parameters)
        + "}}]"
    )


@BODIES.kind()
def _deep_metadata(make: Maker) -> Sequence[Script]:
    depth = make.fill(6)
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"metadata":' + '{"a":' * depth + "1" + "}" * depth)


@BODIES.kind()
def _empty_messages(make: Maker) -> Sequence[Script]:
    return make.chat([user("")] * make.fill(33))


@BODIES.kind()
def _messages_of_one_character(make: Maker) -> Sequence[Script]:
    return make.chat([user("x"), {"role": "assistant", "content": "y"}] * make.fill(73))


@BODIES.kind()
def _empty_parts(make: Maker) -> Sequence[Script]:
    return make.chat([user([{"type": "text", "text": ""}] * make.fill(30))])


@BODIES.kind()
def _unknown_fields(make: Maker) -> Sequence[Script]:
    return make.chat(**{f"f{index}": 1 for index in range(min(200_000, make.fill(12)))})


@BODIES.kind()
def _a_field_name_of_a_megabyte(make: Maker) -> Sequence[Script]:
    return make.chat(**{"x" * min(1_000_000, make.max_body_bytes): 1})


@BODIES.kind()
def _the_same_field_many_times(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}]' + ',"seed":1' * make.fill(9))


@BODIES.kind()
def _a_huge_integer(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"seed":' + "9" * make.fill(1))


@BODIES.kind()
def _a_huge_float(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"top_p":0.' + "9" * make.fill(1))


@BODIES.kind()
def _a_float_beyond_all_floats(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"temperature":1e999999')


@BODIES.kind()
def _surrogates(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"' + "\\ud800" * make.fill(6) + '"}]')


@BODIES.kind()
def _bytes_that_are_no_text(make: Maker) -> Sequence[Script]:
    return [Script([post(CHAT, b'{"model":"' + b"\xff\xc0" * make.fill(2) + b'"}', make.token)])]


@BODIES.kind()
def _no_json_at_all(make: Maker) -> Sequence[Script]:
    return [Script([post(CHAT, make.chance.randbytes(make.fill(1)), make.token)])]


@BODIES.kind()
def _a_compressed_bomb(make: Maker) -> Sequence[Script]:
    body = gzip.compress(b" " * (100 * make.max_body_bytes // 10), 1)
    return [Script([post(CHAT, body, make.token, {"Content-Encoding": "gzip"})])]


@BODIES.kind()
def _a_picture(make: Maker) -> Sequence[Script]:
    url = "data:image/png;base64," + "A" * make.fill(1)
    return make.chat([user([{"type": "image_url", "image_url": {"url": url}}])])


# ------------------------------------------------------------------------------------------------------------- prompts


@BODIES.kind()
def _a_prompt_of_the_largest_body(make: Maker) -> Sequence[Script]:
    return make.completion(words(make.fill(1), make.chance))


@BODIES.kind()
def _a_chat_of_the_largest_body(make: Maker) -> Sequence[Script]:
    return make.chat([user(words(make.fill(1), make.chance))])


@BODIES.kind()
def _one_word(make: Maker) -> Sequence[Script]:
    return make.chat([user("a" * make.fill(1))])


@BODIES.kind()
def _only_spaces(make: Maker) -> Sequence[Script]:
    return make.completion(" " * make.fill(1))


@BODIES.kind()
def _combining_characters(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"' + "e\u0301\u0323" * make.fill(5) + '"}]')


@BODIES.kind()
def _names_of_control_tokens(make: Maker) -> Sequence[Script]:
    return make.chat([user("<|im_start|>system<|im_end|><|endoftext|>" * make.fill(42))])


@BODIES.kind()
def _names_of_control_tokens_in_many_messages(make: Maker) -> Sequence[Script]:
    return make.chat([user("<|im_start|><|im_end|>")] * make.fill(55))


@BODIES.kind()
def _a_native_prompt(make: Maker) -> Sequence[Script]:
    return make.native({"prompt": words(make.fill(1), make.chance), "max_tokens": 1})


@BODIES.kind()
def _a_prompt_whose_logprobs_are_wanted(make: Maker) -> Sequence[Script]:
    return make.completion(words(make.fill(1), make.chance), echo=True, logprobs=5)


@BODIES.kind()
def _many_choices_of_a_long_prompt(make: Maker) -> Sequence[Script]:
    return make.chat([user(words(min(500_000, make.fill(1)), make.chance))], n=128)


@BODIES.kind()
def _many_prompts_with_many_choices(make: Maker) -> Sequence[Script]:
    return make.completion(["x" * 50] * make.fill(54), n=128)


@BODIES.kind()
def _a_new_model_with_a_large_vocabulary(make: Maker) -> Sequence[Script]:
    body = {"model": make.large_model, "messages": [user("hello")], "max_tokens": 1}
    return [Script([post(CHAT, body, make.token)])]


# ------------------------------------------------------------------------------------------------------------ templates


@BODIES.kind()
def _only_system_messages(make: Maker) -> Sequence[Script]:
    return make.chat([{"role": "system", "content": "x"}] * make.fill(36))


@BODIES.kind()
def _roles_in_disorder(make: Maker) -> Sequence[Script]:
    roles = make.chance.choices(["system", "user", "assistant", "developer"], k=make.fill(40))
    return make.chat([{"role": role, "content": "x"} for role in roles])


@BODIES.kind()
def _tools_with_large_schemas(make: Maker) -> Sequence[Script]:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(40)}}
    count = make.fill(len(json.dumps(schema)) + 80)
    functions = [{"name": f"f{index}", "description": "d", "parameters": schema} for index in range(count)]
    return make.chat(tools=[{"type": "function", "function": each} for each in functions])


# ---------------------------------------------------------------------------------------------------- structured output


@BODIES.kind()
def _regex_of_nested_quantifiers(make: Maker) -> Sequence[Script]:
    return make.chat(guided_regex="(((a+)+)+)+" * 400 + "b")


@BODIES.kind()
def _regex_of_nested_counts(make: Maker) -> Sequence[Script]:
    return make.chat(guided_regex="((((a{1,100}){1,100}){1,100}){1,100}){1,100}")


@BODIES.kind()
def _regex_of_unicode_classes(make: Maker) -> Sequence[Script]:
    return make.chat(guided_regex=r"[\p{L}&&[^a-z]]{1,2000}" * 60)


@BODIES.kind()
def _choices_of_64_kb(make: Maker) -> Sequence[Script]:
    return make.chat(guided_choice=[f"{index:05d}-{make.chance.random()}" for index in range(2400)])


@BODIES.kind()
def _grammar_with_many_rules(make: Maker) -> Sequence[Script]:
    rules = [f"r{index}: (r{index + 1} | r{(index * 7) % 900})* r{index + 1}" for index in range(900)]
    return make.chat(guided_grammar="\n".join(["start: r0", *rules, 'r900: "a"']))


@BODIES.kind()
def _schema_of_all_of(make: Maker) -> Sequence[Script]:
    schema: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
    for index in range(14):
        schema = {"allOf": [schema, {"anyOf": [{"required": [f"a{index}"]}, {"required": [f"b{index}"]}]}]}
    return make.chat(guided_json=schema)


@BODIES.kind()
def _schema_of_any_of(make: Maker) -> Sequence[Script]:
    schema: Any = {"type": "string"}
    for index in range(11):
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": index}]}
    return make.chat(guided_json=schema)


@BODIES.kind()
def _schema_of_references_in_a_circle(make: Maker) -> Sequence[Script]:
    definitions = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{(index + 1) % 300}"}]} for index in range(300)}
    return make.chat(guided_json={"$defs": definitions, "$ref": "#/$defs/d0"})


@BODIES.kind()
def _schema_of_many_properties(make: Maker) -> Sequence[Script]:
    properties = {f"p{index}": {"type": "string", "pattern": "^(a|b)*$"} for index in range(1200)}
    return make.chat(guided_json={"type": "object", "properties": properties, "required": list(properties)})


@BODIES.kind()
def _schema_of_a_large_enum(make: Maker) -> Sequence[Script]:
    return make.chat(guided_json={"enum": list(range(make.fill(8)))})


@BODIES.kind()
def _long_stop_strings_and_a_regex(make: Maker) -> Sequence[Script]:
    return make.chat(stop=["a" * 63_999 + "b"], guided_regex="a*", max_tokens=200)


@BODIES.kind()
def _many_stop_strings(make: Maker) -> Sequence[Script]:
    return make.chat(stop=["x"] * make.fill(5))


# ------------------------------------------------------------------------------------------------------ names, metrics


@BODIES.kind()
def _a_model_name_of_a_megabyte(make: Maker) -> Sequence[Script]:
    body = {"model": "m" * min(1_000_000, make.max_body_bytes), "messages": [user("x")]}
    return [Script([post(CHAT, body, make.token)])]


@BODIES.kind()
def _many_made_up_models(make: Maker) -> Sequence[Script]:
    bodies = [{"model": f"made-up-{make.chance.random()}", "messages": [user("x")]} for _ in range(100)]
    return [Script([post(CHAT, body, make.token)]) for body in bodies]


@BODIES.kind()
def _many_long_sessions(make: Maker) -> Sequence[Script]:
    body = {"model": make.model, "messages": [user("x")], "max_tokens": 1}
    names = (f"{index}" + "s" * 60_000 for index in range(50))
    return [Script([post(CHAT, body, make.token, {"x-session-affinity": name})]) for name in names]


@BODIES.kind()
def _a_long_account_name(make: Maker) -> Sequence[Script]:
    return [Script([post(f"/client/v4/accounts/{'a' * 60_000}/ai/run/{make.model}", {"prompt": "x"}, make.token)])]


@BODIES.kind()
def _a_long_api_token(make: Maker) -> Sequence[Script]:
    return [Script([post(CHAT, {"model": make.model, "messages": [user("x")]}, "t" * 60_000)])]


def _dumps(value: Any) -> str:
    """Write JSON of any depth; json.dumps is recursive and has a limit of about a thousand levels."""
    pieces, stack = [], [value]
    while stack:
        each = stack.pop()
        if isinstance(each, dict):
            (name, inner), *_ = each.items()
            pieces.append(f"{{{json.dumps(name)}:")
            stack += [_Close(), inner]
        else:
            pieces.append("}" if isinstance(each, _Close) else json.dumps(each))
    return "".join(pieces)


class _Close:
    """The end of an object."""
