"""The kinds of hostile requests, generated: bounded sizes, the same bytes for the same seed.

Each kind is a function of a `Maker`, which knows the sender's token, the models, and how long a body may become. It
returns what each connection of the kind sends. A kind may be refused or permitted: the measurement asks only that the
sender gets an answer and that nobody else notices.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.hostile.exchange import Script, head, post, request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HEAD_SECONDS = 10.0
"""How long a head may take (`--head-seconds`)."""
BODY_STALL_SECONDS = 10.0
"""How long a body may not move (`--body-stall-seconds`)."""
BODY_RATE_SECONDS = 20.0
"""When a body that moves too slowly must have been refused: the rate counts after its first 10 s."""

_JSON_HEADER = {"Content-Type": "application/json"}


@dataclass
class Maker:
    """Makes bodies of at most `max_body_bytes`."""

    token: str
    model: str
    large_model: str
    """A model that nobody used before, with a vocabulary of 128k tokens."""
    account: str
    max_body_bytes: int
    chance: random.Random = field(default_factory=lambda: random.Random(14))

    def fill(self, item_bytes: float, share: float = 1.0) -> int:
        """Return how many items of that size fill a share of the largest body."""
        return max(1, int(self.max_body_bytes * share / item_bytes))

    def chat(self, messages: Any = None, **fields: Any) -> Sequence[Script]:
        body = {"model": self.model, "messages": messages or [user("hello")], "max_tokens": 1, **fields}
        return [Script([post(CHAT, body, self.token)])]

    def completion(self, prompt: Any = "hello", **fields: Any) -> Sequence[Script]:
        return [
            Script([post(COMPLETIONS, {"model": self.model, "prompt": prompt, "max_tokens": 1, **fields}, self.token)])
        ]

    def raw_chat(self, middle: str, **headers: str) -> Sequence[Script]:
        """A chat whose body has `middle`, JSON or not, behind its model."""
        body = f'{{"model":"{self.model}","max_tokens":1,{middle}}}'.encode("utf-8", "surrogatepass")
        return [Script([post(CHAT, body, self.token, headers)])]

    def native(self, body: dict[str, Any]) -> Sequence[Script]:
        path = f"/client/v4/accounts/{self.account}/ai/run/{self.model}"
        return [Script([post(path, body, self.token)])]


@dataclass(frozen=True)
class Kind:
    name: str
    make: Callable[[Maker], Sequence[Script]]
    limit_seconds: float = 0.0
    """When the limit that it breaks is broken, after its first byte; 0: with its last byte."""
    part: str = "bodies"


KINDS: dict[str, Kind] = {}


def _kind(limit_seconds: float = 0.0, part: str = "bodies") -> Callable[[Callable[[Maker], Sequence[Script]]], Any]:
    def add(make: Callable[[Maker], Sequence[Script]]) -> Callable[[Maker], Sequence[Script]]:
        name = make.__name__.removeprefix("_")
        KINDS[name] = Kind(name, make, limit_seconds, part)
        return make

    return add


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call(index: int, arguments: Any = "{}") -> dict[str, Any]:
    return {"id": f"call-{index}", "type": "function", "function": {"name": "look", "arguments": arguments}}


def _result(index: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call-{index}", "content": "x"}


# ---------------------------------------------------------------------------------------------------- calls and results


@_kind()
def _calls_and_results(make: Maker) -> Sequence[Script]:
    count = make.fill(200)
    calls = [{"role": "assistant", "content": "", "tool_calls": [_call(index)]} for index in range(count)]
    return make.chat([user("go"), *calls, *(_result(index) for index in range(count))])


@_kind()
def _results_of_no_call(make: Maker) -> Sequence[Script]:
    calls = [_call(index) for index in range(make.fill(170, 0.5))]
    results = [_result(-index) for index in range(make.fill(70, 0.5))]
    return make.chat([user("go"), {"role": "assistant", "content": "", "tool_calls": calls}, *results])


@_kind()
def _many_calls_in_one_message(make: Maker) -> Sequence[Script]:
    calls = [_call(0) for _ in range(make.fill(110))]
    return make.chat([user("go"), {"role": "assistant", "content": "", "tool_calls": calls}, user("on")])


@_kind()
def _contents_that_look_like_calls(make: Maker) -> Sequence[Script]:
    content = json.dumps({"name": "look", "arguments": {"a": [1] * 200}})
    pair = [{"role": "assistant", "content": content}, {"role": "tool", "name": "look", "content": "x"}]
    return make.chat([user("go"), *(pair * make.fill(len(content) + 120))])


# ----------------------------------------------------------------------------------------------------- lists of numbers


@_kind()
def _numbers_as_messages(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[' + "1," * make.fill(2) + "1]")


@_kind()
def _numbers_as_content(make: Maker) -> Sequence[Script]:
    return make.chat([user([1] * make.fill(3))])


@_kind()
def _numbers_in_arguments(make: Maker) -> Sequence[Script]:
    arguments = '{"a":[' + "1," * make.fill(2) + "1]}"
    return make.chat(
        [user("go"), {"role": "assistant", "content": "", "tool_calls": [_call(0, arguments)]}, _result(0)]
    )


@_kind()
def _numbers_in_arguments_as_an_object(make: Maker) -> Sequence[Script]:
    call = _call(0, {"a": [1] * make.fill(3)})
    return make.chat([user("go"), {"role": "assistant", "content": "", "tool_calls": [call]}, _result(0)])


@_kind()
def _numbers_as_prompt(make: Maker) -> Sequence[Script]:
    return make.completion([7] * make.fill(3))


@_kind()
def _numbers_as_many_prompts(make: Maker) -> Sequence[Script]:
    return make.completion([[7]] * make.fill(5))


@_kind()
def _numbers_as_logit_bias(make: Maker) -> Sequence[Script]:
    return make.chat(logit_bias={str(index): 1 for index in range(make.fill(14))})


@_kind()
def _numbers_as_stop_ids(make: Maker) -> Sequence[Script]:
    return make.chat(stop_token_ids=list(range(make.fill(8))))


@_kind()
def _numbers_in_metadata(make: Maker) -> Sequence[Script]:
    return make.chat(metadata={"a": [1] * make.fill(3)})


# ------------------------------------------------------------------------------------------------------- odd shapes


@_kind()
def _deep_content(make: Maker) -> Sequence[Script]:
    depth = make.fill(2)
    return make.raw_chat('"messages":[{"role":"user","content":' + "[" * depth + "]" * depth + "}]")


@_kind()
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


@_kind()
def _deep_metadata(make: Maker) -> Sequence[Script]:
    depth = make.fill(6)
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"metadata":' + '{"a":' * depth + "1" + "}" * depth)


@_kind()
def _empty_messages(make: Maker) -> Sequence[Script]:
    return make.chat([user("")] * make.fill(33))


@_kind()
def _messages_of_one_character(make: Maker) -> Sequence[Script]:
    return make.chat([user("x"), {"role": "assistant", "content": "y"}] * make.fill(73))


@_kind()
def _empty_parts(make: Maker) -> Sequence[Script]:
    return make.chat([user([{"type": "text", "text": ""}] * make.fill(30))])


@_kind()
def _unknown_fields(make: Maker) -> Sequence[Script]:
    return make.chat(**{f"f{index}": 1 for index in range(min(200_000, make.fill(12)))})


@_kind()
def _a_field_name_of_a_megabyte(make: Maker) -> Sequence[Script]:
    return make.chat(**{"x" * min(1_000_000, make.max_body_bytes): 1})


@_kind()
def _the_same_field_many_times(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}]' + ',"seed":1' * make.fill(9))


@_kind()
def _a_huge_integer(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"seed":' + "9" * make.fill(1))


@_kind()
def _a_huge_float(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"top_p":0.' + "9" * make.fill(1))


@_kind()
def _a_float_beyond_all_floats(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"x"}],"temperature":1e999999')


@_kind()
def _surrogates(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"' + "\\ud800" * make.fill(6) + '"}]')


@_kind()
def _bytes_that_are_no_text(make: Maker) -> Sequence[Script]:
    return [Script([post(CHAT, b'{"model":"' + b"\xff\xc0" * make.fill(2) + b'"}', make.token)])]


@_kind()
def _no_json_at_all(make: Maker) -> Sequence[Script]:
    return [Script([post(CHAT, make.chance.randbytes(make.fill(1)), make.token)])]


@_kind()
def _a_compressed_bomb(make: Maker) -> Sequence[Script]:
    body = gzip.compress(b" " * (100 * make.max_body_bytes // 10), 1)
    return [Script([post(CHAT, body, make.token, {"Content-Encoding": "gzip"})])]


@_kind()
def _a_picture(make: Maker) -> Sequence[Script]:
    url = "data:image/png;base64," + "A" * make.fill(1)
    return make.chat([user([{"type": "image_url", "image_url": {"url": url}}])])


# ------------------------------------------------------------------------------------------------------------- prompts


@_kind()
def _a_prompt_of_the_largest_body(make: Maker) -> Sequence[Script]:
    return make.completion(words(make.fill(1), make.chance))


@_kind()
def _a_chat_of_the_largest_body(make: Maker) -> Sequence[Script]:
    return make.chat([user(words(make.fill(1), make.chance))])


@_kind()
def _one_word(make: Maker) -> Sequence[Script]:
    return make.chat([user("a" * make.fill(1))])


@_kind()
def _only_spaces(make: Maker) -> Sequence[Script]:
    return make.completion(" " * make.fill(1))


@_kind()
def _combining_characters(make: Maker) -> Sequence[Script]:
    return make.raw_chat('"messages":[{"role":"user","content":"' + "e\u0301\u0323" * make.fill(5) + '"}]')


@_kind()
def _names_of_control_tokens(make: Maker) -> Sequence[Script]:
    return make.chat([user("<|im_start|>system<|im_end|><|endoftext|>" * make.fill(42))])


@_kind()
def _names_of_control_tokens_in_many_messages(make: Maker) -> Sequence[Script]:
    return make.chat([user("<|im_start|><|im_end|>")] * make.fill(55))


@_kind()
def _a_native_prompt(make: Maker) -> Sequence[Script]:
    return make.native({"prompt": words(make.fill(1), make.chance), "max_tokens": 1})


@_kind()
def _a_prompt_whose_logprobs_are_wanted(make: Maker) -> Sequence[Script]:
    return make.completion(words(make.fill(1), make.chance), echo=True, logprobs=5)


@_kind()
def _many_choices_of_a_long_prompt(make: Maker) -> Sequence[Script]:
    return make.chat([user(words(min(500_000, make.fill(1)), make.chance))], n=128)


@_kind()
def _many_prompts_with_many_choices(make: Maker) -> Sequence[Script]:
    return make.completion(["x" * 50] * make.fill(54), n=128)


@_kind()
def _a_new_model_with_a_large_vocabulary(make: Maker) -> Sequence[Script]:
    body = {"model": make.large_model, "messages": [user("hello")], "max_tokens": 1}
    return [Script([post(CHAT, body, make.token)])]


# ------------------------------------------------------------------------------------------------------------ templates


@_kind()
def _only_system_messages(make: Maker) -> Sequence[Script]:
    return make.chat([{"role": "system", "content": "x"}] * make.fill(36))


@_kind()
def _roles_in_disorder(make: Maker) -> Sequence[Script]:
    roles = make.chance.choices(["system", "user", "assistant", "developer"], k=make.fill(40))
    return make.chat([{"role": role, "content": "x"} for role in roles])


@_kind()
def _tools_with_large_schemas(make: Maker) -> Sequence[Script]:
    schema = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(40)}}
    count = make.fill(len(json.dumps(schema)) + 80)
    functions = [{"name": f"f{index}", "description": "d", "parameters": schema} for index in range(count)]
    return make.chat(tools=[{"type": "function", "function": each} for each in functions])


# ---------------------------------------------------------------------------------------------------- structured output


@_kind()
def _regex_of_nested_quantifiers(make: Maker) -> Sequence[Script]:
    return make.chat(guided_regex="(((a+)+)+)+" * 400 + "b")


@_kind()
def _regex_of_nested_counts(make: Maker) -> Sequence[Script]:
    return make.chat(guided_regex="((((a{1,100}){1,100}){1,100}){1,100}){1,100}")


@_kind()
def _regex_of_unicode_classes(make: Maker) -> Sequence[Script]:
    return make.chat(guided_regex=r"[\p{L}&&[^a-z]]{1,2000}" * 60)


@_kind()
def _choices_of_64_kb(make: Maker) -> Sequence[Script]:
    return make.chat(guided_choice=[f"{index:05d}-{make.chance.random()}" for index in range(2400)])


@_kind()
def _grammar_with_many_rules(make: Maker) -> Sequence[Script]:
    rules = [f"r{index}: (r{index + 1} | r{(index * 7) % 900})* r{index + 1}" for index in range(900)]
    return make.chat(guided_grammar="\n".join(["start: r0", *rules, 'r900: "a"']))


@_kind()
def _schema_of_all_of(make: Maker) -> Sequence[Script]:
    schema: Any = {"type": "object", "properties": {"a": {"type": "string"}}}
    for index in range(14):
        schema = {"allOf": [schema, {"anyOf": [{"required": [f"a{index}"]}, {"required": [f"b{index}"]}]}]}
    return make.chat(guided_json=schema)


@_kind()
def _schema_of_any_of(make: Maker) -> Sequence[Script]:
    schema: Any = {"type": "string"}
    for index in range(11):
        schema = {"anyOf": [schema, {"type": "array", "items": schema, "minItems": index}]}
    return make.chat(guided_json=schema)


@_kind()
def _schema_of_references_in_a_circle(make: Maker) -> Sequence[Script]:
    definitions = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{(index + 1) % 300}"}]} for index in range(300)}
    return make.chat(guided_json={"$defs": definitions, "$ref": "#/$defs/d0"})


@_kind()
def _schema_of_many_properties(make: Maker) -> Sequence[Script]:
    properties = {f"p{index}": {"type": "string", "pattern": "^(a|b)*$"} for index in range(1200)}
    return make.chat(guided_json={"type": "object", "properties": properties, "required": list(properties)})


@_kind()
def _schema_of_a_large_enum(make: Maker) -> Sequence[Script]:
    return make.chat(guided_json={"enum": list(range(make.fill(8)))})


@_kind()
def _long_stop_strings_and_a_regex(make: Maker) -> Sequence[Script]:
    return make.chat(stop=["a" * 63_999 + "b"], guided_regex="a*", max_tokens=200)


@_kind()
def _many_stop_strings(make: Maker) -> Sequence[Script]:
    return make.chat(stop=["x"] * make.fill(5))


# ------------------------------------------------------------------------------------------------------ names, metrics


@_kind()
def _a_model_name_of_a_megabyte(make: Maker) -> Sequence[Script]:
    body = {"model": "m" * min(1_000_000, make.max_body_bytes), "messages": [user("x")]}
    return [Script([post(CHAT, body, make.token)])]


@_kind()
def _many_made_up_models(make: Maker) -> Sequence[Script]:
    bodies = [{"model": f"made-up-{make.chance.random()}", "messages": [user("x")]} for _ in range(100)]
    return [Script([post(CHAT, body, make.token)]) for body in bodies]


@_kind()
def _many_long_sessions(make: Maker) -> Sequence[Script]:
    body = {"model": make.model, "messages": [user("x")], "max_tokens": 1}
    names = (f"{index}" + "s" * 60_000 for index in range(50))
    return [Script([post(CHAT, body, make.token, {"x-session-affinity": name})]) for name in names]


@_kind()
def _a_long_account_name(make: Maker) -> Sequence[Script]:
    return [Script([post(f"/client/v4/accounts/{'a' * 60_000}/ai/run/{make.model}", {"prompt": "x"}, make.token)])]


@_kind()
def _a_long_api_token(make: Maker) -> Sequence[Script]:
    return [Script([post(CHAT, {"model": make.model, "messages": [user("x")]}, "t" * 60_000)])]


# ------------------------------------------------------------------------------------------------------- heads, wires


@_kind(part="connections")
def _a_giant_header(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/healthz", headers={"X-Long": "x" * (16 * make.max_body_bytes // 10)})])]


@_kind(part="connections")
def _many_headers(make: Maker) -> Sequence[Script]:
    headers = {f"X-{index}": "x" for index in range(make.fill(12))}
    return [Script([request("GET", "/healthz", headers=headers)])]


@_kind(HEAD_SECONDS, part="connections")
def _a_head_without_end(make: Maker) -> Sequence[Script]:
    more = b"X-More: xxxxxxxx\r\n" * 4096
    return [Script([b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n", *([more] * 40)])]


@_kind(part="connections")
def _a_giant_url(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/v1/models?x=" + "x" * (8 * make.max_body_bytes // 10))])]


@_kind(part="connections")
def _a_long_query(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/v1/models?" + "a=1&" * 3_000, token=make.token)])]


@_kind(HEAD_SECONDS, part="connections")
def _half_a_head(make: Maker) -> Sequence[Script]:
    return [Script([b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Half:"])] * 40


@_kind(HEAD_SECONDS, part="connections")
def _a_head_byte_by_byte(make: Maker) -> Sequence[Script]:
    steps: list[bytes | float] = []
    for byte in b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 200:
        steps += [bytes([byte]), 0.25]
    return [Script(steps)] * 10


@_kind(BODY_STALL_SECONDS, part="connections")
def _a_body_that_never_comes(make: Maker) -> Sequence[Script]:
    start = head("POST", CHAT, {"Content-Length": "5000000"}, make.token)
    return [Script([start + b'{"model":'])] * 20


@_kind(BODY_RATE_SECONDS, part="connections")
def _a_body_byte_by_byte(make: Maker) -> Sequence[Script]:
    steps: list[bytes | float] = [head("POST", CHAT, {"Content-Length": "100000"}, make.token)]
    for _ in range(600):
        steps += [b" ", 0.1]
    return [Script(steps)] * 20


@_kind(part="connections")
def _a_promise_of_too_much(make: Maker) -> Sequence[Script]:
    return [Script([head("POST", CHAT, {"Content-Length": "999999999999"}, make.token)])]


@_kind(part="connections")
def _a_promise_that_is_no_number(make: Maker) -> Sequence[Script]:
    return [Script([head("POST", CHAT, {"Content-Length": "1e9"}, make.token) + b"{}"])]


@_kind(part="connections")
def _length_and_chunks(make: Maker) -> Sequence[Script]:
    both = {"Content-Length": "5", "Transfer-Encoding": "chunked"}
    return [Script([head("POST", CHAT, both, make.token) + b"0\r\n\r\n"])]


def _chunked(make: Maker, body: bytes) -> Sequence[Script]:
    return [Script([head("POST", CHAT, {"Transfer-Encoding": "chunked"}, make.token) + body])]


@_kind(part="connections")
def _chunks_of_one_byte(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"1\r\n \r\n" * make.fill(6) + b"0\r\n\r\n")


@_kind(part="connections")
def _long_chunk_extensions(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"1;" + b"x" * make.fill(1) + b"\r\n{\r\n0\r\n\r\n")


@_kind(part="connections")
def _a_chunk_of_no_size(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"zz\r\n{}\r\n0\r\n\r\n")


@_kind(BODY_STALL_SECONDS, part="connections")
def _a_chunk_of_all_sizes(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"f" * 15 + b"\r\n{}")


@_kind(part="connections")
def _long_trailers(make: Maker) -> Sequence[Script]:
    return _chunked(make, b"2\r\n{}\r\n0\r\n" + b"X-After: xxxxxxxxxxxxxxxx\r\n" * make.fill(27) + b"\r\n")


@_kind(BODY_STALL_SECONDS, part="connections")
def _chunks_without_end(make: Maker) -> Sequence[Script]:
    return _chunked(make, (b"10000\r\n" + b" " * 65_536 + b"\r\n") * (2 * make.max_body_bytes // 65_536 + 1))


@_kind(part="connections")
def _a_thousand_pipelined_requests(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/v1/models", token=make.token) * 1000])]


@_kind(part="connections")
def _pipelined_half_and_whole(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/healthz") + b"GET /healthz HTTP/1.1\r\nHo"])]


@_kind(part="connections")
def _no_http(make: Maker) -> Sequence[Script]:
    return [Script([b"\x16\x03\x01" + make.chance.randbytes(2000) + b"\r\n\r\n"])]


@_kind(HEAD_SECONDS, part="connections")
def _many_connections_that_say_nothing(make: Maker) -> Sequence[Script]:
    return [Script([b""])] * 200


@_kind(part="connections")
def _a_hundred_at_once(make: Maker) -> Sequence[Script]:
    return [Script([request("GET", "/")])] * 100


@_kind(part="connections")
def _an_expectation_of_nothing(make: Maker) -> Sequence[Script]:
    wanted = {"Expect": "100-continue", "Content-Length": "999999999"}
    return [Script([head("POST", CHAT, wanted, make.token)])]


# ---------------------------------------------------------------------------------------------------------------- words


def words(num_bytes: int, chance: random.Random) -> str:
    """Return ordinary text: words of 2 to 9 letters."""
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    vocabulary = ["".join(chance.choices(letters, range(26, 0, -1), k=chance.randint(2, 9))) for _ in range(2000)]
    text = " ".join(chance.choices(vocabulary, k=num_bytes // 6 + 2))
    return (text * 2)[: max(1, num_bytes)]


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
