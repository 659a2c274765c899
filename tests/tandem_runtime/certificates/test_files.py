"""The three files of a certificate change together, and only their owner may read them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tandem_runtime.certificates.files import CertificateFiles, folder_version, read_certificate, write_certificate


def _files(number: int) -> CertificateFiles:
    text = str(number).encode()
    return CertificateFiles(text, text, text)


def test_only_the_owner_may_read_a_key(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "certificate"
    write_certificate(folder, _files(1))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "current" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert read_certificate(folder) == _files(1)
    assert "secret" not in repr(CertificateFiles(b"", b"secret", b""))


def test_a_reader_never_sees_files_of_two_writes(tmp_path: Path) -> None:
    write_certificate(tmp_path, _files(0))
    done = threading.Event()

    def write() -> None:
        for number in range(1, 30):
            write_certificate(tmp_path, _files(number))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        num_read = 0
        while not done.is_set():
            read = read_certificate(tmp_path)
            assert read.certificate == read.key == read.bundle
            num_read += 1
    finally:
        writer.join()
    assert num_read and read_certificate(tmp_path) == _files(29)


def test_a_write_leaves_nothing_of_the_last_one(tmp_path: Path) -> None:
    versions = {folder_version(tmp_path)}
    for number in range(3):
        write_certificate(tmp_path, _files(number))
        versions.add(folder_version(tmp_path))
    assert len(versions) == 4
    assert len(list(tmp_path.iterdir())) == 2  # the link and the folder that it names


def test_a_write_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificate(tmp_path, _files(1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_certificate(tmp_path, _files(2))
    assert read_certificate(tmp_path) == _files(1)
    assert len(list(tmp_path.iterdir())) == 2


def test_nothing_written_and_too_much_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_certificate(tmp_path)
    write_certificate(tmp_path, CertificateFiles(b"x" * 300_000, b"", b""))
    with pytest.raises(ValueError, match="262,144"):
        read_certificate(tmp_path)
