"""Tests `tandem top`: what it shows, in the lines and columns that there are."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem_client.cli import operate
from tandem_client.cli.app import app
from tandem_client.cli.fleet import parse_fleet
from tandem_client.cli.top import Seen, top_view
from tandem_client.errors import AuthenticationError, TandemAPIError, TandemConnectionError
from tests.tandem_client.stub_gateway import StubGateway
from tests.tandem_client.test_commands import WORKER
from tests.tandem_client.test_explanation import SUMMARY


def _seen(workers: list[dict[str, Any]], requests: list[dict[str, Any]]) -> Seen:
    return Seen("http://127.0.0.1:8642", parse_fleet({"data": workers}), requests)


def _lines(seen: Seen, height: int) -> list[str]:
    console = Console(width=80, height=height, file=io.StringIO(), record=True)
    console.print(top_view(seen, height=height))
    return console.export_text().splitlines()


RUNNING = {**SUMMARY.to_json(), "state": "running"}


@pytest.mark.parametrize("height", [24, 40, 60])
@pytest.mark.parametrize("num_workers", [1, 3, 200])
def test_it_fits_its_terminal(num_workers: int, height: int) -> None:
    workers = [{**WORKER, "id": f"decode-{number}"} for number in range(num_workers)]
    lines = _lines(_seen(workers, [RUNNING] * 90), height)
    assert max(map(len, lines)) <= 80
    assert len(lines) <= height
    assert any("4f1c2d3e" in line for line in lines), "some requests"
    assert any("decode-" in line for line in lines), "some workers"


def test_the_summary_counts_workers_requests_and_tokens() -> None:
    lines = _lines(_seen([WORKER, {**WORKER, "id": "decode-1", "suspected": True}], [RUNNING] * 60), 24)
    assert "1 of 2 ready" in lines[0]
    assert lines[1].split() == ["60", "running", "0", "queued", "6,000", "tokens/s"]
    assert any("1/2" in line and "@tandem/demo" in line for line in lines)
    assert any("120 (53%)" in line for line in lines)


def test_of_too_many_workers_those_with_a_problem_and_the_busiest_are_shown() -> None:
    busy = {**WORKER["load"], "num_running": 99}
    workers = [{**WORKER, "id": f"decode-{number}"} for number in range(50)]
    workers += [{**WORKER, "name": "silent", "suspected": True}, {**WORKER, "name": "busy", "load": busy}]
    workers += [{**WORKER, "name": "sick", "health": "probation"}]
    shown = "\n".join(_lines(_seen(workers, [RUNNING] * 50), 24))
    assert "silent" in shown
    assert "suspected" in shown
    assert "sick" in shown and "probation" in shown
    assert "busy" in shown
    assert "more: tandem status" in shown


def test_a_failed_request_shows_why() -> None:
    failed = {**SUMMARY.to_json(), "state": "failed", "model": "", "error": "ModelNotFound"}
    assert any("ModelNotFound" in line for line in _lines(_seen([WORKER], [failed]), 24))


def test_while_the_gateway_is_away_the_last_look_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _seen([WORKER], [])

    def ask(error: TandemAPIError) -> Seen:
        def fail(url: str | None) -> Seen:
            raise error

        monkeypatch.setattr(operate, "_seen", fail)
        return operate._seen_after(before, None)

    after = ask(TandemConnectionError(None, 0, "no answer"))
    assert after.members == before.members
    assert "no answer; this is what was last seen" in "\n".join(_lines(after, 24))
    with pytest.raises(AuthenticationError):
        ask(AuthenticationError(401, 0, "the token is revoked"))


def test_in_a_pipe_it_is_one_look(gateway: StubGateway) -> None:
    gateway.workers["data"] = [WORKER]
    gateway.requests["data"] = [SUMMARY.to_json()]
    answer = CliRunner().invoke(app, ["top", "--url", gateway.url])
    assert answer.exit_code == 0
    assert "4f1c2d3e" in answer.stdout
