"""Chooses a worker for a key as every other gateway does, without talking to them.

Weighted rendezvous hashing: each worker draws a number from its own name and the key, and `-weight / ln(number)` ranks
them. So a worker gets keys in proportion to its weight, and one that comes or goes moves no keys between others. Hosts
are ranked first, by the sum of their workers' weights, then the workers of the first host. A worker with more than its
bounded share of the load is passed over, and the next in rank gets the key.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from control_plane.routing.cost_model import RoutingRequest
from control_plane.routing.worker_table import Floats, WorkerTable

MAX_SHARE = 1.25
"""A worker gets no more keys while its load is above so many times its share of the whole load."""
_KEY_BLOCKS = 16
"""Prompts that begin with as many equal blocks have the same key. A shorter one is soon computed anywhere."""

_Hashes = npt.NDArray[np.uint64]
_ODD_1, _ODD_2 = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_HALF, _TO_53_BITS = np.uint64(33), np.uint64(11)


def key_of(request: RoutingRequest) -> int | None:
    """Return the key of a session, which its account and model are part of, or else of how the prompt begins.

    None: the prompt is short, or no cache may hold it.
    """
    if request.session_id:
        return int.from_bytes(hashlib.blake2b(request.session_id.encode(), digest_size=8).digest(), "little")
    if len(request.block_hashes) < _KEY_BLOCKS:
        return None
    return int.from_bytes(request.block_hashes[_KEY_BLOCKS - 1][:8], "little")


def home(table: WorkerTable, key: int, weights: Floats, loads: Floats, may_take: npt.NDArray[np.bool_]) -> int | None:
    """Return the row of a key's worker; None if no worker may take it. All arrays are [rows]."""
    is_open = loads * (float(weights.sum()) / MAX_SHARE) <= weights * float(loads.sum())
    is_open &= may_take
    open_rows = is_open.nonzero()[0]
    if not len(open_rows):
        return None
    of_hosts = np.asarray(np.bincount(table.host_numbers, weights, len(table.host_hashes)), np.float64)
    scores = _scores(table.host_hashes, key, of_hosts)[table.host_numbers[open_rows]]
    open_rows = open_rows[scores == scores.max()]
    if len(open_rows) > 1:
        open_rows = open_rows[[_scores(table.hashes[open_rows], key, weights[open_rows]).argmax()]]
    return int(open_rows[0])


def _scores(hashes: _Hashes, key: int, weights: Floats) -> Floats:
    """Return `-weight / ln(number)`, the number between 0 and 1 drawn from hash and key."""
    mixed = hashes ^ np.uint64(key)
    mixed *= _ODD_1
    mixed ^= mixed >> _HALF
    mixed *= _ODD_2
    mixed >>= _TO_53_BITS
    drawn = (mixed + 0.5) * 2.0**-53
    return np.asarray(weights / -np.log(drawn))
