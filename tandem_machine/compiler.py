"""Compiles shared libraries of C++ with this machine's compiler, once per machine.

<folder>/<key>.so      key: digest of sources, compiler, flags and the CPU's features
<folder>/<key>.lock    held while one process compiles, so that other processes wait and use its result
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tandem_machine.folders import home_folder

_COMPILERS = ("g++", "c++", "clang++")
# Products are fused only where the source requests it: equal bits from every compiler and every CPU with FMA.
FLAGS = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
_COMPILE_SECONDS = 180.0
_VERSION_SECONDS = 10.0


class CannotCompile(Exception):
    """There is no library; the message names the reason and the remedy."""


@dataclass(frozen=True)
class Sources:
    """The C++ of one library."""

    folder: Path
    main: str
    """The file that is compiled; it may include others of the folder."""

    def digest(self) -> str:
        """Return a digest of all files, 16 hex digits."""
        digest = hashlib.blake2b(digest_size=8)
        for source in sorted(self.folder.glob("*.[ch]pp")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return digest.hexdigest()


def compile_library(
    sources: Sources,
    folder: Path | None,
    machine_flags: Sequence[str],
    compiler: str | None = None,
    seconds: float = _COMPILE_SECONDS,
) -> Path:
    """Return the shared library for this machine, compiled into `folder` if it is missing.

    `folder` None: the first of the user's folders that can be written. `compiler` None: this machine's. Any number of
    processes may call at once. `seconds`: for the compiler, and as long for another process that compiles the same.
    Raises CannotCompile.
    """
    compiler = compiler or find_compiler()
    failures = []
    for candidate in [folder] if folder else _user_folders():
        try:
            return _library_in(candidate, sources, compiler, machine_flags, seconds)
        except OSError as error:
            failures.append(f"cannot keep compiled code in {candidate}: {error}")
    if not failures:
        failures.append(f"user {os.getuid()} has no home folder to keep compiled code in")
    raise CannotCompile(f"{'; '.join(failures)}; set TANDEM_STATE_DIR to a folder that can be written")


def _library_in(folder: Path, sources: Sources, compiler: str, machine_flags: Sequence[str], seconds: float) -> Path:
    """Return the library in `folder`, compiled if it is missing; raises OSError if it cannot be kept there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_that_only_we_write(folder)
    library = folder / f"{_key(sources, compiler, machine_flags)}.so"
    if library.exists():
        return library
    with _lock(library.with_suffix(".lock"), seconds):
        if not library.exists():
            _compile(sources, compiler, machine_flags, library, seconds)
    return library


def _check_that_only_we_write(folder: Path) -> None:
    """Refuse a folder in which another user could have put a library, which would run as this user."""
    status = folder.stat()
    why = ""
    if status.st_uid not in (os.getuid(), 0):
        why = f"belongs to user {status.st_uid}, not to {os.getuid()} or root; remove it"
    elif status.st_mode & stat.S_IWOTH:
        why = "is writable by everyone; chmod o-w it"
    elif status.st_mode & stat.S_IWGRP:
        why = "is writable by its group; chmod g-w it"
    if why:
        raise CannotCompile(f"code is loaded from {folder}, and it {why}")


def find_compiler() -> str:
    """Return the path of this machine's C++ compiler. Raises CannotCompile."""
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise CannotCompile(f"no C++ compiler found ({', '.join(_COMPILERS)} or $CXX); install one, such as g++")


def _user_folders() -> list[Path]:
    """Return where this user's libraries may be kept: the cache, then the state directory if one is named."""
    home = home_folder()
    cache = Path(os.environ["XDG_CACHE_HOME"]) if os.environ.get("XDG_CACHE_HOME") else home and home / ".cache"
    state = os.environ.get("TANDEM_STATE_DIR")
    folders = [cache / "tandem" / "kernels"] if cache else []
    return [*folders, Path(state) / "kernels"] if state else folders


def _key(sources: Sources, compiler: str, machine_flags: Sequence[str]) -> str:
    version = _run([compiler, "--version"], _VERSION_SECONDS).stdout.partition("\n")[0]
    parts = (sources.digest(), compiler, version, *FLAGS, *machine_flags, platform.machine(), _cpu_features())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _cpu_features() -> str:
    """Return the CPU features that -march=native reads: different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _compile(sources: Sources, compiler: str, machine_flags: Sequence[str], library: Path, seconds: float) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="compiling-") as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *FLAGS, *machine_flags, str(sources.folder / sources.main), "-o", str(made)]
        result = _run(command, seconds, temporary=scratch)
        if result.returncode != 0:
            raise CannotCompile(f"{compiler} failed on {sources.main}: {result.stderr.strip()[-2000:]}")
        made.replace(library)


def _run(command: list[str], seconds: float, temporary: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command; `temporary`: its folder for temporary files, since the root file system may be read-only."""
    environment = os.environ if temporary is None else {**os.environ, "TMPDIR": temporary}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"cannot run {command[0]}: {error}") from error


@contextmanager
def _lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold the lock; after the time limit of a compilation continue without it, so that both processes compile."""
    with path.open("w") as file:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield  # closing the file releases the lock
