"""Makes files in memory that nobody can execute, also where the system refuses others (vm.memfd_noexec = 2)."""

from __future__ import annotations

import errno
import os

_MFD_NOEXEC_SEAL = 0x8  # Linux 6.3; not named in Python's os


def memory_file(name: str) -> int:
    """Return the descriptor of a new, empty memfd that can be sealed; it is closed on exec."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create(name, flags)  # a kernel that does not know the flag
