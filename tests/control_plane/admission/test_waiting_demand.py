"""Prefill workers hear of the prompts that they would compute, and of no others."""

from __future__ import annotations

import pytest

from control_plane.admission.model_admission import Waiter
from control_plane.admission.waiting_demand import PrefillShare, WaitingDemand


def waiter(num_tokens: int, num_prefill_tokens: int | None, account: str = "a", num_choices: int = 1) -> Waiter:
    return Waiter("m", account, num_tokens=num_tokens, num_choices=num_choices, num_prefill_tokens=num_prefill_tokens)


def of(*waiting: Waiter, share: PrefillShare | None = None) -> WaitingDemand:
    return WaitingDemand.of_prompts(waiting, waiting[0] if waiting else None, {}, share or PrefillShare())


def test_each_prompt_counts_once_with_what_would_be_computed_of_it() -> None:
    demand = of(waiter(100, 60, num_choices=4), waiter(50, 50, "b"), waiter(1000, 0, "c"))
    assert demand == WaitingDemand(110, 2, 60, 1, (("a", 60), ("b", 50)))


def test_accounts_count_by_what_they_have_asked_for_and_not_by_what_waits() -> None:
    waiting = waiter(100, 60, num_choices=4), waiter(50, 50, "b")
    asked = {"a": 70.4, "b": 900.0, "c": 1000.0}
    prompts = WaitingDemand.of_prompts(waiting, waiting[0], asked, PrefillShare())
    answers = WaitingDemand.of(waiting, waiting[0], asked)
    assert dict(prompts.accounts) == dict(answers.accounts) == {"a": 70, "b": 900}
    assert (prompts.num_tokens, answers.num_tokens) == (110, 450)


def test_nothing_that_decode_would_compute_counts() -> None:
    assert of(waiter(100, 0), waiter(50, 0)) == of() == WaitingDemand()
    demand = of(waiter(100, 0), waiter(30, 30), waiter(50, 50))
    assert (demand.num_requests, demand.first_tokens) == (2, 40), "which of them is next is not known"


def test_requests_that_have_not_looked_count_as_the_last_ones_that_were_sent() -> None:
    share = PrefillShare()
    new = [waiter(100, None) for _ in range(10)]
    assert of(*new, share=share) == WaitingDemand(1000, 10, 100, 1, (("a", 1000),)), "at first: all"
    for _ in range(50):
        share.sent(0, 100)
        share.sent(50, 100)
    demand = of(*new, share=share)
    assert demand.num_requests == 5
    assert demand.num_tokens == pytest.approx(250, abs=20) and demand.first_tokens == 100
    for _ in range(50):
        share.sent(0, 100)
    assert of(*new, share=share) == WaitingDemand()
    assert of(waiter(100, 100), *new, share=share).num_requests == 1
