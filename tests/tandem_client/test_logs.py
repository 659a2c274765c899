"""Tests `tandem logs`: which lines it prints, in which order."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tandem_client.cli.logs import LogOptions, NoLogs, follow, logs_of, port_of, show


def _line(second: int, event: str, level: str = "info") -> str:
    record = {"timestamp": f"2026-11-25T12:00:{second:02}.0Z", "level": level, "event": event, "service": "s"}
    return json.dumps(record) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logs = tmp_path / "logs" / "8642"
    logs.mkdir(parents=True)
    (logs / "control-plane.log").write_text(_line(1, "listening") + _line(4, "worker_lost", "warning"))
    (logs / "decode-0.log").write_text(_line(2, "ready") + "Traceback\n" + _line(3, "stopped", "error"))
    return tmp_path / "logs"


def _shown(folder: Path, process: str | None = None, options: LogOptions | None = None) -> list[str]:
    out = io.StringIO()
    show(logs_of(folder, 8642, process), options or LogOptions(), Console(file=out, width=180))
    return out.getvalue().splitlines()


def test_lines_of_all_processes_come_in_the_order_of_their_times(folder: Path) -> None:
    assert [line.split("│ ")[1] for line in _shown(folder)] == [
        "listening",
        "ready",
        "Traceback",  # it stays behind the line before it
        "stopped",
        "worker lost",
    ]


def test_one_process_is_shown_alone(folder: Path) -> None:
    assert all("decode-0" in line for line in _shown(folder, "decode-0"))


def test_lines_below_the_level_are_left_out(folder: Path) -> None:
    lines = _shown(folder, options=LogOptions(level="warning"))
    assert [line.split("│ ")[1] for line in lines] == ["stopped", "worker lost"]


def test_only_the_last_lines_are_shown(folder: Path) -> None:
    lines = _shown(folder, options=LogOptions(num_lines=1))
    assert [line.split("│ ")[1] for line in lines] == ["stopped", "worker lost"]


def test_an_unknown_process_is_refused_with_the_names_there_are(folder: Path) -> None:
    with pytest.raises(NoLogs, match="control-plane, decode-0"):
        logs_of(folder, 8642, "decode-7")


def test_another_port_is_refused_with_the_ports_there_are(folder: Path) -> None:
    with pytest.raises(NoLogs, match=r"port 8642 \(--port\)"):
        logs_of(folder, 9000, None)


def test_the_command_prints_json_for_machines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(folder.parent))
    answer = CliRunner().invoke(app, ["logs", "control-plane", "--json"])
    assert [json.loads(line)["event"] for line in answer.stdout.splitlines()] == ["listening", "worker_lost"]


def test_the_port_is_that_of_the_gateways_address_else_the_only_one(folder: Path) -> None:
    assert port_of(folder, "http://127.0.0.1:9000") == 8642, "there is no other"
    (folder / "9001").mkdir()
    assert port_of(folder, "http://127.0.0.1:9001") == 9001
    assert port_of(folder, "http://127.0.0.1:9000") == 9000, "which one is meant is not known"
    assert port_of(folder, "http://gateway.example") == 8642


def test_a_line_that_would_command_the_terminal_is_shown_as_text(folder: Path) -> None:
    hostile = _line(5, "strange \x1b[2J\x07 name") + "raw \x1b]0;title\x07\n"
    (folder / "8642" / "decode-0.log").write_text(hostile)
    lines = _shown(folder, "decode-0")
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)


def test_following_prints_the_last_lines_and_then_each_new_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = folder / "8642" / "control-plane.log"
    turns: list[float] = []

    def turn(seconds: float) -> None:
        turns.append(seconds)
        if len(turns) == 3:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write(_line(10 + len(turns), f"new_{len(turns)}"))

    monkeypatch.setattr("time.sleep", turn)
    out = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt):
        follow([log], LogOptions(num_lines=1), Console(file=out, width=180))
    assert [line.split("│ ")[1] for line in out.getvalue().splitlines()] == ["worker lost", "new 1", "new 2"]
