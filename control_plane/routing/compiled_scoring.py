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
        self._library, self._costs, self._clock = library, costs, clock
        self._asked = Asked(tie=TIE)
        self._address = ctypes.addressof(self._asked)

    def prefills(self, table: WorkerTable, request: RoutingRequest, choice: Choice) -> Scored:
        asked = self._asked
        asked.now, asked.light_load, asked.same_load = self._clock(), 0.0, same_queue(request)
        return self._scored(table, request, choice, self._library.score_prefills, needs_rates=True)

    def decodes(self, table: WorkerTable, request: RoutingRequest, way: Way | None, choice: Choice) -> Scored:
        asked = self._asked
        asked.num_tokens = request.num_prompt_tokens + request.max_tokens
        asked.answer_ms, asked.light_load, asked.same_load = answer_ms(table, request), LIGHT_LOAD, math.inf
        asked.is_short, asked.hand_over = is_short(table), _NEVER
        if way is not None:
            self._ask_hand_over(way)
        return self._scored(table, request, choice, self._library.score_decodes, needs_rates=not asked.is_short)

    def _ask_hand_over(self, way: Way) -> None:
        asked, pairs, shown = self._asked, way.pairs, way.shown
        row = pairs.row(way.from_host)
        asked.hand_over = _ALWAYS if way.is_forced else _IF_SOONER
        asked.prefill_ms, asked.overlap_ms = way.prefill_ms, shown.overlap_ms
        asked.num_bytes = num_bytes = shown.num_tokens * way.bytes_per_token
        asked.num_last_bytes = shown.num_last_tokens * way.bytes_per_token
        asked.ms_per_byte, asked.fixed_ms = row.addresses
        asked.free_bytes = None
        if num_bytes > pairs.least_free:
            asked.free_bytes, asked.window_bytes = pairs.arena_addresses
            asked.from_host = pairs.places.get(way.from_host, -1)

    def _ask_without(self, choice: Choice) -> object:
        """Return what keeps the rows until they are read."""
        asked = self._asked
        avoid, out = np.array(choice.avoid, np.int64), np.array(choice.out, np.int64)
        asked.avoid, asked.num_avoid = address(avoid, np.int64), len(avoid)
        asked.out, asked.num_out = address(out, np.int64), len(out)
        return avoid, out

    def _scored(
        self,
        table: WorkerTable,
        request: RoutingRequest,
        choice: Choice,
        score: Callable[[int, int], None],
        *,
        needs_rates: bool,
    ) -> Scored:
        asked, key = self._asked, choice.key
        memory = table.memory
        asked.num_prompt_tokens = request.num_prompt_tokens
        if needs_rates and not table.has_all_rates:
            asked.typical_rate = typical_rate(table, self._costs)
        asked.has_key = key is not None
        if key is not None:
            asked.key = key
        kept = None
        if choice.avoid or choice.out:
            kept = self._ask_without(choice)
        else:
            asked.num_avoid = asked.num_out = 0
        asked.most_picked, asked.draw = num_picked(table), choice.draw
        score(memory.address, self._address)
        del kept
        home = asked.home
        return Scored(memory.score, None if home < 0 else home, asked.picked[: asked.num_picked])
