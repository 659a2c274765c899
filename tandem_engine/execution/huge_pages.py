"""Maps shared memory on huge pages.

Attention reads keys and values in pieces of some 4 KB from the whole pool. On 4 KB pages each piece costs a walk
through the page tables. Linux gives shared memory small pages by default. MADV_COLLAPSE (Linux 6.1) makes them huge, if
the offset in memory and the offset in the file agree.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from functools import cache

HUGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap does not name these two
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, num_bytes: int) -> memoryview:
    """Allocate `num_bytes` of zeros for a new memfd, on huge pages if possible, and map them writable.

    Memory is taken now, not with a SIGBUS later. Raises OSError if it is short; where a cgroup has a limit, the kernel
    may kill this process instead. The map ends with the last object made from it.
    """
    os.ftruncate(fd, num_bytes)
    mapped = _map_aligned(fd, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(mapped)
    with contextlib.suppress(OSError):  # no huge page is free, or the kernel is older: keep small pages
        for offset in range(0, num_bytes - HUGE_BYTES + 1, HUGE_BYTES):
            os.posix_fallocate(fd, offset, 1)  # empty ranges cannot be collapsed, full ranges would be copied
        _advise(address, num_bytes // HUGE_BYTES * HUGE_BYTES, _MADV_COLLAPSE)
    os.posix_fallocate(fd, 0, num_bytes)
    with contextlib.suppress(OSError):  # an older kernel maps pages at their first use
        _advise(address, num_bytes, _MADV_POPULATE_WRITE)
    return memoryview(mapped)


def take_pages(address: int, num_bytes: int) -> None:
    """Take the pages of private memory now, on huge pages if possible; its content stays.

    Memory that was never written has no pages: each 4 KB of it costs a fault at its first use, in a request.
    """
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    num_whole = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    for advice in (_MADV_HUGEPAGE, _MADV_POPULATE_WRITE):
        with contextlib.suppress(OSError):  # no huge pages in this kernel, or an older one: pages are taken when used
            _advise(first, max(0, num_whole), advice)


def map_read_only(fd: int, num_bytes: int) -> memoryview:
    """Map a memfd of another process, with its huge pages if any. The map ends with the last object made from it."""
    return memoryview(_map_aligned(fd, num_bytes, mmap.PROT_READ)).toreadonly()


def _map_aligned(fd: int, num_bytes: int, protection: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Reserve a larger range, map at its first multiple of a huge page, and unmap the rest."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    start = _mmap(None, size + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-start // HUGE_BYTES) * HUGE_BYTES
    _mmap(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    for first, end in ((start, address), (address + size, start + size + HUGE_BYTES)):
        if first < end:
            _libc().munmap(first, end - first)
    mapped = (ctypes.c_ubyte * num_bytes).from_address(address)
    weakref.finalize(mapped, _libc().munmap, address, size).atexit = False  # tensors may live longer at exit
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
