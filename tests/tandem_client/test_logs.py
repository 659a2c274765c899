"""Tests `tandem logs`: which lines it prints, in which order."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tandem_client.cli.logs import LogOptions, NoLogs, logs_of, show


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
