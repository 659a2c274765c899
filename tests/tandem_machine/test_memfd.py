"""Shared memory is made on systems that refuse executable memfds, and on kernels that do not know others."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from control_plane.text_processes.wire import anonymous_file
from tandem_engine.execution.regions import OwnedRegion
from tandem_machine.memfd import memory_file
from tandem_runtime.kv.shared_region import SharedRegion

_NOEXEC_SEAL = 0x8
_create = os.memfd_create


def _hardened(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """memfd_create under vm.memfd_noexec = 2."""
    if not flags & _NOEXEC_SEAL:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return _create(name, flags & ~_NOEXEC_SEAL)


def _old(name: str, flags: int = os.MFD_CLOEXEC) -> int:
    """memfd_create before Linux 6.3."""
    if flags & _NOEXEC_SEAL:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    return _create(name, flags)


@pytest.mark.parametrize("kernel", [_hardened, _old])
def test_every_shared_memory_is_made(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    monkeypatch.setattr(os, "memfd_create", kernel)
    assert os.fstat(OwnedRegion(4096).fd).st_size == 4096
    region = SharedRegion.create("test", 4096, 1)
    region.close()
    os.close(anonymous_file(b"text"))


def test_a_lack_of_memory_or_descriptors_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int = 0) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="open files"):
        memory_file("test")


def test_memory_can_be_sealed_and_is_closed_on_exec() -> None:
    descriptor = memory_file("test")
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)
