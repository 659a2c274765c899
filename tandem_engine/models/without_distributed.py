"""Imports transformers without torch's distributed tensors.

Since 5.23, any model's configuration makes transformers import DTensor and FSDP, and they import sympy: 680 modules and
0.9 of the 3 seconds of processor time that an engine takes to start (torch 2.13). No engine shards a tensor with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_distributed() -> Iterator[None]:
    """Make `torch.distributed.is_available` false inside the block.

    transformers keeps the answer: what it imports later in this process comes without them, too.
    """
    is_available = torch.distributed.is_available
    torch.distributed.is_available = _is_not_available
    try:
        yield
    finally:
        torch.distributed.is_available = is_available


def _is_not_available() -> bool:
    return False
