"""Prints the fleet's events, for `tandem events`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import date, datetime
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from tandem_client.cli.following import ask_until_answered
from tandem_client.errors import TandemAPIError

_SIGNS = {"info": ("·", "dim"), "warning": ("!", "yellow"), "error": ("✗", "red")}
_KIND_WIDTH = 20
_POLL_SECONDS = 1.0
_PAGE = 1_000

Fetch = Callable[[Mapping[str, str]], dict[str, Any]]


class EventPrinter:
    """Prints events in lines: for terminals in columns with a rule between days, for pipes with date and severity."""

    def __init__(self, console: Console, *, as_json: bool) -> None:
        self._console = console
        self._as_json = as_json
        self._day: date | None = None

    def print(self, event: Mapping[str, Any]) -> None:
        if self._as_json:
            print(json.dumps(event), flush=True)
        elif self._console.is_terminal:
            self._print_row(event)
        else:
            self._console.print(line_of(event), soft_wrap=True)

    def _print_row(self, event: Mapping[str, Any]) -> None:
        moment = _moment(event)
        if moment.date() != self._day:
            self._day = moment.date()
            self._console.print(Rule(f"{moment:%A, %d %B %Y}", align="left", style="bright_black"))
        sign, style = _SIGNS.get(event["severity"], _SIGNS["info"])
        row = Table.grid(padding=(0, 1, 0, 0))
        for width in (8, 1, _KIND_WIDTH):
            row.add_column(width=width, overflow="fold")
        row.add_column(overflow="fold")
        quiet = event["severity"] == "info"
        row.add_row(
            Text(f"{moment:%H:%M:%S}", style="dim"),
            Text(sign, style=style),
            Text(event["kind"], style="cyan" if quiet else style),
            _told(event, "" if quiet else style),
        )
        self._console.print(row)


def show(fetch: Fetch, number: int, printer: EventPrinter) -> int:
    """Print the newest events; return the id of the last one, 0 if there is none.

    `fetch` returns the gateway's answer for more parameters: `limit`, `after`.
    """
    return _print_all(fetch({"limit": str(number)})["data"], printer)


def follow(fetch: Fetch, last: int, printer: EventPrinter, on_away: Callable[[TandemAPIError], None]) -> None:
    """Print each event after an id, until interrupted. A gateway that is away is waited for."""
    while True:
        time.sleep(_POLL_SECONDS)
        wanted = {"after": str(last), "limit": str(_PAGE)}
        found = ask_until_answered(lambda wanted=wanted: fetch(wanted)["data"], on_away)  # type: ignore[misc]
        last = _print_all(found, printer) or last


def _print_all(events: list[dict[str, Any]], printer: EventPrinter) -> int:
    for event in events:
        printer.print(event)
    return int(events[-1]["id"]) if events else 0


def line_of(event: Mapping[str, Any]) -> Text:
    """Return an event as one line: date, time, severity, kind, message, cause, request."""
    moment = f"{_moment(event):%Y-%m-%d %H:%M:%S}"
    head = f"{moment}  {event['severity']:<7}  {event['kind']:<{_KIND_WIDTH}}  "
    return Text(head).append_text(_told(event, ""))


def _told(event: Mapping[str, Any], style: str) -> Text:
    told = Text(event["message"], style=style)
    if event["cause"] and event["cause"] not in event["message"]:
        told.append(f" ({event['cause']})")
    if event["model"] and event["model"] not in event["message"] and not event["worker"]:
        told.append(f"  {event['model']}", style="dim")
    if event["request_id"]:
        told.append(f"  request {event['request_id']}", style="dim")
    return told


def _moment(event: Mapping[str, Any]) -> datetime:
    return datetime.fromtimestamp(event["time_ms"] / 1000)
