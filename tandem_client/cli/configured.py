"""Which settings has the user already chosen, in tandem.toml or in the environment?"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Set
from pathlib import Path

ROLES = ("prefill", "decode", "kv", "control")


def configured_settings(config: Path | None) -> Mapping[str, Set[str]]:
    """Return, by role, the names of settings chosen for it. Raises ValueError for a file that is none.

    The file is `config`, else TANDEM_CONFIG, else tandem.toml here: the one the services will read.
    """
    tables = _tables(config)
    return {role: _names_in_table(tables, role) | _names_in_environment(role) for role in ROLES}


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


def _names_in_table(tables: Mapping[str, object], role: str) -> set[str]:
    table = tables.get(role, {})
    return set(table) if isinstance(table, dict) else set()


def _names_in_environment(role: str) -> set[str]:
    prefix = f"TANDEM_{role.upper()}_"
    return {name.removeprefix(prefix).lower() for name in os.environ if name.startswith(prefix)}
