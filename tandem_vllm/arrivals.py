"""Keeps what requests bring to vLLM's scheduler: blocks with content, until vLLM has given the requests their own.

    full blocks     registered in vLLM's prefix cache and held here: vLLM finds them, and they become the request's
    the last block  partly filled, so no cache may have it: kept as bytes, then written into the block that vLLM takes
    spare blocks    let go just before vLLM allocates as many: a promise of blocks is kept without a promise by vLLM

vLLM's scheduler asks for a request's external tokens, and allocates, within one call; so nobody else gets the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem_vllm.blocks import Blocks, Memory

Load = Callable[[int], bool | None]
"""Loads blocks behind so many tokens that vLLM has, and registers them. True: vLLM finds more now. False: it does not.
None: there is more to copy, call it again in the next step."""


@dataclass
class _Arrival:
    table: list[int] = field(default_factory=list)
    """Held blocks of the request, the first ones first."""
    num_ready_tokens: int = 0
    """Leading tokens whose KV is in `table`."""
    tail: Any = None
    """Bytes of the block behind those that vLLM finds."""
    load: Load | None = None


class Arrivals:
    """Answers vLLM's scheduler, by `TandemConnector`."""

    def __init__(self, blocks: Blocks, memory: Memory, block_size: int) -> None:
        self._blocks = blocks
        self._memory = memory
        self._size = block_size
        self._arrivals: dict[str, _Arrival] = {}

    def bring_table(self, request_id: str, table: Sequence[int], num_ready_tokens: int) -> None:
        """Take over the held blocks of a request; its full blocks with content are registered already."""
        self._arrivals[request_id] = _Arrival(list(table), num_ready_tokens)

    def bring_prefix(self, request_id: str, load: Load) -> None:
        """Load blocks once vLLM's scheduler reaches the request."""
        self._arrivals[request_id] = _Arrival(load=load)

    def forget(self, request_id: str) -> None:
        """Let go of all that is held for a request; unknown ids are ignored."""
        if (arrival := self._arrivals.pop(request_id, None)) is not None:
            self._blocks.let_go(arrival.table)

    def num_matched_tokens(self, request_id: str, num_found_tokens: int, num_tokens: int) -> int | None:
        """Return how many tokens behind those that vLLM found arrive with the request; None: ask in the next step.

        `num_tokens`: of the request; at least one of them is left to compute.
        """
        if (arrival := self._arrivals.get(request_id)) is None:
            return 0
        if arrival.load is not None:
            has_loaded = arrival.load(num_found_tokens)
            if has_loaded is not None:
                arrival.load = None
            return 0 if has_loaded is False else None
        num_missing = min(arrival.num_ready_tokens, num_tokens - 1) - num_found_tokens
        index = num_found_tokens // self._size
        if arrival.tail is None and index < len(arrival.table) and 0 < num_missing < self._size:
            arrival.tail = self._memory.read(arrival.table[index])
        self._blocks.let_go(arrival.table[index:])
        del arrival.table[index:]
        return num_missing if arrival.tail is not None else 0

    def placed(self, request_id: str, table: Sequence[int], num_external_tokens: int) -> None:
        """Fill the block of the tokens that were matched; the request has its own references now."""
        if (arrival := self._arrivals.pop(request_id, None)) is None:
            return
        if num_external_tokens:
            self._memory.write(table[len(arrival.table)], arrival.tail)
        self._blocks.let_go(arrival.table)
