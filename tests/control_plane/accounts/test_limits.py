"""No minute has more than its limit, and every minute gets its whole limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from control_plane.accounts.limits import Limits, RateLimitStatus, Refusal, Window
from control_plane.accounts.metering import rate_limit_headers

REQUESTS = Limits(max_requests_per_minute=2)
TOKENS = Limits(max_tokens_per_minute=100)
RUNNING = Limits(max_concurrent_requests=2)


def test_the_third_of_two_waits_until_the_first_is_a_minute_old() -> None:
    window = Window()
    for moment in (100.0, 110.0):
        window, refusal = window.admit(REQUESTS, 1, "g", moment)
        assert refusal is None
    window, refusal = window.admit(REQUESTS, 1, "g", 120.0)
    assert refusal == Refusal("requests", 2, retry_after_seconds=40.5)  # the half second of the first is over then
    assert window.admit(REQUESTS, 1, "g", 160.4)[1] is not None
    window, refusal = window.admit(REQUESTS, 1, "g", 160.5)
    assert refusal is None and window.used == ((220, 1, 1), (321, 1, 1))


def test_tokens_are_estimated_and_settled() -> None:
    window, refusal = Window().admit(TOKENS, 80, "g", 100.0)
    assert refusal is None
    assert window.admit(TOKENS, 21, "g", 101.0)[1] == Refusal("tokens", 100, 59.5)
    window = window.settle(200, -50, "g", was_running=False, now=102.0)  # it used 30
    window, refusal = window.admit(TOKENS, 70, "g", 103.0)
    assert refusal is None and window.num_tokens == 100
    window = window.settle(206, 5, "g", was_running=False, now=110.0)  # it used 75: more than there was
    assert window.num_tokens == 105 and window.tokens(TOKENS, 110.0) == RateLimitStatus(100, 0, 60.5)
    window = window.settle(200, -50, "g", was_running=False, now=400.0)  # long out of the window
    assert window.num_tokens == 0


def test_running_requests_are_counted_by_gateway() -> None:
    window = Window()
    for gateway in ("a", "b"):
        window, refusal = window.admit(RUNNING, 1, gateway, 100.0)
        assert refusal is None
    refused, refusal = window.admit(RUNNING, 1, "a", 100.0)
    assert refusal == Refusal("concurrency", 2, 1.0) and refused == window
    assert window.with_running("b", 0).running == {"a": 1}
    window = window.settle(200, 0, "a", was_running=True, now=101.0)
    assert window.running == {"b": 1}
    assert window.admit(RUNNING, 1, "a", 102.0)[1] is None


def test_what_is_refused_costs_nothing() -> None:
    window, _ = Window().admit(Limits(1, 10, 1), 10, "g", 100.0)
    for limits in (Limits(1, None, None), Limits(None, 10, None), Limits(None, None, 1)):
        after, refusal = window.admit(limits, 1, "g", 100.0)
        assert refusal is not None and after == window


def test_clocks_that_differ_do_not_undo_each_other() -> None:
    window, _ = Window().admit(REQUESTS, 1, "ahead", 103.0)
    window, _ = window.admit(REQUESTS, 1, "behind", 100.0)
    assert window.used == ((206, 2, 2),)
    wrong, _ = Window().admit(REQUESTS, 1, "an hour ahead", 3700.0)
    assert wrong.at(wrong.tick(100.0)).num_requests == 0


def test_a_window_survives_being_written() -> None:
    window, _ = Window().admit(RUNNING, 5, "g", 100.0)
    assert Window.decode(window.encode()) == window and Window.decode(Window().encode()) == Window()


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40)), max_size=80), st.integers(1, 5), st.integers(40, 90))
def test_no_minute_has_more_than_its_limits(
    arrivals: list[tuple[float, int]], max_requests: int, max_tokens: int
) -> None:
    limits, window, now = Limits(max_requests, max_tokens), Window(), 1000.0
    admitted: list[tuple[float, int]] = []
    for pause, tokens in arrivals:
        now += pause
        window, refusal = window.admit(limits, tokens, "g", now)
        if refusal is None:
            admitted.append((now, tokens))
        else:
            assert 0 < refusal.retry_after_seconds <= 60.5
    for first, _ in admitted:
        minute = [tokens for moment, tokens in admitted if first <= moment < first + 60]
        assert len(minute) <= max_requests and sum(minute) <= max_tokens


@given(st.integers(1, 50), st.floats(0, 1e9))
def test_every_minute_gets_its_limit(most: int, start: float) -> None:
    window, limits = Window(), Limits(max_requests_per_minute=most)
    for minute in (start, start + 60.5):
        for index in range(most):
            window, refusal = window.admit(limits, 1, "g", minute)
            assert refusal is None, index
        assert window.admit(limits, 1, "g", minute)[1] is not None


def test_callers_are_told_as_openai_tells_them() -> None:
    headers = rate_limit_headers(RateLimitStatus(60, 59, 1.0), RateLimitStatus(1000, 0, 12.3456))
    assert headers == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "12.346s",
    }
    assert rate_limit_headers(None, None) == {}
