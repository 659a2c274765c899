"""Scores a table in one pass of the compiled library; scoring.py does the same in numpy, a call for each step."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable

import numpy as np

from control_plane.routing.compiled_library import Asked, CompiledRouting, address
from control_plane.routing.cost_model import CostModel, RoutingRequest
from control_plane.routing.groups import TIE
from control_plane.routing.scoring import (
    LIGHT_LOAD,
    Choice,
    Scored,
    Way,
    answer_ms,
    is_short,
    num_picked,
    same_queue,
    typical_rate,
)
from control_plane.routing.worker_table import WorkerTable

_NEVER, _IF_SOONER, _ALWAYS = range(3)


class CompiledScoring:
    """A `Scoring`; on one event loop."""

    def __init__(self, library: CompiledRouting, costs: CostModel, clock: Callable[[], float] = time.monotonic) -> None:
        self.library, self._costs, self._clock = library, costs, clock
        self._asked = Asked(tie=TIE)
        self.address = ctypes.addressof(self._asked)
        """Of what is asked, and of the answer."""

    def prefills(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> Scored:
        kept = self.ask_prefills(table, request, choice)
        self.library.score_prefills(table.memory.address, self.address)
        del kept
        return self._scored(table)

    def decodes(self, table: WorkerTable, request: RoutingRequest, way: Way | None, choice: Choice) -> Scored:
        kept = self.ask_decodes(table, request, choice)
        self._asked.hand_over = _NEVER
        if way is not None:
            self._ask_hand_over(way)
        self.library.score_decodes(table.memory.address, self.address)
        del kept
        return self._scored(table)

    def ask_prefills(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> object:
        """Write what a request asks of prefill workers; returns what is to be kept until the answer is there."""
        asked = self._asked
        asked.now, asked.light_load, asked.same_load = self._clock(), 0.0, same_queue(request)
        return self._ask(table, request, choice)

    def ask_decodes(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> object:
        """Write the same of decode workers, but for the hand-over."""
        asked = self._asked
        asked.now, asked.num_tokens = self._clock(), request.num_prompt_tokens + request.max_tokens
        asked.answer_ms, asked.light_load, asked.same_load = answer_ms(table, request), LIGHT_LOAD, math.inf
        asked.is_short = is_short(table)
        return self._ask(table, request, choice)

    def home(self) -> int | None:
        """Return the row of the key's worker, by the last answer."""
        return None if self._asked.home < 0 else self._asked.home

    def _ask_hand_over(self, way: Way) -> None:
        asked, pairs, shown = self._asked, way.pairs, way.shown
        row = pairs.row(way.from_host)
        asked.hand_over = _ALWAYS if way.is_forced else _IF_SOONER
        asked.prefill_ms, asked.overlap_ms = way.prefill_ms, shown.overlap_ms
        asked.num_bytes = num_bytes = shown.num_tokens * way.bytes_per_token
        asked.num_last_bytes = shown.num_last_tokens * way.bytes_per_token
        asked.ms_per_byte, asked.fixed_ms, asked.latency_ms = row.addresses
        asked.free_bytes = None
        if num_bytes > pairs.least_free:
            asked.free_bytes, asked.window_bytes = pairs.arena_addresses
            asked.from_host = pairs.places.get(way.from_host, -1)

    def _ask(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> object:
        asked, key = self._asked, choice.key
        asked.num_prompt_tokens = request.num_prompt_tokens
        if not table.has_all_rates:
            asked.typical_rate = typical_rate(table, self._costs)
        asked.has_key = key is not None
        if key is not None:
            asked.key, asked.is_new_session = key, choice.is_new_session
        asked.most_picked, asked.draw = num_picked(table), choice.draw
        if not (choice.avoid or choice.out):
            asked.num_avoid = asked.num_out = 0
            return None
        avoid, out = np.array(choice.avoid, np.int64), np.array(choice.out, np.int64)
        asked.avoid, asked.num_avoid = address(avoid, np.int64), len(avoid)
        asked.out, asked.num_out = address(out, np.int64), len(out)
        return avoid, out

    def _scored(self, table: WorkerTable) -> Scored:
        asked = self._asked
        return Scored(table.memory.score, self.home(), asked.picked[: asked.num_picked])
