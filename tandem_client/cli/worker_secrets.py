"""Which variables does a Worker get from .dev.vars, the file of secrets that wrangler reads while one develops?"""

from __future__ import annotations

import re
from pathlib import Path

_LINE = re.compile(
    r"""
    \s*(?:export\s+)?([A-Za-z_][\w.-]*)\s*=\s*           # NAME =
    (?:"((?:\\.|[^"\\])*)"|'([^']*)'|([^\s"'].*?)?)      # "escaped", 'as it is', or the rest of the line
    \s*(?:(?<!\S)\#.*)?                                  # and a comment
    """,
    re.VERBOSE,
)
_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", '\\"': '"', "\\\\": "\\"}


def read_secrets(folder: Path, environment: str | None) -> dict[str, str]:
    """Return what `.dev.vars.NAME` of the environment says, else `.dev.vars`; raises ValueError naming the line."""
    names = [*([f".dev.vars.{environment}"] if environment else []), ".dev.vars"]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        fits = _LINE.fullmatch(line)
        if fits is None:
            raise ValueError(f"line {number} of {path} is not NAME=VALUE, or a quote in it is not closed")
        name, quoted, literal, bare = fits.groups()
        escaped = None if quoted is None else re.sub(r"\\.", lambda each: _ESCAPES.get(each[0], each[0]), quoted)
        found[name] = next(value for value in (escaped, literal, bare, "") if value is not None)
    return found
