"""Keeps a process's certificate in three files, written together.

    <folder>/                   mode 0700
        current -> .<random>    the symbolic link that a write switches
        .<random>/
            certificate.pem     the process's certificate first, then intermediate ones
            key.pem             its private key, mode 0600
            bundle.pem          the certificates of the trusted authorities, one or two

Readers resolve the link once and read all three files of one folder, so they never see a key of one write and a
certificate of another.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path

CERTIFICATE = "certificate.pem"
KEY = "key.pem"
BUNDLE = "bundle.pem"
_CURRENT = "current"
_MAX_FILE_BYTES = 256 * 1024
_MAX_READS = 10
"""A read that meets this many writes in a row gives up. Writes are minutes apart."""


@dataclass(frozen=True)
class CertificateFiles:
    """The contents of the three files, in PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    bundle: bytes


def write_certificate(folder: Path, files: CertificateFiles) -> None:
    """Replace the files in `folder` at once, and delete those that they replace. Creates the folder.

    A folder has one writer at a time: the process itself, or the supervisor that renews it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    new = folder / f".{secrets.token_hex(8)}"
    new.mkdir(mode=0o700)
    try:
        for name, content in ((CERTIFICATE, files.certificate), (KEY, files.key), (BUNDLE, files.bundle)):
            _write(new / name, content)
        _switch(folder, new)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _delete_old(folder, keep=new.name)


def read_certificate(folder: Path) -> CertificateFiles:
    """Read the files of one write; raises FileNotFoundError where none has ended, ValueError for a huge file."""
    for _ in range(_MAX_READS):
        current = folder / (folder / _CURRENT).readlink()
        try:
            return read_files(current / CERTIFICATE, current / KEY, current / BUNDLE)
        except FileNotFoundError:
            if folder / (folder / _CURRENT).readlink() == current:
                raise
    raise FileNotFoundError(f"{folder} changed {_MAX_READS} times while it was read")


def read_files(certificate: Path, key: Path, bundle: Path) -> CertificateFiles:
    """Read three files from elsewhere (cert-manager, SPIRE)."""
    return CertificateFiles(_read(certificate), _read(key), _read(bundle))


def folder_version(folder: Path) -> str:
    """Return a text that changes with each write; "" before the first."""
    try:
        return str((folder / _CURRENT).readlink())
    except FileNotFoundError:
        return ""


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _switch(folder: Path, new: Path) -> None:
    link = folder / f".link-{secrets.token_hex(8)}"
    link.symlink_to(new.name)
    try:
        link.replace(folder / _CURRENT)
    except OSError:
        with contextlib.suppress(FileNotFoundError):
            link.unlink()
        raise


def _delete_old(folder: Path, keep: str) -> None:
    for entry in folder.iterdir():
        if entry.name.startswith(".") and entry.name != keep:
            if entry.is_symlink():
                entry.unlink(missing_ok=True)
            else:
                shutil.rmtree(entry, ignore_errors=True)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(f"{path} has more than {_MAX_FILE_BYTES:,} bytes, the most of a certificate file")
    return content
