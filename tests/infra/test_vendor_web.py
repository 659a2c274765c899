"""The libraries of the live page are the files whose hashes their manifest has."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra.site import vendor_web


def test_the_libraries_are_those_of_the_manifest_with_their_licences() -> None:
    assert vendor_web.problems() == []
    for library in vendor_web.LIBRARIES:
        assert (vendor_web.FOLDER / f"LICENSE.{library.name}").stat().st_size > 500


def test_a_changed_and_an_added_file_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in vendor_web.FOLDER.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "preact.js").write_text("alert(1)")
    (tmp_path / "more.js").write_text("")
    monkeypatch.setattr(vendor_web, "FOLDER", tmp_path)
    assert vendor_web.problems() == [
        "more.js is in the folder or in the manifest only",
        "preact.js is not the file whose sha256 the manifest has",
    ]
