"""Tests how answers are compared with those of vLLM alone."""

from __future__ import annotations

from benchmarks.vllm_parity.__main__ import compare
from benchmarks.vllm_parity.sides import Alone
from benchmarks.vllm_parity.work import KINDS, prompts, requests

MARGIN = 0.01


def compared(answer: list[int], margins: list[float]) -> tuple[int, int, int]:
    found = compare(Alone([[5, 6, 7]], [margins], 0.0, 0), [answer], MARGIN)
    return found.num_equal, found.num_close_calls, found.num_wrong


def test_an_answer_may_differ_from_the_first_close_call_on_and_nowhere_else() -> None:
    assert compared([5, 6, 7], [1.0, 0.001, 1.0]) == (1, 0, 0)
    assert compared([5, 8, 9], [1.0, 0.001, 1.0]) == (0, 1, 0), "the two best were as good as equal"
    assert compared([5, 6, 9], [1.0, 0.001, 1.0]) == (0, 1, 0), (
        "behind a close call another batch may have another state"
    )
    assert compared([5, 8, 9], [1.0, 1.0, 0.001]) == (0, 0, 1), "a close call later is no excuse"


def test_the_greedy_requests_have_the_prompts_that_vllm_alone_gets() -> None:
    asked = requests(dict.fromkeys(KINDS, 3), seed=7)
    assert [each.prompt for each in asked if each.kind == "greedy"] == prompts(3, 7)
    assert len({tuple(each.prompt) for each in asked}) == len({each.name for each in asked}) == 12
    moved = asked[0].request([1, 2])
    assert moved.token_ids == [*asked[0].prompt, 1, 2] and moved.num_prompt_tokens == len(asked[0].prompt)
