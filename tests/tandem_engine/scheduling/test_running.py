"""Tests which requests get a seat in a step when more are running than there are seats."""

from __future__ import annotations

from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.running import RunningRequests


def _request(name: str, arrival: int, num_computed: int) -> Request:
    request = Request(name, [1] * 8, 8, SamplingParams(4), mode="decode", arrival=arrival)
    request.num_computed_tokens = num_computed
    return request


def test_a_prompt_begun_has_a_seat_however_many_answers_there_are() -> None:
    running = RunningRequests(3, lambda request: 0.0)
    for arrival in range(5):
        running.add(_request(f"answer {arrival}", arrival, 7))
    running.add(_request("prompt", 0, 2))
    running.add(_request("later prompt", 9, 2))
    seated = [request.request_id for request in running.in_order()[:3]]
    assert seated == ["answer 0", "answer 1", "prompt"]


def test_answers_have_all_seats_where_no_prompt_is_begun() -> None:
    running = RunningRequests(2, lambda request: 0.0)
    for arrival in (2, 0, 1):
        running.add(_request(str(arrival), arrival, 7))
    assert [request.request_id for request in running.in_order()] == ["0", "1", "2"]
