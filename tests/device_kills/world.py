"""What owner, reader and driver of `device_kills` share: sizes, content of blocks, and messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from tandem.v1 import types_pb2 as pb
from tandem_engine.execution.kv_cache import KVGeometry
from tests.kv_transfer_svc.layout import a_layout

GEOMETRY = KVGeometry(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
SIZE = GEOMETRY.bytes_per_block
LAYOUT = a_layout(bytes_per_block=SIZE, k_head_size=64, v_head_size=64)
NUM_BLOCKS = 24
"""Of the owner's pool and of the reader's."""
MOST_BLOCKS = 6
"""Of one hand-over."""
LEASE_SECONDS = 0.6

Content = np.ndarray[tuple[int], np.dtype[np.uint8]]


@dataclass(frozen=True)
class Place:
    """Where a process finds its KV service."""

    socket: str
    address: str
    incarnation: str
    """Of the process itself."""


@dataclass(frozen=True)
class Task:
    """One prompt to hand over."""

    number: int
    handle: bytes
    num_blocks: int

    @property
    def parsed(self) -> pb.KvHandle:
        return pb.KvHandle.FromString(self.handle)

    def content(self, first: int, end: int) -> Content:
        """Return the bytes of blocks [first, end): one word, over and over, that no other block of any task has."""
        words = [np.full(SIZE // 8, self.number * MOST_BLOCKS + index + 1, np.uint64) for index in range(first, end)]
        return np.concatenate(words).view(np.uint8)


@dataclass(frozen=True)
class Churn:
    """Ask the owner to write other content into all blocks that are free."""


@dataclass(frozen=True)
class Count:
    """Ask a process what it holds; `Held` answers."""


@dataclass(frozen=True)
class Reached:
    """The process has come so far with a task."""

    number: int
    stage: str


@dataclass(frozen=True)
class Outcome:
    """The end of a task at one process: what came of it, and whether wrong bytes were taken for right ones."""

    number: int
    what: str
    is_torn: bool = False


@dataclass(frozen=True)
class Held:
    num_blocks_used: int
    num_device_ranges: int
    num_descriptors: int


async def receive(connection: Connection) -> Any:
    """Return the next message; None once the other end is closed."""
    try:
        return await asyncio.get_running_loop().run_in_executor(None, connection.recv)
    except (EOFError, OSError):
        return None
