"""Imports transformers without torch's compiler.

transformers marks functions for the compiler to skip, and the mark alone loads torch._dynamo: 26 MB and more than a
second of start (measured with transformers 5.23, torch 2.13). No engine calls the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_compiler() -> Iterator[None]:
    """Make `torch.compiler.disable` a no-op inside the block."""
    marking = torch.compiler.disable
    torch.compiler.disable = _leave  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = marking


def _leave(function: Any = None, *_: Any, **__: Any) -> Any:
    def same(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    return same if function is None else function
