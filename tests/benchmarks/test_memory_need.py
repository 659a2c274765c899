"""A measurement leaves memory to other programs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks.lib.memory_need import check_memory, needed_bytes


def test_need_grows_with_weights_and_workers() -> None:
    assert needed_bytes(1 << 30, 2) == 2 * needed_bytes(1 << 30, 1)
    assert needed_bytes(2 << 30, 1) > needed_bytes(1 << 30, 1) > 2 << 30


def test_nothing_starts_where_it_would_take_more_than_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    need = needed_bytes(1000, 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * need + 2))
    check_memory(tmp_path, 2)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2 * need - 2))
    with pytest.raises(RuntimeError, match="half is left to others"):
        check_memory(tmp_path, 2)
