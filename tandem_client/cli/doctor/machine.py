"""Examines memory, disk, compiler and the limits of this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tandem_client.cli.doctor.finding import Finding, size
from tandem_machine.cores import allowed_cores
from tandem_machine.limits import PROCESSES_PER_SERVICE, max_processes
from tandem_machine.memfd import memory_file
from tandem_machine.memory import Memory, num_oom_kills, usable_memory

BASE_BYTES = 2 << 30
"""The five processes of `tandem up` with the built-in model, at rest."""
_FEW_BYTES = 256 << 20
_ENOUGH_BYTES = 2 << 30
_NUM_SERVICES = 5
_OPEN_FILES = 4096
_COMPILERS = ("g++", "c++", "clang++")


def memory(model: Path | None, usable: Memory | None = None, oom_kills: int | None = None) -> Iterator[Finding]:
    """Compare the memory that this process may use with what the services and a model need."""
    usable = usable or usable_memory()
    oom_kills = num_oom_kills() if oom_kills is None else oom_kills
    weights_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model is not None else 0
    needed_bytes = BASE_BYTES + 2 * weights_bytes
    of_what = f"{model.name} needs about" if model is not None else "the built-in model needs about"
    text = f"{size(usable.available_bytes)} of {size(usable.total_bytes)} free; {of_what} {size(needed_bytes)}"
    if model is not None and not weights_bytes:
        yield Finding(
            "model", "fail", f"no *.safetensors in {model}", "give a checkpoint folder with config.json and safetensors"
        )
    if usable.available_bytes < needed_bytes:
        yield Finding(
            "memory",
            "fail",
            text,
            "end other processes, raise the container's limit, or take one worker with `tandem up --prefill 0`",
        )
    else:
        yield Finding("memory", "ok", text)
    if oom_kills:
        yield Finding(
            "memory",
            "warn",
            f"the kernel has killed {oom_kills:,} processes here for lack of memory since it counts",
            "raise the container's limit, or give the workers less with --kv-memory-limit-bytes",
        )


def disk(state_dir: Path) -> Iterator[Finding]:
    """Try to write in the state folder, and compare the free space with what logs, ledger and certificates need."""
    folder = next(path for path in (state_dir, *state_dir.parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".tandem-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        yield Finding(
            "disk",
            "fail",
            f"cannot write in {folder}: {error.strerror or error}",
            "free space, change the folder's owner, or set TANDEM_STATE_DIR to another folder",
        )
        return
    free_bytes = shutil.disk_usage(folder).free
    text = f"{size(free_bytes)} free for {state_dir}"
    if free_bytes < _FEW_BYTES:
        yield Finding("disk", "fail", text, "free space, or set TANDEM_STATE_DIR to a folder on another disk")
    elif free_bytes < _ENOUGH_BYTES:
        yield Finding("disk", "warn", text, "free space: logs, ledger and stored blocks grow")
    else:
        yield Finding("disk", "ok", text)


def shared_memory() -> Iterator[Finding]:
    """Make a memfd: the KV pools of workers lie in such files."""
    try:
        descriptor = memory_file("tandem-doctor")
    except OSError as error:
        yield Finding(
            "shared memory",
            "fail",
            f"this system refuses memory files (memfd_create: {error.strerror})",
            "permit memfd_create in the container's seccomp profile",
        )
        return
    try:
        os.ftruncate(descriptor, 1 << 20)
    finally:
        os.close(descriptor)
    yield Finding("shared memory", "ok", "memory files can be made")


def compiler(package: Path | None = None) -> Iterator[Finding]:
    """Look for compiled kernels in the package, else for a C++ compiler. `package`: the folder of tandem_engine."""
    package = package or _engine_folder()
    if package is None:
        yield Finding("kernels", "note", "the engine is not installed here: this machine runs no workers")
        return
    if libraries := sorted((package / "ops" / "cpu" / "prebuilt").glob("*.so")):
        yield Finding("kernels", "ok", f"the package brings {len(libraries)} compiled libraries")
        return
    names = [name for name in (os.environ.get("CXX"), *_COMPILERS) if name]
    if path := next((found for name in names if (found := shutil.which(name))), None):
        yield Finding("kernels", "ok", f"compiled at the first start with {path}")
        return
    yield Finding(
        "kernels",
        "warn",
        f"no C++ compiler ({', '.join(_COMPILERS)} or $CXX) and no compiled kernels: CPU workers fall back to torch",
        "install g++, or the wheel for this platform (docs: install/wheel.md)",
    )


def limits(open_files: int | None = None, processes: int | None = None) -> Iterator[Finding]:
    """Compare the limits of open files and processes with what the services need."""
    if open_files is None:
        open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    processes = max_processes() if processes is None else processes
    text = f"{open_files:,} open files"
    if open_files < _OPEN_FILES:
        yield Finding(
            "limits", "warn", f"{text}; a gateway under load wants {_OPEN_FILES:,}", f"ulimit -n {_OPEN_FILES}"
        )
    else:
        yield Finding("limits", "ok", text)
    needed = _NUM_SERVICES * PROCESSES_PER_SERVICE
    if processes is not None and processes < needed:
        yield Finding(
            "limits",
            "fail",
            f"{processes:,} processes and threads; `tandem up` needs {needed} at least",
            "raise pids.max of the container, TasksMax of systemd, or ulimit -u",
        )


def processor(cores: int | None = None) -> Iterator[Finding]:
    """Name the cores that this process may use."""
    cores = len(allowed_cores()) if cores is None else cores
    text = f"{cores} cores of {platform.machine()}"
    if cores < 2:
        yield Finding(
            "processor",
            "warn",
            f"{text}: prefill and decode share it",
            "give the container two cores, or take one worker with `tandem up --prefill 0`",
        )
    else:
        yield Finding("processor", "ok", text)


def _engine_folder() -> Path | None:
    spec = importlib.util.find_spec("tandem_engine")
    return Path(spec.origin).parent if spec is not None and spec.origin else None
