"""Sets the memory policy of a thread by system calls: which NUMA node its new pages come from. No libnuma is needed.

See set_mempolicy(2), get_mempolicy(2). Threads and processes that start later inherit the policy. The policy holds for
all pages that they touch first: of private memory, of memfds, and of files that are not in the page cache yet.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from dataclasses import dataclass

_MAX_NODES = 1024
"""The most that Linux can be built for. get_mempolicy refuses a mask that is smaller than the kernel's."""
_WORD_BITS = 64
_NUMBERS = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""Of set_mempolicy and get_mempolicy, by machine."""

DEFAULT, PREFERRED, LOCAL = 0, 1, 4
_NAMES = {DEFAULT: "default", PREFERRED: "preferred", 2: "bind", 3: "interleave", LOCAL: "local", 5: "preferred many"}
_MODE_BITS = 0xFF
"""Above them are flags."""

_Mask = ctypes.c_uint64 * (_MAX_NODES // _WORD_BITS)


@dataclass(frozen=True)
class MemoryPolicy:
    """The kernel's mode, and the nodes that it names."""

    mode: int
    nodes: tuple[int, ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether the kernel chooses: the node of the core that touches a page first."""
        return self.mode in (DEFAULT, LOCAL)

    def __str__(self) -> str:
        name = _NAMES.get(self.mode, f"mode {self.mode}")
        return f"{name}:{','.join(map(str, self.nodes))}" if self.nodes else name


def memory_policy() -> MemoryPolicy:
    """Return the policy of this thread. Raises OSError if the kernel or a seccomp profile refuses."""
    mode, mask = ctypes.c_int(), _Mask()
    _call(1, ctypes.byref(mode), mask, _MAX_NODES, None, 0)
    named = tuple(number for number in range(_MAX_NODES) if mask[number // _WORD_BITS] >> number % _WORD_BITS & 1)
    return MemoryPolicy(mode.value & _MODE_BITS, named)


def prefer_node(number: int) -> None:
    """Take new pages from this node, and from others once it is full. Raises OSError, as `memory_policy`."""
    mask = _Mask()
    mask[number // _WORD_BITS] = 1 << number % _WORD_BITS
    _call(0, PREFERRED, mask, _MAX_NODES + 1)  # the kernel counts one bit less than it is told


def _call(which: int, *arguments: object) -> None:
    if (numbers := _NUMBERS.get(platform.machine())) is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if system_call(numbers[which], *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def system_call(number: int, *arguments: object) -> int:
    """Make a system call; -1 says that errno has the reason."""
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    whole = (ctypes.c_long(value) if isinstance(value, int) else value for value in arguments)
    return int(library.syscall(ctypes.c_long(number), *whole))
