"""Which variables does a Worker get from .dev.vars or .env, the files of secrets that wrangler reads?"""

from __future__ import annotations

import re
from pathlib import Path

_ENTRY = re.compile(
    r"""
    [^\S\n]*(?:export[ \t]+)?([A-Za-z_][\w.-]*)[^\S\n]*=[^\S\n]*     # NAME =
    (?:"((?:\\.|[^"\\])*)"|'([^']*)'|`([^`]*)`|([^\s"'`][^\n]*?)?)   # "escaped", 'as it is', or the line's rest
    [^\S\n]*(?:(?<!\S)\#[^\n]*)?(?:\n|\Z)                            # and a comment
    """,
    re.VERBOSE | re.DOTALL,
)
_NOTHING = re.compile(r"[^\S\n]*(?:\#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", '\\"': '"', "\\\\": "\\"}


def read_secrets(folder: Path, environment: str | None) -> dict[str, str]:
    """Return what the files say; raises ValueError naming the line that says nothing.

    `.dev.vars.NAME` of the environment alone, else `.dev.vars` alone, else each `.env` over the more general ones:
    https://developers.cloudflare.com/workers/local-development/environment-variables
    """
    names = [*([f".dev.vars.{environment}"] if environment else []), ".dev.vars"]
    found = next(([folder / name] for name in names if (folder / name).is_file()), None)
    if found is None:
        of_environment = f".env.{environment}" if environment else ".env"
        names = [".env", of_environment, ".env.local", f"{of_environment}.local"]
        found = [folder / name for name in names if (folder / name).is_file()]
    return {name: value for path in dict.fromkeys(found) for name, value in _read(path).items()}


def _read(path: Path) -> dict[str, str]:
    text, place = path.read_text(encoding="utf-8"), 0
    found: dict[str, str] = {}
    while place < len(text):
        if nothing := _NOTHING.match(text, place):
            place = nothing.end()
            continue
        fits = _ENTRY.match(text, place)
        if fits is None:
            number = text.count("\n", 0, place) + 1
            raise ValueError(f"line {number} of {path} is not NAME=VALUE, or a quote in it is not closed")
        name, quoted, literal, backquoted, bare = fits.groups()
        escaped = None if quoted is None else re.sub(r"\\.", lambda each: _ESCAPES.get(each[0], each[0]), quoted)
        found[name] = next(value for value in (escaped, literal, backquoted, bare, "") if value is not None)
        place = fits.end()
    return found
