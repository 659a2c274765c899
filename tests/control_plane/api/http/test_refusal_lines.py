"""Refusals are in the log, however many there are, and do not fill it."""

from __future__ import annotations

import pytest
from starlette.requests import Request
from structlog.testing import capture_logs

from control_plane.api.http import errors
from tandem_runtime.errors import Draining, Overloaded, Unavailable


async def test_refusals_of_a_kind_have_a_line_a_second_with_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("control_plane.api.http.errors.time.monotonic", lambda: now)
    monkeypatch.setattr(errors, "_REFUSALS", errors._Refusals())
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "headers": [],
        "state": {"request_id": "r"},
    }
    request = Request(scope)
    with capture_logs() as lines:
        for _ in range(100):
            assert (await errors.on_tandem_error(request, Overloaded("full"))).status_code == 429
        now += 1.0
        await errors.on_tandem_error(request, Overloaded("full"))
        for error in (Unavailable("gone"), Draining("it drains")):
            await errors.on_tandem_error(request, error)
    told = [(line["event"], line["kind"], line.get("num")) for line in lines]
    assert told[:2] == [("request_refused", "Overloaded", 1), ("request_refused", "Overloaded", 100)]
    assert told[2:] == [("request_failed", "Unavailable", None), ("request_failed", "Draining", None)]
