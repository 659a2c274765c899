"""Puts the process of a test into cgroups of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_machine import cgroups


def put_into_cgroup(folder: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str]) -> None:
    """Write `files` into `folder`, the root of all cgroups, and `membership`, the text of /proc/self/cgroup."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "membership").write_text(membership)
    monkeypatch.setattr(cgroups, "ROOT", folder)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", folder / "membership")
