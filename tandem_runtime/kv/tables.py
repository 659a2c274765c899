"""Builds the rows that a process answers `Tables` with, for the auditor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.slabs import first_handed_over

Item = TypeVar("Item")
Row = TypeVar("Row", contravariant=True)
Made = TypeVar("Made")


class _Table(Protocol[Row]):
    """A repeated field."""

    def append(self, value: Row, /) -> None: ...


def fill(table: _Table[Made], items: Sequence[Item], make_row: Callable[[Item], Made], max_rows: int) -> int:
    """Append a row for each of the first `max_rows` items; return how many are left out."""
    for item in items[:max_rows]:
        table.append(make_row(item))
    return max(0, len(items) - max_rows)


def prompt_bytes(layout: pb.KvLayout, num_tokens: int) -> int:
    """Return the bytes of a pool that a prompt of `num_tokens` takes while it is handed over."""
    return sum(
        (-(-num_tokens // group.tokens_per_block) - first_handed_over(group, num_tokens)) * group.bytes_per_block
        for group in layout.groups
    )
