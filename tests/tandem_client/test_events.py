"""Tests `tandem events`, `tandem drain` and `tandem resume` against a stub gateway."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tandem_client.cli.events import EventPrinter, follow
from tandem_client.errors import AuthenticationError, TandemAPIError, TandemConnectionError
from tests.tandem_client.stub_gateway import StubGateway

EVENT: dict[str, Any] = {
    "id": 7,
    "time_ms": 1_795_600_000_000,
    "kind": "request_migrated",
    "severity": "warning",
    "gateway": "g",
    "role": "",
    "worker": "decode-0",
    "host": "",
    "model": "m",
    "request_id": "r1",
    "cause": "Unavailable",
    "message": "an answer went on at decode-1 after decode-0 was lost",
    "fields": {"to": "decode-1"},
}


def _printed(events: list[dict[str, Any]], *, is_terminal: bool, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), force_terminal=is_terminal, record=True)
    printer = EventPrinter(console, as_json=False)
    for event in events:
        printer.print(event)
    return console.export_text()


def test_an_event_in_a_pipe_is_one_line_with_date_severity_cause_and_request() -> None:
    (line,) = _printed([EVENT], is_terminal=False).splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  warning  request_migrated ", line)
    assert line.endswith("an answer went on at decode-1 after decode-0 was lost (Unavailable)  request r1")


def test_an_event_in_a_terminal_fits_80_columns_and_days_are_apart() -> None:
    day_ms = 86_400_000
    later = [EVENT, EVENT, {**EVENT, "time_ms": EVENT["time_ms"] + day_ms, "message": "word " * 60}]
    lines = _printed(later, is_terminal=True).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("────" in line for line in lines) == 2, "two days"
    assert [line[9] for line in lines if "request_migrated" in line] == ["!"] * 3, "a severity needs no colour"


def test_events_are_printed_as_lines_of_json(gateway: StubGateway) -> None:
    gateway.events["data"] = [EVENT]
    answer = CliRunner().invoke(app, ["events", "--json", "--url", gateway.url])
    assert [json.loads(line) for line in answer.stdout.splitlines()] == [EVENT]


class Gateway:
    """Answers with a new event each time, or with the next of `errors`; then the reader interrupts."""

    def __init__(self, num_answers: int, errors: list[TandemAPIError]) -> None:
        self.asked: list[dict[str, str]] = []
        self.errors = errors
        self._num_answers = num_answers

    def fetch(self, more: Mapping[str, str]) -> dict[str, Any]:
        if self.errors:
            raise self.errors.pop()
        self.asked.append(dict(more))
        if len(self.asked) > self._num_answers:
            raise KeyboardInterrupt
        return {"data": [{**EVENT, "id": 7 + len(self.asked)}]}


def _follow(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> list[TandemAPIError]:
    """Follow until the reader interrupts; return what was said of a gateway that is away."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    away: list[TandemAPIError] = []
    printer = EventPrinter(Console(file=io.StringIO()), as_json=False)
    with contextlib.suppress(KeyboardInterrupt):
        follow(gateway.fetch, 7, printer, away.append)
    return away


def test_following_asks_for_what_comes_after_the_last_event(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway(3, [])
    assert _follow(gateway, monkeypatch) == []
    assert [each["after"] for each in gateway.asked] == ["7", "8", "9", "10"]


def test_following_goes_on_after_a_restart_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [TandemConnectionError(None, 0, "no answer"), TandemAPIError(503, 0, "starting")]
    gateway = Gateway(1, list(errors))
    assert len(_follow(gateway, monkeypatch)) == 1, "it is said once"
    assert [each["after"] for each in gateway.asked] == ["7", "8"]


def test_following_ends_with_an_error_that_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AuthenticationError):
        _follow(Gateway(1, [AuthenticationError(401, 0, "the token is revoked")]), monkeypatch)


def test_a_drain_says_what_still_runs_and_warns_of_the_last_worker(gateway: StubGateway) -> None:
    gateway.drained = {"id": "ab12", "name": "decode-0", "state": "draining", "num_running": 3, "warning": "the last"}
    answer = CliRunner().invoke(app, ["drain", "decode-0", "--url", gateway.url])
    assert answer.exit_code == 0
    assert "decode-0 takes nothing new; 3 requests still there. `tandem resume decode-0`" in answer.output
    assert "tandem: the last" in answer.output
    assert gateway.calls[-1].path == "/v1/workers/decode-0/drain"
    as_json = CliRunner().invoke(app, ["drain", "decode-0", "--json", "--url", gateway.url])
    assert json.loads(as_json.stdout) == gateway.drained


def test_a_resume_says_that_the_worker_is_ready(gateway: StubGateway) -> None:
    gateway.drained = {"id": "ab12", "name": "decode-0", "state": "ready", "num_running": 0}
    answer = CliRunner().invoke(app, ["resume", "ab12", "--url", gateway.url])
    assert answer.output == "decode-0 is ready.\n"


def test_a_refused_drain_is_an_error(gateway: StubGateway) -> None:
    answer = CliRunner().invoke(app, ["resume", "nobody", "--url", gateway.url])
    assert (answer.exit_code, "tandem:" in answer.output) == (1, True)
