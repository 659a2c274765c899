"""`tandem logs`: shows what the processes of `tandem up` have logged on this machine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.text import Text

from tandem_client.cli.supervisor import last_lines, readable
from tandem_client.cli.terminal import harmless
from tandem_client.cli.up import POLL_SECONDS, LogReader

_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}
DEFAULT_PORT = 8642
_MAX_NEW_LINES = 10_000
_RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}


class NoLogs(Exception):
    """There is no such log; the message says which there are."""


@dataclass(frozen=True)
class LogOptions:
    num_lines: int = 40
    """Per process."""
    level: str = "info"
    as_json: bool = False


@dataclass(frozen=True)
class _Line:
    process: str
    text: str
    record: dict[str, Any]
    """The line as JSON; {} if the line has another form, such as one of a traceback."""

    @property
    def level(self) -> str:
        return str(self.record.get("level", "info"))


def port_of(folder: Path, url: str) -> int:
    """Return the port of the gateway's address, else the only one of which there are logs."""
    port = urlsplit(url).port or DEFAULT_PORT
    others = [each.name for each in folder.glob("*") if each.is_dir() and each.name.isdecimal()]
    return int(others[0]) if not (folder / str(port)).is_dir() and len(others) == 1 else port


def logs_of(folder: Path, port: int, process: str | None) -> list[Path]:
    """Return the logs of the Tandem at `port`, or the one of `process`. Raise NoLogs."""
    found = sorted((folder / str(port)).glob("*.log"))
    if not found:
        ports = ", ".join(sorted(each.name for each in folder.glob("*") if each.is_dir()))
        there = f"there are logs of port {ports} (--port)" if ports else "`tandem up` writes them"
        raise NoLogs(f"no logs in {folder / str(port)}; {there}")
    chosen = [path for path in found if process in (None, path.stem)]
    if not chosen:
        raise NoLogs(f"no process {process!r}; the logs are of {', '.join(path.stem for path in found)}")
    return chosen


def show(paths: Sequence[Path], options: LogOptions, console: Console) -> None:
    """Print the last lines of each log, in the order of their times."""
    lines = [_parsed(path.stem, line) for path in paths for line in last_lines(path, options.num_lines)]
    _print(_in_order(lines), paths, options, console)


def follow(paths: Sequence[Path], options: LogOptions, console: Console) -> None:
    """Print the last lines, then each new line, until interrupted."""
    readers = [LogReader(path) for path in paths]
    num_lines = options.num_lines
    while True:
        lines = [
            _parsed(reader.path.stem, line)
            for reader in readers
            for line in [line for line in reader.new_lines() if line.strip()][-num_lines:]
        ]
        _print(_in_order(lines), paths, options, console)
        num_lines = _MAX_NEW_LINES
        time.sleep(POLL_SECONDS)


def _parsed(process: str, line: str) -> _Line:
    try:
        record = json.loads(line)
    except ValueError:
        record = {}
    return _Line(process, line, record if isinstance(record, dict) else {})


def _in_order(lines: Sequence[_Line]) -> Iterator[_Line]:
    """Yield lines by time. A line without a time belongs to the line before it in its log."""
    moments: dict[str, str] = {}
    timed = []
    for place, line in enumerate(lines):
        moments[line.process] = str(line.record.get("timestamp", moments.get(line.process, "")))
        timed.append((moments[line.process], place, line))
    return (line for _, _, line in sorted(timed, key=lambda each: each[:2]))


def _print(lines: Iterator[_Line], paths: Sequence[Path], options: LogOptions, console: Console) -> None:
    width = max(len(path.stem) for path in paths)
    for line in lines:
        if _RANKS.get(line.level, 1) < _RANKS[options.level]:
            continue
        if options.as_json:
            print(json.dumps({"process": line.process, **(line.record or {"text": line.text})}), flush=True)
            continue
        moment = str(line.record.get("timestamp", ""))[11:19]
        head = Text.assemble((f"{moment:>8} ", "dim"), (f"{line.process:<{width}} │ ", "dim"))
        event, comma, details = harmless(readable(line.text)).partition(", ")
        head.append(event, style=_STYLES.get(line.level, "")).append(comma + details, style="dim")
        console.print(head, soft_wrap=True)
