"""Tests that a step in which several grammars have no continuation names all of their requests at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from tandem_engine.core import RequestsFailed
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.grammar.matcher import GrammarFailed, MakeMatcher
from tandem_engine.grammar import Grammar
from tandem_engine.ops.sampling import Words
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.batch import ScheduledRun
from tandem_engine.scheduling.request import Request


class _Matcher:
    builder = None

    def __init__(self, text: str) -> None:
        self._text = text
        self.num_asked = 0

    def request_masks(self, new_tokens: list[int], draft_tokens: Sequence[int]) -> None:
        self.num_asked += 1

    def masks(self) -> Sequence[Words]:
        if self._text.startswith("ends"):
            raise GrammarFailed(f"{self._text} has no continuation")
        return [np.zeros(1, np.int32)]


def _compile(grammar: Grammar) -> MakeMatcher:
    return lambda: _Matcher(grammar.text)


def _run(name: str, text: str) -> ScheduledRun:
    request = Request(name, [1, 2], 2, SamplingParams(max_tokens=4, grammar=Grammar("regex", text)))
    return ScheduledRun(request, 0, 2, samples=True)


def test_all_requests_whose_grammars_cannot_go_on_fail_at_once_each_with_its_own_message() -> None:
    masks = GrammarMasks(lambda: _compile)
    runs = [_run("a", "ends 1"), _run("b", "goes on"), _run("c", "ends 2")]
    masks.begin(runs)
    with pytest.raises(RequestsFailed) as caught:
        masks.take()
    error = caught.value
    assert error.request_ids == ("a", "c") and error.is_callers_fault
    assert [error.message_of(name) for name in error.request_ids] == [
        "ends 1 has no continuation",
        "ends 2 has no continuation",
    ]
    masks.begin(runs[1:2])
    assert list(masks.take()) == ["b"]
