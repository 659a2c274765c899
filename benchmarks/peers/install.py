"""Installs the peer engines: `make peers`. Standard library only.

python -m benchmarks.peers.install [llama_cpp] [openvino] [--jobs N]

Each is installed by itself, in a venv below .peers/, at the versions that were measured; one that fails leaves the
others alone. What is there already stays. transformers needs nothing: it is in our own .venv.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.peers import places

LLAMA_CPP_PYTHON_VERSION = "0.3.36"
GGUF_VERSION = "0.19.0"
OPENVINO_VERSION = "2026.4.1"
OPTIMUM_INTEL_VERSION = "2.2.0"
TRANSFORMERS_OF_OPTIMUM = "5.5.4"
TORCH_VERSION = "2.13.0"
_NICENESS = 19
_CMAKE_FLAGS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "ON",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",  # else it is fetched from the network
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_CURL": "OFF",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Install what is asked for, or all; return 1 if any of it failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.install", description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", choices=[*_INSTALLERS, []], help="which; all if none is named")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once; each runs at the lowest priority")
    options = parser.parse_args(arguments)
    os.nice(_NICENESS)
    places.PEERS.mkdir(exist_ok=True)
    failed = [name for name in options.peers or _INSTALLERS if not _install(name, options.jobs)]
    for name in failed:
        print(f"{name}: not installed; the benchmark leaves it out", file=sys.stderr)
    return 1 if failed else 0


def _install(name: str, jobs: int) -> bool:
    if places.is_installed(name):
        print(f"{name}: is there")
        return True
    started = time.monotonic()
    try:
        versions = _INSTALLERS[name](jobs)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return False
    places.mark_installed(name, versions)
    print(f"{name}: installed in {time.monotonic() - started:.0f} s: {versions}")
    return True


def _install_llama_cpp(jobs: int) -> str:
    """Build llama.cpp from the sdist's own copy, once: for llama-server and for the binding."""
    python = _venv(places.LLAMA_CPP / "venv")
    _pip(python, f"gguf=={GGUF_VERSION}", "numpy", "safetensors", "scikit-build-core[pyproject]", "cmake", "ninja")
    source = _llama_cpp_source(python)
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    build = places.LLAMA_CPP / "build"
    flags = [f"-D{name}={value}" for name, value in _CMAKE_FLAGS.items()]
    _run("cmake", "-G", "Ninja", "-S", source / "vendor" / "llama.cpp", "-B", build, *flags, environment=tools)
    _run("cmake", "--build", build, "--target", "llama-server", "-j", jobs, environment=tools)
    only_python = {**tools, "CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF"}
    _pip(python, "--no-build-isolation", str(source), environment=only_python)
    return f"llama-cpp-python {LLAMA_CPP_PYTHON_VERSION} with its llama.cpp, GGML_NATIVE=ON"


def _llama_cpp_source(python: Path) -> Path:
    folder = places.LLAMA_CPP / "source"
    if folder.exists():
        return folder
    name = f"llama_cpp_python-{LLAMA_CPP_PYTHON_VERSION}"
    downloads, unpacked = places.PEERS / "sdist", places.PEERS / "unpacked"
    wanted = f"llama-cpp-python=={LLAMA_CPP_PYTHON_VERSION}"
    _run(python, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-python", "-d", downloads, wanted)
    with tarfile.open(downloads / f"{name}.tar.gz") as archive:
        archive.extractall(unpacked, filter="data")
    shutil.move(unpacked / name, folder)
    return folder


def _install_openvino(jobs: int) -> str:
    """The engine in one venv; in another what exports checkpoints for it, with torch and transformers of its own."""
    genai = f"openvino-genai=={OPENVINO_VERSION}.0"
    _pip(_venv(places.PEERS / "openvino"), f"openvino=={OPENVINO_VERSION}", genai, "numpy")
    _pip(
        _venv(places.PEERS / "optimum"),
        f"optimum-intel=={OPTIMUM_INTEL_VERSION}",
        f"openvino=={OPENVINO_VERSION}",
        f"openvino-tokenizers=={OPENVINO_VERSION}.0",
        f"transformers=={TRANSFORMERS_OF_OPTIMUM}",
        f"torch=={TORCH_VERSION}",
    )
    # Its torchvision is built for another torch, and nothing here looks at images.
    _run(places.OPTIMUM_PYTHON, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision")
    return f"openvino-genai {OPENVINO_VERSION}.0; export by optimum-intel {OPTIMUM_INTEL_VERSION}"


def _venv(folder: Path) -> Path:
    """Return the interpreter of the venv there, made where there is none."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    return python


def _pip(python: Path, *wanted: str, environment: Mapping[str, str] | None = None) -> None:
    _run(
        python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted, environment=environment or {}
    )


def _run(*command: object, environment: Mapping[str, str] | None = None) -> None:
    words = [str(word) for word in command]
    print("$ " + " ".join(words), flush=True)
    subprocess.run(words, check=True, env={**os.environ, **(environment or {})})


_INSTALLERS: dict[str, Callable[[int], str]] = {"llama_cpp": _install_llama_cpp, "openvino": _install_openvino}

if __name__ == "__main__":
    sys.exit(main())
