"""Does to a process what a unit's sandboxing does, then runs the command: system calls, address families, memory.

python -m tests.install.confined UNIT-FILE COMMAND ...

SystemCallFilter= and RestrictAddressFamilies= become a filter (libseccomp), MemoryDenyWriteExecute= the kernel's own
refusal (prctl PR_SET_MDWE, Linux 6.3). systemd does the same.
"""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import sys
from pathlib import Path

from infra.systemd.units import Unit, read

_ALLOW = 0x7FFF_0000
_EPERM = 0x0005_0000 | 1
_EAFNOSUPPORT = 0x0005_0000 | 97
_EQUAL = 4
_FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
_PR_SET_MDWE = 65
_PR_MDWE_REFUSE_EXEC_GAIN = 1


class _Compare(ctypes.Structure):
    """struct scmp_arg_cmp of libseccomp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


def main() -> int:
    unit, command = read(Path(sys.argv[1])), sys.argv[2:]
    files = min(int(unit.one("LimitNOFILE")), resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(int(unit.one("UMask"), 8))
    if unit.all("MemoryDenyWriteExecute") == ["yes"]:
        _deny_write_execute()
    _filter(unit)
    os.execv(command[0], command)


def _deny_write_execute() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_MDWE, _PR_MDWE_REFUSE_EXEC_GAIN, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the kernel is older than 6.3")


def _filter(unit: Unit) -> None:
    """Refuse system calls, and families of addresses. Needs no right: no_new_privs is set."""
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    for name in sorted(_refused(unit)):
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # a name of another kind of machine
            _check(library.seccomp_rule_add_array(context, ctypes.c_uint32(_EPERM), number, 0, None), name)
    families = {_FAMILIES[word] for line in unit.all("RestrictAddressFamilies") for word in line.split()}
    socket = library.seccomp_syscall_resolve_name(b"socket")
    for family in range(1, 46):
        if family not in families:
            compare = (_Compare * 1)(_Compare(0, _EQUAL, family, 0))
            code = library.seccomp_rule_add_array(context, ctypes.c_uint32(_EAFNOSUPPORT), socket, 1, compare)
            _check(code, f"socket of family {family}")
    _check(library.seccomp_load(context), "the filter")


def _check(code: int, what: str) -> None:
    if code != 0:
        raise OSError(-code, f"seccomp refuses {what}")


def _refused(unit: Unit) -> set[str]:
    """Return the system calls that the unit's SystemCallFilter= leaves out."""
    groups = _groups()
    allowed: set[str] = set()
    for line in unit.all("SystemCallFilter"):
        calls = {call for name in line.removeprefix("~").split() for call in _calls(name, groups)}
        allowed = allowed - calls if line.startswith("~") else allowed | calls
    return _calls("@known", groups) - allowed - {"execve", "exit", "exit_group"}


def _groups() -> dict[str, set[str]]:
    """Return the names of systemd's groups of system calls, and what is in them: calls, and names of groups."""
    command = ["systemd-analyze", "--no-pager", "syscall-filter"]
    found: dict[str, set[str]] = {}
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("@"):
            group = found.setdefault(line.strip(), set())
        elif (word := line.strip()) and not word.startswith("#") and found:
            group.add(word)
    return found


def _calls(name: str, groups: dict[str, set[str]]) -> set[str]:
    if name not in groups:
        return {name}
    return {call for each in groups[name] for call in _calls(each, groups)}


if __name__ == "__main__":
    sys.exit(main())
