"""Keeps a model's packed weights in one file, which all workers of a host map.

There is one file per checkpoint, backend and packing, below the state directory. The first worker writes the file under
a lock and under a temporary name, and renames it when it is complete. A file whose header or size is wrong is written
again; so is one whose bytes have changed, where that is looked at (`is_verified`).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from tandem_engine.models.lean.tensor_file import ALIGNMENT, TensorFile, TensorFileWriter
from tandem_engine.models.lean.weights import ROTARY_PREFIX, LeanWeights
from tandem_engine.ops.base import Ops, Weight

_FORMAT = 1
"""Version of the file's contents beside the tensors; after a change every worker writes a new file."""
_HEADER_BYTES_PER_NAME = 1024
_LOCK_SECONDS = 900.0
"""How long to wait while another worker writes, before this worker keeps private weights."""
_POLL_SECONDS = 0.1
_KEPT_SECONDS = 30 * 24 * 3600.0
"""A file that no process maps is removed this long after it was last opened: each change of kernels leaves one."""

Entries = Callable[[], Iterator[tuple[str, Weight | torch.Tensor]]]
"""Yields each weight once, by our names; the consumer holds one at a time."""


@dataclass(frozen=True)
class PackedKey:
    """Everything that the bytes of packed weights depend on."""

    weights_digest: str
    ops_name: str
    dtype: str
    """The requested dtype; "auto" keeps the checkpoint's."""
    names: tuple[str, ...]
    """Our names, each with its source."""

    @property
    def digest(self) -> str:
        """Return 32 hex digits. The machine is in it: torch's rotary tables differ between x86-64 and arm64."""
        parts = [_FORMAT, platform.machine(), self.weights_digest, self.ops_name, self.dtype, *self.names]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


class PackedWeightsCache:
    """Packed weights below `folder`, which the first write creates."""

    def __init__(
        self, folder: Path, *, is_verified: bool = False, report: Callable[[str], None] = lambda sentence: None
    ) -> None:
        """`is_verified`: every file is compared with its checksums before it is used; `report` hears of damage."""
        self._folder = folder
        self._is_verified = is_verified
        self._report = report

    def get(self, key: PackedKey, ops: Ops, entries: Entries) -> LeanWeights:
        """Return the weights in memory that processes share; write their file first if it is missing.

        Raises OSError if the folder cannot be written, the disk is full or another worker writes for too long, and
        whatever `entries` raises.
        """
        path = self._folder / f"{key.digest}.safetensors"
        found = self._open(path, key, ops)
        if found is None:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(path.with_suffix(".lock")):
                found = self._open(path, key, ops)
                if found is None:
                    _write(path, key, entries())
                    found = self._open(path, key, ops)
        if found is None:
            raise OSError(f"{path} was written but cannot be read; check the disk")
        return found

    def _open(self, path: Path, key: PackedKey, ops: Ops) -> LeanWeights | None:
        """Return the weights of the file; None if the file is missing, incomplete, damaged or of another key."""
        try:
            file = TensorFile(path)
            if file.metadata["key"] != key.digest:
                return None
            tensors = file.map(lazy_prefix=ROTARY_PREFIX)
            if self._is_verified and (damaged := _damaged(file, tensors)):
                self._report(f"{path} is damaged in {damaged} and is written again; check the disk and the memory")
                return None
            weights = _weights_in(file, tensors, ops)
        except (FileNotFoundError, BlockingIOError, KeyError, ValueError):  # a BadTensorFile is a ValueError
            return None
        with suppress(OSError):  # the file of another user: the owner's own use keeps it alive
            os.utime(path)
        return weights


def _damaged(file: TensorFile, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the name of the first tensor whose bytes are not those that were written; "" if all are.

    Raises KeyError for a file of an earlier version, which has no checksums.
    """
    expected = json.loads(file.metadata["checksums"])
    return next(
        (
            name
            for name, tensor in tensors.items()
            if xxhash.xxh3_64_hexdigest(tensor.view(-1).view(torch.uint8).numpy().data) != expected[name]
        ),
        "",
    )


def _weights_in(file: TensorFile, tensors: Mapping[str, torch.Tensor], ops: Ops) -> LeanWeights:
    parts: dict[str, dict[str, torch.Tensor]] = {}
    read_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith(ROTARY_PREFIX))
    weights = LeanWeights(mapped_bytes=read_bytes)
    for name, tensor in tensors.items():
        owner, _, part = name.partition("/")
        if part:
            parts.setdefault(owner, {})[part] = tensor
        else:
            weights.tensors[owner] = tensor
    for name, (in_features, out_features) in json.loads(file.metadata["sizes"]).items():
        weights.linears[name] = ops.packed(in_features, out_features, parts[name])
    return weights


def _write(path: Path, key: PackedKey, entries: Iterator[tuple[str, Weight | torch.Tensor]]) -> None:
    """Write all weights under a temporary name, one in memory at a time, then rename the file."""
    _tidy(path)
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    header_bytes = -(-_HEADER_BYTES_PER_NAME * (8 + len(key.names)) // ALIGNMENT) * ALIGNMENT
    writer = TensorFileWriter(unfinished, header_bytes)
    try:
        sizes: dict[str, tuple[int, int]] = {}
        for name, entry in entries:
            if isinstance(entry, torch.Tensor):
                writer.add(name, entry)
                continue
            sizes[name] = (entry.in_features, entry.out_features)
            for part, tensor in entry.tensors.items():
                writer.add(f"{name}/{part}", tensor)
        checksums = json.dumps(writer.checksums, separators=(",", ":"))
        writer.finish({"key": key.digest, "sizes": json.dumps(sizes), "ops": key.ops_name, "checksums": checksums})
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)  # before the file is closed, which fails again on a full disk
        writer.close()


def _tidy(path: Path) -> None:
    """Remove unfinished files of dead workers (the caller has the write lock) and files long unused."""
    for unfinished in path.parent.glob(f"{path.stem}.*.unfinished"):
        unfinished.unlink(missing_ok=True)
    for other in path.parent.glob("*.safetensors"):
        with suppress(BlockingIOError, FileNotFoundError), other.open("rb") as file:
            if time.time() - os.fstat(file.fileno()).st_mtime > _KEPT_SECONDS:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process that maps the file holds a shared lock
                other.unlink()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock file; the system releases it if this process dies. Raises TimeoutError, an OSError."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another worker has held {path} for {_LOCK_SECONDS:.0f} s") from error
                time.sleep(_POLL_SECONDS)
        yield
