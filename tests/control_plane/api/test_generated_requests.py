"""Requests that schemathesis generates get answers that the OpenAPI document allows. Short form: 300 requests."""

from __future__ import annotations

from tests.control_plane.api.generated_requests import run


def test_three_hundred_generated_requests_break_nothing_and_are_answered_as_documented() -> None:
    seen = run(300)
    assert seen.statuses.total() >= 300 and max(seen.statuses) < 500
    assert seen.statuses[200] > 30 and seen.statuses[400] > 30, "it tried what is right and what is wrong"
    assert seen.streams.total() > 0
