"""Compares the candidates of a table in one pass of the compiled library.

`Shortlist`, `CostModel`, `HandOverWays` and `Router` do the same in Python, and say what each number means. They are
asked where candidates are to be looked for again: a call waits too long at one, all have a queue while another worker
idles, or there are none.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from control_plane.fleet.worker_health import WorkerHealth
from control_plane.routing.block_stores import NOTHING_CACHED
from control_plane.routing.comparison import ComparedDecode
from control_plane.routing.compiled_library import NUM_ESTIMATED, NUM_RANKED, Compared
from control_plane.routing.compiled_scoring import CompiledScoring
from control_plane.routing.cost_model import EXPECTED_ANSWER_TOKENS, CostModel, HandOver, PrefillEstimate
from control_plane.routing.shortlist import Query, Shortlist
from control_plane.routing.store_columns import StoreColumns
from control_plane.routing.worker_table import WorkerTable

_HAND_OVERS: dict[HandOver, int] = {"never": 0, "if_cheaper": 1, "always": 2}
_MOST_PLACES = 256
"""Of a prompt: pools, and stores. With more, Python compares."""


class Remote(msgspec.Struct, frozen=True, gc=False):
    """The prefill workers that were compared."""

    hosts: Sequence[str] = ()
    """Of their table."""
    estimates: Sequence[PrefillEstimate] = ()
    near: int | None = None
    """The number of the session's worker or the key's, if it is about as soon as the soonest."""
    ties: Sequence[int] = ()
    """The numbers of the soonest: of those that are about as good."""


class CompiledComparing:
    """Compares tables, one of each role; on one event loop."""

    def __init__(self, scoring: CompiledScoring, costs: CostModel, health: WorkerHealth, shortlist: Shortlist) -> None:
        self._scoring, self._costs, self._health, self._shortlist = scoring, costs, health, shortlist
        self._prefills, self._decodes = _Candidates(), _Candidates()
        self._decodes.compared.prefills = self._prefills.address

    def prefills(self, table: WorkerTable, query: Query) -> Remote | None:
        """Return the prefill workers that may have the prompt soonest; None: Python has to compare."""
        scoring, candidates, last = self._scoring, self._prefills, query.last.prefill
        kept = scoring.ask_prefills(table, query.request, self._shortlist.choice(table, query, last))
        if not self._ask(candidates, table, query, last):
            return None
        scoring.library.compare_prefills(table.memory.address, scoring.address, candidates.address)
        del kept
        estimates = self._estimates(candidates, table, query)
        if estimates is None:
            return None
        compared = candidates.compared
        near = compared.favoured if compared.is_near else None
        return Remote(table.hosts.ids, estimates, near, compared.ties[: compared.num_ties])

    def decodes(
        self, table: WorkerTable, query: Query, remote: Remote, prefill: int | None, hand_over: HandOver
    ) -> tuple[list[ComparedDecode], int] | None:
        """Return the decode workers, the best first, and how many of the first are about as good.

        `prefill`: the number of the best prefill worker; `remote` was compared last. None: Python has to compare.
        """
        scoring, candidates, request, last = self._scoring, self._decodes, query.request, query.last.decode
        kept = scoring.ask_decodes(table, request, self._shortlist.choice(table, query, last))
        if not self._ask(candidates, table, query, last):
            return None
        compared, key = candidates.compared, table.key
        compared.num_steps = min(request.max_tokens, EXPECTED_ANSWER_TOKENS)
        seconds = self._costs.seconds_of_peers(key.model_id, key.numerics_class, key.role)
        compared.seconds_of_peers = -1.0 if seconds is None else seconds
        compared.hand_over = _HAND_OVERS["never" if prefill is None else hand_over]
        if prefill is not None:
            compared.prefill = prefill
            self._ask_sources(table, remote)
        scoring.library.compare_decodes(table.memory.address, scoring.address, candidates.address)
        if compared.lacks_sources:  # seldom: of a host that is asked about first, or of which something was learnt
            for estimate in remote.estimates:
                self._shortlist.pairs(table).row(estimate.worker.figures.host_id)
            scoring.library.compare_decodes(table.memory.address, scoring.address, candidates.address)
        del kept
        if compared.lacks_sources or (compared.all_wait and compared.is_one_idle):
            return None
        local = self._estimates(candidates, table, query)
        if local is None:
            return None
        if compared.all_wait:
            self._shortlist.drawn()  # Python draws which idle one to add before it sees that there is none
        ranked: list[list[float]] = candidates.ranked[: len(local)].tolist()
        options, estimates = [], remote.estimates
        for number in compared.order[: len(local)]:
            is_tight, cost_ms, local_ms, load, is_handed_over, best, hand_over_ms = ranked[number]
            options.append(
                ComparedDecode(
                    (is_tight > 0, cost_ms),
                    local[number],
                    local_ms,
                    load,
                    is_handed_over > 0,
                    estimates[int(best)] if best >= 0 else None,
                    hand_over_ms,
                )
            )
        return options, compared.num_ties

    def _ask_sources(self, table: WorkerTable, remote: Remote) -> None:
        """Write what hand-overs from the prefill workers' hosts take."""
        pairs, compared = self._shortlist.pairs(table), self._decodes.compared
        places, ms_per_byte, fixed_ms, latency_ms, until = pairs.sources(remote.hosts).addresses
        compared.source_places, compared.source_until = places, until
        compared.source_ms_per_byte, compared.source_fixed_ms = ms_per_byte, fixed_ms
        compared.source_latency_ms = latency_ms
        compared.free_bytes, compared.window_bytes = pairs.arena_addresses

    def _ask(self, candidates: _Candidates, table: WorkerTable, query: Query, last: str) -> bool:
        """Write what is known of the workers' health, and of the prompt's places; False: these are too many."""
        health, compared = self._health, candidates.compared
        compared.health_now = health.now()
        ratio = health.usual_ratio(table.key.model_id, table.key.role)
        compared.usual_ratio = math.inf if ratio is None else ratio
        return candidates.ask(table, query, last, self._costs)

    def _estimates(self, candidates: _Candidates, table: WorkerTable, query: Query) -> list[PrefillEstimate] | None:
        """Return what is known of the candidates; None: there is none, or one of them is not well."""
        if candidates.compared.num_overdue or not candidates.compared.num_found:
            return None
        numbers: list[list[float]] = candidates.found[: candidates.compared.num_found].tolist()
        if (home := self._scoring.home()) is not None:
            query.homes.add(table.incarnations[home])
        caches, cached, estimates = query.caches(table.key.index_space), NOTHING_CACHED, []
        workers = table.workers
        for row, own, host, remote, num_computed, queue_ms, load_ms, compute_ms in numbers:
            worker = workers[int(row)]
            if caches is not None:
                cached = caches.cached(int(own), int(host), int(remote))
            estimates.append(PrefillEstimate(worker, cached, int(num_computed), queue_ms, load_ms, compute_ms))
        return estimates


class _Candidates:
    """Memory for the candidates of one role."""

    def __init__(self) -> None:
        self.compared = compared = Compared()
        self.address = ctypes.addressof(compared)
        self.ranked = np.ctypeslib.as_array(compared.ranked).reshape(-1, NUM_RANKED)
        self.found = np.ctypeslib.as_array(compared.found).reshape(-1, NUM_ESTIMATED)
        self._places = [(ctypes.c_int64 * _MOST_PLACES)() for _ in range(4)]
        cached = compared.cached
        cached.pool_rows, cached.pool_blocks, cached.host_numbers, cached.host_blocks = [
            ctypes.addressof(each) for each in self._places
        ]

    def ask(self, table: WorkerTable, query: Query, last: str, costs: CostModel) -> bool:
        """Write the session's last worker and where the prompt is cached; False: in too many places."""
        compared, space = self.compared, table.key.index_space
        compared.last, cached = table.row_of.get(last, -1), compared.cached
        cached.num_pools = cached.num_hosts = cached.num_there = 0
        caches, match = query.caches(space), query.match(space)
        if caches is None:
            return True
        if max(len(match.pools), len(match.hosts)) > _MOST_PLACES:
            return False
        cached.block_tokens, cached.num_there = caches.grain, caches.num_there
        cached.num_pools = self._put(0, match.pools, table.row_of)
        cached.num_hosts = self._put(2, match.hosts, table.number_of)
        if match.hosts:
            if table.stores is None:
                table.stores = StoreColumns(table.hosts.ids, costs.stores)
            cached.has_store, cached.hit_rates = table.stores.addresses
            fetches = table.stores.fetches(caches.from_host, caches.address)
            cached.latency_ms, cached.bytes_per_second, cached.missed, cached.missed_at = fetches
        return True

    def _put(self, where: int, places: Mapping[str, int], known: Mapping[str, int]) -> int:
        """Write the numbers of the known places, and how many blocks each has; returns how many they are."""
        numbers, blocks, count = self._places[where], self._places[where + 1], 0
        for place, num_blocks in places.items():
            number = known.get(place)
            if number is not None:
                numbers[count], blocks[count] = number, num_blocks
                count += 1
        return count
