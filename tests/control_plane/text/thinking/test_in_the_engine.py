"""The engine follows harmony's grammar with control tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from control_plane.text.tools.harmony import MARKS, harmony_grammar
from tandem_engine.execution.grammar.guided import Guide
from tandem_engine.execution.grammar.matcher import GrammarFailed
from tandem_engine.ops.cpu import KernelsUnavailable, load_cpu_ops
from tests.control_plane.api.test_thinking import tokenizer
from tests.control_plane.text.tools.test_call_grammar import TOOLS

END = 1
THOUGHT = "<|channel|>analysis<|message|>So {it} is.<|end|><|start|>assistant"
SAID = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"city": "Oslo"}'
OTHER_CALL = ' to=functions.get<|channel|>commentary json<|message|>{"city": "Oslo"}'
FINAL = "<|channel|>final<|message|>"
NUMBERS = {"type": "array", "items": {"type": "integer"}}


@pytest.fixture(scope="module", params=["by the op library's threads", "in Python"])
def library(request: pytest.FixtureRequest) -> ctypes.CDLL | None:
    """What makes the masks."""
    if request.param == "in Python":
        return None
    try:
        return load_cpu_ops().library
    except KernelsUnavailable as error:
        pytest.skip(str(error))


class Answers:
    """Which answers a grammar allows."""

    def __init__(self, folder: Path, library: ctypes.CDLL | None) -> None:
        self._tokenizer = tokenizer()
        self._tokenizer.save(str(folder / "tokenizer.json"))
        self._guide = Guide(folder / "tokenizer.json", self._tokenizer.get_vocab_size(), [END], library)
        self._ids: dict[str, Any] = {mark: self._tokenizer.token_to_id(mark) for mark in MARKS}

    def allows(self, answer: str, *, must_call: bool = False, text: Mapping[str, Any] | None = None) -> bool:
        """Return whether every token of an answer may follow those before, and the end the last one."""
        matcher = self._guide(harmony_grammar(TOOLS, self._ids, must_call=must_call, text=text))()
        before: list[int] = []
        for token in [*self._tokenizer.encode(answer, add_special_tokens=False).ids, END]:
            matcher.request_masks(before, [])
            if matcher.builder:
                matcher.builder.begin([matcher])
                matcher.builder.finish()
            try:
                (mask,) = matcher.masks()
            except GrammarFailed:
                return False
            if not mask[token // 32] >> token % 32 & 1:
                return False
            before = [token]
        return True


@pytest.mark.parametrize("before", ["", THOUGHT, THOUGHT + SAID + THOUGHT])
def test_messages_come_in_channels_and_calls_have_their_schemas(
    before: str, tmp_path: Path, library: ctypes.CDLL | None
) -> None:
    answers = Answers(tmp_path, library)
    assert answers.allows(before + FINAL + "Yes, {it} is.")
    assert answers.allows(before + CALL) and answers.allows(before + OTHER_CALL)
    assert not answers.allows(before + CALL.replace('"Oslo"', "7")), "the city is a text"
    assert not answers.allows(before + CALL.replace("get", "got")) and not answers.allows(before + "Yes.")


def test_a_call_may_be_required_and_a_text_may_have_a_schema(tmp_path: Path, library: ctypes.CDLL | None) -> None:
    answers = Answers(tmp_path, library)
    assert answers.allows(THOUGHT + CALL, must_call=True) and not answers.allows(FINAL + "Yes.", must_call=True)
    assert answers.allows(FINAL + "[1,2]", text=NUMBERS) and not answers.allows(FINAL + "Yes.", text=NUMBERS)
