"""Compiles the stand-in for NVIDIA's driver (`cuda_stub/cuda_stub.c`)."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "cuda_stub" / "cuda_stub.c"


@functools.cache
def stub_folder() -> Path:
    """Return a folder with the stub as libcuda.so.1, for LD_LIBRARY_PATH; skip where there is no C compiler."""
    return compile_stub()


def stub_library() -> str:
    """Return the path of the stub, for processes that have started."""
    return str(stub_folder() / "libcuda.so.1")


def compile_stub(*flags: str) -> Path:
    """Compile the stub into a new folder; raises CalledProcessError for code that the compiler warns of."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("NO C COMPILER (cc, gcc, clang): regions in device memory are not tested on this machine")
    folder = Path(tempfile.mkdtemp(prefix="tandem-cuda-"))
    arguments = ["-shared", "-fPIC", "-pthread", "-Wall", "-Werror", *flags]
    subprocess.run([compiler, *arguments, "-o", folder / "libcuda.so.1", SOURCE], check=True, capture_output=True)
    return folder


def nvidia_header() -> Path | None:
    """Return the folder of NVIDIA's cuda.h, where the toolkit is installed."""
    folders = [*Path("/usr/local").glob("cuda*/include"), *Path("/opt").glob("cuda*/include")]
    return next((folder for folder in folders if (folder / "cuda.h").exists()), None)
