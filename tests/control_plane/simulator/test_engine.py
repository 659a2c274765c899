"""A simulated engine takes as long as its profile says, whatever comes in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.simulator.engine import Job
from control_plane.simulator.pool import Store
from tests.control_plane.simulator.small_fleet import PLAIN, Bench, request


def test_a_prompt_takes_its_steps_and_its_tokens() -> None:
    bench = Bench()
    bench.prompt(request(0, prompt=250), decodes=False)
    bench.run()
    assert bench.prompts == [(0, 280.0)], "250 tokens in 3 steps of 100 at most"


def test_an_answer_is_a_step_for_each_token_after_the_first() -> None:
    bench = Bench()
    bench.prompt(request(0, prompt=50, answer=11))
    bench.run()
    assert bench.prompts == [(0, 60.0)]
    assert bench.ends == [(0, 60.0 + 10 * 11.0)]


def test_a_reply_of_one_token_ends_with_its_prompt() -> None:
    bench = Bench()
    bench.prompt(request(0, prompt=50, answer=1))
    bench.run()
    assert bench.ends == [(0, 60.0)]


def test_short_prompts_share_a_step_and_long_ones_wait() -> None:
    bench = Bench()
    for number, prompt in enumerate((10, 60, 40, 90)):
        bench.prompt(request(number, prompt), decodes=False)
    bench.run()
    # The first is alone: nothing waited when it came. Two fit into the next step, the last does not.
    assert bench.prompts == [(0, 20.0), (1, 130.0), (2, 130.0), (3, 230.0)]


def test_a_prompt_beside_answers_has_smaller_steps_which_are_longer_for_the_answers() -> None:
    bench = Bench()
    bench.prompt(request(0, prompt=50, answer=101))
    bench.engine.change(0.060)
    bench.prompt(request(1, prompt=100, answer=1), 0.060)  # two steps of 50 tokens: 2 * (11 + 50) ms
    bench.run()
    assert bench.prompts[1] == (1, 60.0 + 122.0)
    assert bench.ends[-1] == (0, 60.0 + 122.0 + 98 * 11.0), "two of its 100 tokens came meanwhile"


def test_steps_grow_with_the_contexts() -> None:
    bench = Bench(replace(PLAIN, answer_ms=0.0, context_ms=0.1))
    job = Job(request(0, prompt=99, answer=11), computes_prompt=False, decodes=True)
    assert bench.engine.reserve(job, 0.0)
    bench.engine.begin(job, 0.0)
    bench.run()
    # 10 steps, the context is 100 at first: 10 * (10 + 0.1 * 100) ms, and 0.1 * 10 ** 2 / 2 ms for what it grows.
    assert bench.ends == [(0, 205.0)]


def test_reports_in_between_change_nothing() -> None:
    often, seldom = Bench(replace(PLAIN, context_ms=0.01)), Bench(replace(PLAIN, context_ms=0.01))
    for bench in (often, seldom):
        for number in range(3):
            bench.prompt(request(number, prompt=70 + number, answer=20))
    moments = [number * 0.0137 for number in range(200)]
    while (moment := often.engine.next_change()) is not None:
        while moments and moments[0] < moment:
            often.engine.report(moments.pop(0))
        often.engine.change(moment)
    seldom.run()
    assert often.ends == seldom.ends


def test_cached_blocks_are_not_computed_again_but_the_last_token_is() -> None:
    bench = Bench()
    bench.prompt(request(0, prompt=96, answer=1))
    bench.run()
    again = bench.prompt(request(1, prompt=96, answer=1, hash_ids=request(0, 96).hash_ids), 0.2)
    bench.run()
    assert (again.num_own, again.num_computed) == (80, 16)
    assert bench.prompts == [(0, 106.0), (1, 226.0)]


def test_blocks_of_the_host_are_loaded() -> None:
    store = Store(10_000, 16)
    store.put(request(0, prompt=96).hash_ids)
    bench = Bench(store=store)
    job = bench.prompt(request(1, prompt=100, answer=1, hash_ids=request(0, 96).hash_ids))
    bench.run()
    assert (job.num_own, job.num_host, job.num_computed) == (0, 96, 4)


def test_a_full_queue_and_a_full_pool_refuse() -> None:
    bench = Bench(replace(PLAIN, kv_tokens=400))
    big = Job(request(9, prompt=200), computes_prompt=False, decodes=True)
    assert bench.engine.reserve(big, 0.0)
    assert not bench.engine.reserve(Job(request(8, prompt=200), computes_prompt=False, decodes=True), 0.0)
    bench.engine.cancel(big, 0.0)
    assert bench.engine.reserve(Job(request(8, prompt=200), computes_prompt=False, decodes=True), 0.0)
    for number in range(5):  # one is computed, four wait
        bench.prompt(request(number, prompt=20), decodes=False)
    assert not bench.engine.submit_prompt(Job(request(7, 20), computes_prompt=True, decodes=False), 0.0)
    assert not bench.engine.submit_prompt(Job(request(7, 401), computes_prompt=True, decodes=False), 0.0)


def test_answers_beyond_the_seats_wait() -> None:
    bench = Bench(replace(PLAIN, max_num_seqs=1, answer_ms=0.0))
    for number in range(2):
        bench.prompt(request(number, prompt=10, answer=11))
    bench.run()
    first = dict(bench.ends)[0]
    assert dict(bench.prompts)[1] == pytest.approx(first + 20.0, abs=0.01), "a prompt needs the seat too"
    assert dict(bench.ends)[1] == pytest.approx(first + 120.0, abs=0.01)
    handed_over = Bench(replace(PLAIN, max_num_seqs=1))
    for number in range(2):
        handed_over.prompt(request(number, prompt=10), decodes=False)
    handed_over.run()
    assert handed_over.prompts == [(0, 20.0), (1, 40.0)], "its answer has its seat elsewhere"


def test_the_latest_answer_gives_way_when_the_pool_is_full_and_all_end() -> None:
    bench = Bench(replace(PLAIN, kv_tokens=160))
    jobs = [bench.prompt(request(number, prompt=32, answer=100)) for number in range(2)]
    bench.run()
    assert [job.num_preemptions > 0 for job in jobs] == [False, True]
    assert sorted(number for number, _ in bench.ends) == [0, 1]
    assert bench.engine.pool.num_used == pytest.approx(0.0, abs=0.01)


def test_a_report_counts_what_is_here() -> None:
    bench = Bench()
    bench.prompt(request(0, prompt=48, answer=100))
    bench.engine.change(0.058)
    bench.prompt(request(1, prompt=64, answer=1), 0.058)
    bench.prompt(request(2, prompt=80, answer=1), 0.058)
    report = bench.engine.report(0.058)
    assert (report.num_running, report.num_waiting) == (2, 1)
    assert report.num_tokens_in_flight == 80 + 64 + 49
    assert report.num_used_tokens == 48 + 1 + 64 + 1
    assert (report.num_computed, report.num_steps) == (48, 1.0)


@pytest.mark.parametrize(("counts", "expected"), [(True, 96), (False, 16)])
def test_cached_tokens_of_waiting_prompts_are_reported_only_by_a_profile_that_says_so(
    counts: bool, expected: int
) -> None:
    bench = Bench(replace(PLAIN, reports_cached_tokens=counts, chunk_tokens=20))
    bench.prompt(request(0, prompt=80, answer=1))
    bench.run()
    bench.prompt(request(1, prompt=20, answer=1), 0.5)
    before = bench.engine.report(0.5).num_tokens_in_flight
    bench.prompt(request(2, prompt=96, answer=1, hash_ids=(*request(0, 80).hash_ids, 5)), 0.5)
    assert bench.engine.report(0.5).num_tokens_in_flight - before == expected
