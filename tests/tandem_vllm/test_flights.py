"""Tests what is left of a batch whose requests have ended while it was computed."""

from __future__ import annotations

from tandem_vllm.drawing import Drawn
from tandem_vllm.flights import Flight, only_of
from tandem_vllm.steps import Run


def test_a_request_that_was_aborted_in_flight_is_left_out_and_so_is_another_of_its_name() -> None:
    kept, aborted, before, after = object(), object(), object(), object()
    requests = {"kept": kept, "aborted": aborted, "again": before}
    runs = [Run(name, 0, 4) for name in requests]
    flight = Flight(None, runs, requests, None, None, Drawn)
    alive = frozenset(flight.alive({"kept": kept, "again": after, "other": object()}))
    assert alive == {"kept"}
    assert only_of(alive, {"kept": 1, "aborted": 2, "again": 3}) == {"kept": 1}
