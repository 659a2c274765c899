"""What does a Worker's configuration say of its assets: which file answers which path, and with which headers?

`_headers` and `_redirects` in the folder of assets are read as Cloudflare does: lines that are no rules change nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

HTML_HANDLING = ("auto-trailing-slash", "force-trailing-slash", "drop-trailing-slash", "none")
NOT_FOUND_HANDLING = ("none", "single-page-application", "404-page")
_KNOWN = {"directory", "binding", "run_worker_first", "html_handling", "not_found_handling"}
_NAVIGATION_DATE = "2025-04-01"
_NAVIGATION_FLAGS = {"assets_navigation_prefers_asset_serving": True, "assets_navigation_has_no_effect": False}
_STATUSES = {200, 301, 302, 303, 307, 308}
Rule = TypeVar("Rule")
Note = Callable[[int, str], None]


@dataclass(frozen=True)
class Redirect:
    """`source` is a path with `*` and `:names`, which `target` may use; status 200 answers with another file."""

    source: str
    target: str
    status: int = 302


@dataclass(frozen=True)
class HeaderRule:
    """Headers of the answers to the paths that fit."""

    source: str
    set: tuple[tuple[str, str], ...] = ()
    unset: tuple[str, ...] = ()


@dataclass(frozen=True)
class Assets:
    """Files that are served as they are."""

    directory: Path
    binding: str | None = None
    worker_first: bool = False
    """Every request goes to the Worker, which may ask for assets through the binding."""
    worker_first_paths: tuple[str, ...] = ()
    """Those that go to the Worker first; with a leading `!` those that never go there."""
    html_handling: str = "auto-trailing-slash"
    not_found_handling: str = "none"
    prefers_navigation: bool = False
    """Whether a browser that opens a page gets what `not_found_handling` says, and not the Worker."""
    redirects: tuple[Redirect, ...] = ()
    headers: tuple[HeaderRule, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What is written there and changes nothing."""

    def rules(self) -> dict[str, Any]:
        """Return what worker_assets.js has to know, as plain JSON values."""
        return {
            "html": self.html_handling,
            "notFound": self.not_found_handling,
            "prefersNavigation": self.prefers_navigation,
            "workerFirst": [path for path in self.worker_first_paths if not path.startswith("!")],
            "workerNever": [path[1:] for path in self.worker_first_paths if path.startswith("!")],
            "redirects": [{"from": each.source, "to": each.target, "status": each.status} for each in self.redirects],
            "headers": [{"from": each.source, "set": each.set, "unset": each.unset} for each in self.headers],
        }


def unknown_settings(said: Mapping[str, Any]) -> list[str]:
    """Return the settings that there are not here, and values that none of them takes."""
    found = [f"assets.{key}" for key in said if key not in _KNOWN]
    for key, values in (("html_handling", HTML_HANDLING), ("not_found_handling", NOT_FOUND_HANDLING)):
        if said.get(key) not in (None, *values):
            found.append(f"assets.{key} = {said[key]!r}")
    return found


def read_assets(folder: Path, said: Mapping[str, Any], date: str, flags: tuple[str, ...]) -> Assets:
    """Return a Worker's assets; raises ValueError naming what is wrong, and the remedy."""
    directory = said.get("directory")
    if not directory or not (folder / directory).is_dir():
        raise ValueError(f"assets.directory is {directory!r}, and there is no such folder; build the assets first")
    first = said.get("run_worker_first", False)
    if not isinstance(first, bool) and not (isinstance(first, list) and all(map(_is_pattern, first))):
        raise ValueError(f'assets.run_worker_first is {first!r}; give true, false, or paths such as "/api/*"')
    path, notes = (folder / directory).resolve(), list[str]()
    return Assets(
        directory=path,
        binding=said.get("binding"),
        worker_first=first is True,
        worker_first_paths=tuple(first) if isinstance(first, list) else (),
        html_handling=_one_of(HTML_HANDLING, said.get("html_handling")),
        not_found_handling=_one_of(NOT_FOUND_HANDLING, said.get("not_found_handling")),
        prefers_navigation=_prefers_navigation(date, flags),
        redirects=tuple(_read(path / "_redirects", _redirects, notes)),
        headers=tuple(_read(path / "_headers", _headers, notes)),
        notes=tuple(notes),
    )


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and value.removeprefix("!").startswith("/")


def _one_of(values: tuple[str, ...], said: object) -> str:
    return said if isinstance(said, str) and said in values else values[0]


def _prefers_navigation(date: str, flags: tuple[str, ...]) -> bool:
    said = [_NAVIGATION_FLAGS[flag] for flag in flags if flag in _NAVIGATION_FLAGS]
    return said[-1] if said else date >= _NAVIGATION_DATE


def _read(path: Path, rules: Callable[[list[str], Note], Iterator[Rule]], notes: list[str]) -> Iterator[Rule]:
    if not path.is_file():
        return iter(())
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return rules(lines, lambda number, why: notes.append(f"line {number} of {path.name} changes nothing: {why}"))


def _redirects(lines: list[str], note: Note) -> Iterator[Redirect]:
    for number, line in enumerate(lines, 1):
        if not (words := line.split()) or words[0].startswith("#"):
            continue
        status = words[2] if len(words) == 3 else "302"
        if len(words) not in (2, 3) or not status.isdecimal() or int(status) not in _STATUSES:
            note(number, "it is no SOURCE TARGET [200, 301, 302, 303, 307 or 308]")
        elif not words[0].startswith("/") or not words[1].startswith(("/", "https://", "http://")):
            note(number, "a source is a path, a target a path or an address")
        elif int(status) == 200 and not words[1].startswith("/"):
            note(number, "what answers with status 200 is a path")
        else:
            yield Redirect(words[0], words[1], int(status))


def _headers(lines: list[str], note: Note) -> Iterator[HeaderRule]:
    source, given, taken = "", list[tuple[str, str]](), list[str]()
    for number, line in enumerate([*lines, "/"], 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if re.match(r"/|https?://", text) and not line[0].isspace():
            if source.startswith("/"):  # a rule of another host is none of this one's
                yield HeaderRule(source, tuple(given), tuple(taken))
            source, given, taken = text, [], []
        elif source and text.startswith("!"):
            taken.append(text[1:].strip())
        elif source and (header := re.fullmatch(r"([\w!#$%&'*+.^`|~-]+)\s*:\s*(.+)", text)):
            given.append((header[1], header[2]))
        else:
            note(number, "it is no path, no NAME: VALUE and no ! NAME below one")
