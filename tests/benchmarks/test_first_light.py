"""The command measures what its documentation states, with the right prompts and figure names."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from tokenizers import Tokenizer

from benchmarks.first_light.__main__ import document
from benchmarks.lib.arrangements import Workload, arrangements
from benchmarks.lib.measuring import Measured
from benchmarks.lib.prompts import prompts
from benchmarks.lib.random_model import words
from benchmarks.lib.report import markdown
from benchmarks.lib.stats import STEPS, Answer
from benchmarks.lib.traces import AGGREGATED_STEPS, traces_of
from tandem_engine.demo import checkpoint_path
from tests.otlp_sink import OtlpSink, ReceivedSpan

_LATENCIES = ("ttft_ms", "itl_ms", "hand_over_gap_ms", "tpot_ms", "request_ms")


def _figures() -> dict[str, float]:
    figures = {f"{name}.p{percent}": 1.0 for name in _LATENCIES for percent in (50, 95, 99)}
    steps = {f"{kind}.{step}": 0.1 for kind in ("step_ms", "share") for step in (*STEPS, "uncovered")}
    return {**figures, **steps, "num_requests": 3, "output_tokens_per_second": 5.0}


def _measured() -> dict[str, list[Measured]]:
    by_arrangement = {"disaggregated": _figures(), "aggregated": _figures()}
    return {"A model": [Measured(Workload(8, 4, 1, 3), by_arrangement, {"ratio.hand_over_gap_to_itl": 1.5}, 0.02)]}


def test_the_document_is_flat_numbers_under_conditions() -> None:
    saved = document({"cpu": "some"}, _measured(), {"A model": "a"})
    assert saved["conditions"] == {"cpu": "some"}
    assert saved["figures"]["a.c1.disaggregated.itl_ms.p50"] == 1.0
    assert saved["figures"]["a.c1.ratio.hand_over_gap_to_itl"] == 1.5
    assert saved["figures"]["a.c1.foreign_cpu_share"] == 0.02
    assert all(isinstance(value, float) for value in saved["figures"].values())


def test_the_page_has_every_step_and_its_conditions() -> None:
    page = markdown({"cpu": "some"}, _measured())
    assert "- cpu: some" in page
    assert all(f"| {step} |" in page for step in STEPS)


def test_prompts_have_exactly_the_tokens_asked_for_and_begin_differently() -> None:
    tokenizer: Any = Tokenizer.from_file(str(checkpoint_path() / "tokenizer.json"))
    some = list(islice(prompts(checkpoint_path(), 40), 20))
    assert {len(tokenizer.encode(prompt, add_special_tokens=False).ids) for prompt in some} == {40}
    assert len({tuple(prompt.split()[:16]) for prompt in some}) == 20  # not even one block in common
    assert some == list(islice(prompts(checkpoint_path(), 40), 20))


def test_made_up_words_are_all_different() -> None:
    assert len(set(words(5000))) == 5000


def test_only_the_disaggregated_arrangement_waits_for_prefill_and_the_kv_service() -> None:
    apart, together = arrangements(2, only_pair=True)
    assert (apart.name, apart.hands_over, set(apart.roles)) == ("disaggregated", True, {"prefill", "decode", "kv"})
    assert (together.name, together.hands_over, set(together.roles)) == ("aggregated", False, {"decode"})


async def test_requests_that_decode_served_alone_are_not_called_disaggregated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with OtlpSink() as sink:
        await sink.receive(_spans(AGGREGATED_STEPS), set())
        assert (await traces_of(sink, [_answer()], handed_over=False))[0].whole == (0.0, 1.0)
        wait = sink.wait_for
        monkeypatch.setattr(sink, "wait_for", lambda condition: wait(condition, seconds=0.05))
        with pytest.raises(RuntimeError, match=r"1 of 1 requests lack spans of .*prefill\.compute"):
            await traces_of(sink, [_answer()], handed_over=True)


async def test_requests_that_were_handed_over_are_not_called_aggregated() -> None:
    async with OtlpSink() as sink:
        await sink.receive(_spans(STEPS), set())
        assert set((await traces_of(sink, [_answer()], handed_over=True))[0].steps) == set(STEPS)
        with pytest.raises(RuntimeError, match="handed requests over"):
            await traces_of(sink, [_answer()], handed_over=False)


def _spans(steps: Any) -> list[ReceivedSpan]:
    whole = ReceivedSpan("chat", "t", "0", "", 0, 1_000_000_000, {"http.route": "/run"})
    return [whole, *(ReceivedSpan(step, "t", step, "0", 0, 1_000_000) for step in steps)]


def _answer() -> Answer:
    return Answer("t", 0.0, (0.1, 0.2), 0.3, num_prompt_tokens=8, num_cached_tokens=0, num_output_tokens=2)
