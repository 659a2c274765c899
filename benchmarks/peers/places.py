"""Locates the installed peer engines. Standard library only."""

from __future__ import annotations

from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / ".peers"
"""Git-ignored; made by `make peers`. Removing it removes all of it."""
MODELS = PEERS / "models"
LLAMA_CPP = PEERS / "llama_cpp"
LLAMA_CPP_PYTHON = LLAMA_CPP / "venv" / "bin" / "python"
LLAMA_CPP_BUILD = LLAMA_CPP / "build" / "bin"
"""llama-server, and the libraries that llama-cpp-python loads too: one build for both."""
LLAMA_SERVER = LLAMA_CPP_BUILD / "llama-server"
OPENVINO_PYTHON = PEERS / "openvino" / "bin" / "python"
OPTIMUM_PYTHON = PEERS / "optimum" / "bin" / "python"
"""Exports checkpoints for OpenVINO; its transformers is older than ours."""


def is_installed(mark: str) -> bool:
    """Whether `make peers` has finished that peer."""
    return (PEERS / f"{mark}.done").exists()


def mark_installed(mark: str, versions: str) -> None:
    """Leave the mark, with the versions in it."""
    (PEERS / f"{mark}.done").write_text(versions + "\n")


def versions() -> dict[str, str]:
    """Return what is installed, by mark."""
    return {file.stem: file.read_text().strip() for file in sorted(PEERS.glob("*.done"))}
