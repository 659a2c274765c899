"""The kinds of hostile requests to the endpoints that convert tokens, and to a chat template's variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.hostile.exchange import Script, post
from benchmarks.hostile.maker import Kinds, Maker, user, words

CONVERSIONS = Kinds("bodies")


@CONVERSIONS.kind()
def _tokenize_the_largest_body(make: Maker) -> Sequence[Script]:
    return _tokenize(make, prompt=words(make.fill(1) - 200, make.chance), return_token_strs=True)


@CONVERSIONS.kind()
def _tokenize_one_word(make: Maker) -> Sequence[Script]:
    return _tokenize(make, prompt="a" * (make.fill(1) - 200))


@CONVERSIONS.kind()
def _tokenize_many_messages(make: Maker) -> Sequence[Script]:
    return _tokenize(make, messages=[user("<|im_end|>")] * make.fill(45))


@CONVERSIONS.kind()
def _detokenize_a_million_ids(make: Maker) -> Sequence[Script]:
    return _detokenize(make, [7] * min(1_000_000, make.fill(3)))


@CONVERSIONS.kind()
def _detokenize_too_many_ids(make: Maker) -> Sequence[Script]:
    return _detokenize(make, [7] * make.fill(3))


@CONVERSIONS.kind()
def _detokenize_huge_ids(make: Maker) -> Sequence[Script]:
    return _detokenize(make, [10**17] * make.fill(20))


@CONVERSIONS.kind()
def _template_variables_of_a_megabyte(make: Maker) -> Sequence[Script]:
    return make.chat(chat_template_kwargs={"style": "x" * make.fill(1, 0.9)})


@CONVERSIONS.kind()
def _many_template_variables(make: Maker) -> Sequence[Script]:
    return make.chat(chat_template_kwargs={f"v{index}": index for index in range(make.fill(18))})


@CONVERSIONS.kind()
def _template_variables_that_replace_messages(make: Maker) -> Sequence[Script]:
    return make.chat(chat_template_kwargs={"messages": [user("x")] * 100, "add_generation_prompt": False})


@CONVERSIONS.kind()
def _thinking_of_a_megabyte(make: Maker) -> Sequence[Script]:
    thought = {"role": "assistant", "content": "x", "reasoning_content": "<think>" * make.fill(8)}
    return make.chat([user("go"), thought, user("on")])


def _tokenize(make: Maker, **fields: Any) -> Sequence[Script]:
    return [Script([post("/tokenize", {"model": make.model, **fields}, make.token)])]


def _detokenize(make: Maker, tokens: list[int]) -> Sequence[Script]:
    return [Script([post("/detokenize", {"model": make.model, "tokens": tokens}, make.token)])]
