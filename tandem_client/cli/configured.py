"""Which settings has the user already chosen, in tandem.toml or in the environment?"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROLES = ("prefill", "decode", "kv", "control")


Configured = Mapping[str, Mapping[str, object]]
"""By role, the settings the user has chosen elsewhere, as they stand there: text, or a value of TOML."""


def configured_settings(config: Path | None) -> Configured:
    """Return, by role, the settings chosen for it. Raises ValueError for a file that is none.

    The file is `config`, else TANDEM_CONFIG, else tandem.toml here: the one the services will read.
    """
    tables = _tables(config)
    return {role: _in_table(tables, role) | _in_environment(role) for role in ROLES}


def cores_in(value: object) -> tuple[int, ...]:
    """Read the value of `cpus`, "0,1" or [0, 1]; nothing if it is neither: the worker will refuse it by name."""
    items = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else ()
    try:
        return tuple(int(item) for item in items)
    except (TypeError, ValueError):
        return ()


def _tables(config: Path | None) -> Mapping[str, object]:
    named = config or (Path(os.environ["TANDEM_CONFIG"]) if os.environ.get("TANDEM_CONFIG") else None)
    path = named or Path("tandem.toml")
    if not path.is_file():
        if named:
            raise ValueError(f"there is no settings file {named}")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the settings file {path} is not TOML: {error}") from error


def _in_table(tables: Mapping[str, object], role: str) -> dict[str, object]:
    table = tables.get(role, {})
    return dict(table) if isinstance(table, dict) else {}


def _in_environment(role: str) -> dict[str, object]:
    prefix = f"TANDEM_{role.upper()}_"
    return {name.removeprefix(prefix).lower(): value for name, value in os.environ.items() if name.startswith(prefix)}
