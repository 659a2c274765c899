"""Compiles the kernels' shared library with this machine's compiler, once per machine.

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
from pathlib import Path

_SOURCES = Path(__file__).parent / "cpp"
_COMPILERS = ("g++", "c++", "clang++")
# Products are fused only where the source requests it: equal bits from every compiler and every CPU with FMA.
_FLAGS = (
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
NATIVE = ("-march=native",)
_COMPILE_SECONDS = 180.0


class KernelsUnavailable(Exception):
    """The C++ kernels are unavailable; the message names the reason and the remedy. Plain torch still works."""


def compile_kernels(folder: Path | None = None, machine_flags: Sequence[str] = NATIVE) -> Path:
    """Return the shared library for this machine, compiled into `folder` if it is missing.

    `folder` None: the user's cache (XDG_CACHE_HOME). Any number of processes may call at once. Raises
    KernelsUnavailable.
    """
    compiler = _compiler()
    folder = folder or _user_cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & stat.S_IWOTH:
            raise KernelsUnavailable(f"{folder} is writable by everyone, and code is loaded from it; chmod o-w it")
        library = folder / f"{_key(compiler, machine_flags)}.so"
        if library.exists():
            return library
        with _lock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, machine_flags, library)
    except OSError as error:
        raise KernelsUnavailable(f"cannot keep compiled kernels in {folder}: {error}") from error
    return library


def sources_digest() -> str:
    """Return a digest of the kernels' sources, 16 hex digits."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(_SOURCES.glob("*.[ch]pp")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()


def _compiler() -> str:
    for name in (os.environ.get("CXX", ""), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise KernelsUnavailable(f"no C++ compiler found ({', '.join(_COMPILERS)} or $CXX); install one, such as g++")


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "kernels"


def _key(compiler: str, machine_flags: Sequence[str]) -> str:
    version = _run([compiler, "--version"], seconds=30).stdout.splitlines()[0]
    parts = (sources_digest(), compiler, version, *_FLAGS, *machine_flags, platform.machine(), _cpu_features())
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()


def _cpu_features() -> str:
    """Return the CPU features that -march=native reads: different machines may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.startswith(wanted))


def _compile(compiler: str, machine_flags: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="compiling-") as scratch:
        made = Path(scratch) / library.name
        source = str(_SOURCES / "kernels.cpp")
        result = _run([compiler, *_FLAGS, *machine_flags, source, "-o", str(made)], seconds=_COMPILE_SECONDS)
        if result.returncode != 0:
            raise KernelsUnavailable(f"{compiler} failed on the kernels: {result.stderr.strip()[-2000:]}")
        made.replace(library)


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"cannot run {command[0]}: {error}") from error


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the lock; after the time limit of a compilation continue without it, so that both processes compile."""
    with path.open("w") as file:
        deadline = time.monotonic() + _COMPILE_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
        yield  # closing the file releases the lock
