"""The page of log events has every log call of the services with its level and fields, and nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.markdown import ROOT, tables

PAGE = ROOT / "docs/operate/events.md"
PACKAGES = {
    "Gateway": ["control_plane"],
    "KV service": ["kv_transfer_svc"],
    "Workers": ["tandem_worker", "prefill_svc", "decode_svc", "encode_svc"],
    "Every service": ["tandem_runtime"],
    "Engine process": ["tandem_engine"],
}
_LEVELS = {"debug", "info", "warning", "error", "exception"}


class Event(NamedTuple):
    section: str
    name: str
    level: str
    fields: frozenset[str]


def test_the_page_has_the_events_of_the_code() -> None:
    logged = {event for section in PACKAGES for event in _logged(section)}
    described = _described()
    assert {"missing": logged - set(described), "gone": set(described) - logged} == {"missing": set(), "gone": set()}
    assert len(described) == len(set(described)), "an event is on the page twice"


def test_the_names_of_events_are_identifiers_in_lower_case() -> None:
    names = {event.name for section in list(PACKAGES)[:-1] for event in _logged(section)}
    assert len(names) > 100
    assert [name for name in names if not re.fullmatch(r"[a-z][a-z0-9_]+", name)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('log.info("a", b=1)', ("a", "info", {"b"})),
        ('log.exception("a", b=1)', ("a", "error", {"b", "exception"})),
        ('log.error("a", exc_info=error, **facts)', ("a", "error", {"exception", "..."})),
        ('log.warning("a %s", b)', ("a %s", "warning", set())),
    ],
)
def test_a_log_call_is_read_with_its_level_and_fields(code: str, found: tuple[str, str, set[str]]) -> None:
    name, level, fields = found
    tree = ast.parse(f"log = get_logger(__name__)\n{code}")
    assert list(_events(tree, "Gateway")) == [Event("Gateway", name, level, frozenset(fields))]


@pytest.mark.parametrize("code", ["log.info(name)", 'log.log(10, "a")', 'log.bind(b=1).info("a")', "other(log)"])
def test_a_log_call_that_cannot_be_read_is_refused(code: str) -> None:
    with pytest.raises(AssertionError):
        list(_events(ast.parse(f"log = get_logger(__name__)\n{code}"), "Gateway"))


def _logged(section: str) -> Iterator[Event]:
    for package in PACKAGES[section]:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from _events(ast.parse(path.read_text()), section, path)


def _events(tree: ast.Module, section: str, path: Path = Path("example.py")) -> Iterator[Event]:
    """Yield the events of a module; fail for a use of its logger that is no call with a literal name."""
    loggers = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign) and _name_of(node.value) in ("get_logger", "getLogger")
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    read = set()
    for call in calls:
        match call.func:
            case ast.Attribute(value=ast.Name(id=logger) as used, attr=method) if logger in loggers:
                read.add(used)
                where = f"{path}:{call.lineno}"
                assert method in _LEVELS, f"{where}: .{method}() is no level; use one of {sorted(_LEVELS)}"
                assert call.args, f"{where}: a log call without a name"
                yield Event(section, _literal(call.args[0], where), *_level_and_fields(call, method))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in loggers and isinstance(node.ctx, ast.Load):
            assert node in read, f"{path}:{node.lineno}: call the logger directly, so that its events can be listed"


def _name_of(value: ast.expr) -> str:
    """Return the last name of what a call calls, "" for anything else."""
    match value:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
    return ""


def _literal(argument: ast.expr, where: str) -> str:
    assert isinstance(argument, ast.Constant), f"{where}: the name of an event must be a literal"
    assert isinstance(argument.value, str), f"{where}: the name of an event must be a text"
    return argument.value


def _level_and_fields(call: ast.Call, method: str) -> tuple[str, frozenset[str]]:
    """Return the level and fields of a line; `...` stands for fields known at run time only."""
    names = {keyword.arg or "..." for keyword in call.keywords}
    if method == "exception" or "exc_info" in names:
        names = names - {"exc_info"} | {"exception"}
    return "error" if method == "exception" else method, frozenset(names)


def _described() -> list[Event]:
    """Return the rows of the page's tables under the headings of PACKAGES."""
    text = PAGE.read_text()
    headings = [(text.count("\n", 0, found.start()) + 1, found[1]) for found in re.finditer(r"^## (.+)$", text, re.M)]
    assert [heading for _, heading in headings] == list(PACKAGES)
    return [
        _event(row, section)
        for first, rows in tables(text)
        if (section := next((name for line, name in reversed(headings) if line < first), ""))
        for row in rows[2:]
    ]


def _event(row: str, section: str) -> Event:
    cells = [cell.strip() for cell in row.strip().strip("|").split("|")]
    name, level, *fields, meaning = cells
    assert meaning, f"{name} has no meaning"
    return Event(section, name.strip("`"), level, frozenset(re.findall(r"`([^`]+)`", fields[0] if fields else "")))
