"""What do the headers of a checkpoint's files say?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file; none is read."""
    with safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping


def stored_dtypes(paths: list[Path]) -> set[str]:
    """Return the dtypes in safetensors files, as these name them: "F32", "BF16"."""
    dtypes: set[str] = set()
    for path in paths:
        file: Any
        with safe_open(path, framework="np") as file:
            dtypes |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return dtypes
