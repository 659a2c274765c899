"""Chooses a worker for a key, mostly as every other gateway does, without talking to them.

Weighted rendezvous hashing: each worker draws a number from its own name and the key, and `-weight / ln(number)` ranks
them. So a worker gets keys in proportion to its weight, and one that comes or goes moves no keys between others. Hosts
are ranked first, by the sum of their workers' weights, then the workers of the first host. A worker with more than its
bounded share of the load is passed over, and the next in rank gets the key; of a light load nobody has too much. One
that got more than its share of the latest sessions is passed over for new ones, too.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.worker_table import Floats, Hosts, Weights, WorkerTable, hash_of

MAX_SHARE = 1.25
"""A worker gets no more keys while its load is above so many times its share of the whole load."""
MAX_SESSIONS = 1.1
"""A worker gets no new sessions while it has had more than so many times its share of the latest ones.

By lot alone, the busiest of four workers gets more than 1.25 times its share of 64 sessions in four of ten fleets.
"""
_KEY_BLOCKS = 16
"""Prompts that begin with as many equal blocks have the same key. A shorter one is soon computed anywhere."""

_ODD_1, _ODD_2 = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53
_HALF, _TO_53_BITS = 33, 11
_ALL_BITS = (1 << 64) - 1
_ODDS_1, _ODDS_2, _HALVES, _TO_53 = (np.array(each, np.uint64) for each in (_ODD_1, _ODD_2, _HALF, _TO_53_BITS))
"""Of these, numpy takes arrays without axes in half the time that it takes for scalars."""
_MIDDLE, _UNIT = np.array(0.5), np.array(2.0**-53)


def key_of(request: RoutingRequest) -> int | None:
    """Return the key of a session, which its account and model are part of, or else of how the prompt begins.

    None: the prompt is short, or no cache may hold it.
    """
    if request.session_id:
        return int.from_bytes(hashlib.blake2b(request.session_id.encode(), digest_size=8).digest(), "little")
    if len(request.block_hashes) < _KEY_BLOCKS:
        return None
    return int.from_bytes(request.block_hashes[_KEY_BLOCKS - 1][:8], "little")


def home(
    table: WorkerTable,
    key: int,
    weights: Weights,
    loads: Floats,
    may_take: npt.NDArray[np.bool_],
    light_load: float = 0.0,
) -> int | None:
    """Return the row of a key's worker; None if no worker may take it. Both arrays are [rows].

    `light_load`: the whole load counts as no less. Of a few requests, each is above its worker's share.
    """
    of_rows, of_hosts, total = weights
    scores = of_hosts / _logarithms(table.hosts, key)  # below 0: the least is the best
    share, load = total / MAX_SHARE, max(light_load, float(np.add.reduce(loads)))

    def open_rows() -> list[int]:
        """Return the rows of the best host that get keys."""
        rows = [row for row in table.rows_on[scores.argmin()] if may_take[row]]
        return [row for row in rows if loads.item(row) * share <= of_rows.item(row) * load]

    rows = open_rows()
    if not rows:
        is_open = loads * share <= of_rows * load
        is_open &= may_take
        if not is_open.any():
            return None
        scores[np.bincount(table.host_numbers, is_open, len(scores)) == 0] = 0.0
        rows = open_rows()
    if len(rows) == 1:
        return rows[0]
    return min(rows, key=lambda row: of_rows.item(row) / _logarithm(hash_of(table.workers[row].worker_id), key))


def with_few_sessions(may_take: npt.NDArray[np.bool_], weights: Weights, sessions: Floats) -> npt.NDArray[np.bool_]:
    """Return which of the workers that may take a key have room for a new session; all arrays are [rows]."""
    of_rows = weights.of_rows
    most = MAX_SESSIONS * float(np.sum(sessions, where=may_take))
    fits: npt.NDArray[np.bool_] = sessions * float(np.sum(of_rows, where=may_take)) <= most * of_rows
    fits &= may_take
    return fits


@lru_cache(maxsize=1)
def _logarithms(hosts: Hosts, key: int) -> Floats:
    """Return `ln(number)`, the number between 0 and 1 drawn from hash and key; of each host.

    Prefill and decode workers are mostly on the same hosts, and asked about one after the other.
    """
    mixed = hosts.hashes ^ np.array(key, np.uint64)
    mixed *= _ODDS_1
    mixed ^= mixed >> _HALVES
    mixed *= _ODDS_2
    mixed >>= _TO_53
    drawn = mixed + _MIDDLE
    drawn *= _UNIT
    return np.asarray(np.log(drawn))


def _logarithm(hash_: int, key: int) -> float:
    """Return the same of one hash: numpy takes as long for it as for a hundred."""
    mixed = (hash_ ^ key) * _ODD_1 & _ALL_BITS
    mixed ^= mixed >> _HALF
    mixed = mixed * _ODD_2 & _ALL_BITS
    return math.log(((mixed >> _TO_53_BITS) + 0.5) * 2.0**-53)
