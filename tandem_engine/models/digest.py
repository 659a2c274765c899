"""Hashes weight files to 128-bit digests.

A file is hashed once: a file of the same path, size, modification time and inode counts as the same file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_DIGEST_BYTES = 16
_CACHE_NAME = "digests.json"


class DigestCache:
    """Digests of files, cached in this object and in `folder` (None: in this object alone).

    A folder that cannot be read or written costs only time; `report` takes a sentence about it for people.
    """

    def __init__(self, folder: Path | None, report: Callable[[str], None] = lambda sentence: None) -> None:
        self._report = report
        self._path = None if folder is None else folder / _CACHE_NAME
        self._fresh: dict[str, dict[str, int | str]] = {}

    def digest(self, files: Sequence[Path]) -> str:
        """Return the hex BLAKE2b of the names and contents of `files`, in their order."""
        known = self._load() | self._fresh
        entries = {str(path.resolve()): _identity(path) for path in files}
        fresh = {
            path: {**identity, "digest": _hash_file(Path(path))}
            for path, identity in entries.items()
            if not _matches(known.get(path), identity)
        }
        if fresh:
            known |= fresh
            self._fresh |= fresh
            self._save(fresh)
        whole = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for path in files:
            whole.update(f"{path.name}\0{known[str(path.resolve())]['digest']}\0".encode())
        return whole.hexdigest()

    def _load(self) -> dict[str, dict[str, int | str]]:
        if self._path is None:
            return {}
        try:
            entries = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}  # none yet, or a damaged one: computed again
        return entries if isinstance(entries, dict) else {}

    def _save(self, fresh: dict[str, dict[str, int | str]]) -> None:
        """Add entries by replacing the whole file; an entry of another process may be lost and computed again."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self._path, self._load() | fresh)
        except OSError as error:
            self._report(f"digests of weights are computed again at the next start: {self._path} is not kept ({error})")


def _replace(path: Path, entries: dict[str, dict[str, int | str]]) -> None:
    """Write a temporary file and rename it; a failure leaves no file behind."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=_CACHE_NAME)
    try:
        with os.fdopen(number, "w") as file:  # closed here: the last bytes may be those that do not fit the disk
            json.dump(entries, file, indent=1)
        Path(name).replace(path)
    finally:
        Path(name).unlink(missing_ok=True)


def _identity(path: Path) -> dict[str, int | str]:
    status = path.stat()
    return {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _matches(entry: object, identity: dict[str, int | str]) -> bool:
    return isinstance(entry, dict) and "digest" in entry and identity.items() <= entry.items()


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=_DIGEST_BYTES)).hexdigest()
