"""How does a pool that other processes read come to lie on huge pages?

Attention reads keys and values in pieces of some 4 KB, all over the pool: on pages of that size each piece costs a walk
through the page tables. Linux gives shared memory small pages unless the administrator says otherwise; asked for by
MADV_COLLAPSE (since 6.1) it gives huge ones all the same, where place in memory and place in the file agree.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from functools import cache

HUGE_BYTES = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; these two are not named in Python's mmap
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """Give a new memfd `num_bytes` of memory, all zero and present, on huge pages if it may be, and map it writable.

    Too little memory is an OSError here, not a SIGBUS later. The map goes with the last that was made from it.
    """
    os.ftruncate(fd, num_bytes)
    mapped = _map_aligned(fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(mapped)
    with contextlib.suppress(OSError):  # no huge page is free, or the kernel is older: small ones do
        for offset in range(0, num_bytes - HUGE_BYTES + 1, HUGE_BYTES):
            os.posix_fallocate(fd, offset, 1)  # what is empty cannot be collapsed, and what is full would be copied
        _advise(address, num_bytes // HUGE_BYTES * HUGE_BYTES, _MADV_COLLAPSE)
    os.posix_fallocate(fd, 0, num_bytes)
    with contextlib.suppress(OSError):  # an older kernel: pages are then mapped at their first use
        _advise(address, num_bytes, _MADV_POPULATE_WRITE)
    return memoryview(mapped)


def map_read_only(fd: int, num_bytes: int) -> memoryview:
    """Map a memfd of another process, with its huge pages if it has any. The map goes with the last made from it."""
    return memoryview(_map_aligned(fd, num_bytes, mmap.PROT_READ)).toreadonly()


def _map_aligned(fd: int, num_bytes: int, protection: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Map at the first multiple of a huge page within a stretch that is ours, and give back what is left of that."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    start = _mmap(None, size + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-start // HUGE_BYTES) * HUGE_BYTES
    _mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    for first, end in ((start, address), (address + size, start + size + HUGE_BYTES)):
        if first < end:
            _libc().munmap(first, end - first)
    mapped = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(mapped, _libc().munmap, address, size).atexit = False  # tensors may outlive it there
    return mapped


def _mmap(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found: int = _libc().mmap(address, num_bytes, protection, flags, fd, 0)
    if found == _FAILED:
        raise _last_error()
    return found


def _advise(address: int, num_bytes: int, advice: int) -> None:
    if _libc().madvise(address, num_bytes, advice) != 0:
        raise _last_error()


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.argtypes, library.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    library.munmap.argtypes = (address, size)
    library.madvise.argtypes = (address, size, number)
    return library
