"""How is transformers imported without torch's compiler coming along?

transformers marks functions that the compiler is to leave alone; the mark alone loads torch._dynamo, 26 MB and more
than a second of start (measured with transformers 5.23, torch 2.13), for a compiler that no engine calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let `torch.compiler.disable` mark nothing meanwhile."""
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
