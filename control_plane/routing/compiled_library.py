"""Calls the compiled library of routing. Structures here mirror those in cpp/: table, comparing and point_arrays.hpp.

It finds and changes places of blocks, scores a table, and compares a table's candidates, in one pass each. In Python
a decision takes 2.8 times as long: fifty numpy calls, a microsecond each whatever the size, and the objects of ten
candidates.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tandem_machine.compiler import Sources

SOURCES = Sources(Path(__file__).parent / "cpp", "routing.cpp")
PREBUILT = Path(__file__).parent / "prebuilt"
"""Only platform wheels have this folder (`python -m infra.wheels`)."""
MAX_PICKED = 8
MAX_CANDIDATES = 16
NUM_ESTIMATED, NUM_RANKED = 8, 7
"""Numbers of a candidate, in `Compared`."""
_INT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def file_name(machine: str) -> str:
    """Return the name of the library for a machine, as `platform.machine()` names that.

    It is for any machine of its kind: with SSE2 alone a table of 500 workers takes 3 to 5 us.
    """
    return f"{SOURCES.digest()}-{machine}.so"


class IndexMemory(ctypes.Structure):
    """The arrays of a prefix index."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "places", "stamps")),
        ("num_buckets", ctypes.c_uint64),
        *((name, _POINTER) for name in ("is_host", "found")),
    )


class TableMemory(ctypes.Structure):
    """The columns of a table, and memory for its scores."""

    _fields_ = (
        ("values", _POINTER),
        *((name, _INT) for name in ("capacity", "num_rows", "num_hosts")),
        *((name, _POINTER) for name in ("host_numbers", "host_hashes", "worker_hashes", "name_ranks")),
        *((name, _POINTER) for name in ("score", "weights", "loads", "local_ms", "of_hosts")),
    )


class Asked(ctypes.Structure):
    """What a request asks of a table, and the answer: `home` and `picked`."""

    num_prompt_tokens: float
    num_tokens: float
    answer_ms: float
    now: float
    typical_rate: float
    is_short: int
    hand_over: int
    prefill_ms: float
    num_bytes: float
    num_last_bytes: float
    overlap_ms: float
    ms_per_byte: int
    fixed_ms: int
    latency_ms: int
    free_bytes: int | None
    window_bytes: int | None
    from_host: int
    has_key: int
    key: int
    is_new_session: int
    light_load: float
    avoid: int | None
    out: int | None
    num_avoid: int
    num_out: int
    most_picked: int
    tie: float
    draw: float
    same_load: float
    home: int
    num_picked: int
    picked: ctypes.Array[ctypes.c_int64]

    _fields_ = (
        *((name, _DOUBLE) for name in ("num_prompt_tokens", "num_tokens", "answer_ms", "now", "typical_rate")),
        *((name, _INT) for name in ("is_short", "hand_over")),
        *((name, _DOUBLE) for name in ("prefill_ms", "num_bytes", "num_last_bytes", "overlap_ms")),
        *((name, _POINTER) for name in ("ms_per_byte", "fixed_ms", "latency_ms", "free_bytes", "window_bytes")),
        ("from_host", _INT),
        ("has_key", _INT),
        ("key", ctypes.c_uint64),
        ("is_new_session", _INT),
        ("light_load", _DOUBLE),
        ("avoid", _POINTER),
        ("out", _POINTER),
        *((name, _INT) for name in ("num_avoid", "num_out", "most_picked")),
        ("tie", _DOUBLE),
        ("draw", _DOUBLE),
        ("same_load", _DOUBLE),
        ("home", _INT),
        ("num_picked", _INT),
        ("picked", _INT * MAX_PICKED),
    )


class Cached(ctypes.Structure):
    """Where a prompt is cached, for the workers of a table."""

    num_pools: int
    num_hosts: int
    pool_rows: int
    pool_blocks: int
    host_numbers: int
    host_blocks: int
    num_there: int
    block_tokens: float
    has_store: int
    hit_rates: int
    latency_ms: int
    bytes_per_second: int
    missed: int
    missed_at: int

    _fields_ = (
        *((name, _INT) for name in ("num_pools", "num_hosts")),
        *((name, _POINTER) for name in ("pool_rows", "pool_blocks", "host_numbers", "host_blocks")),
        ("num_there", _INT),
        ("block_tokens", _DOUBLE),
        *((name, _POINTER) for name in ("has_store", "hit_rates")),
        *((name, _POINTER) for name in ("latency_ms", "bytes_per_second", "missed", "missed_at")),
    )


_INTS, _DOUBLES = _INT * MAX_CANDIDATES, _DOUBLE * MAX_CANDIDATES


class Compared(ctypes.Structure):
    """The candidates of a table for a request, and how they compare; of workers of one role."""

    cached: Cached
    last: int
    health_now: float
    usual_ratio: float
    seconds_of_peers: float
    num_steps: float
    hand_over: int
    prefills: int | None
    prefill: int
    source_places: int
    source_ms_per_byte: int
    source_fixed_ms: int
    source_latency_ms: int
    source_until: int
    free_bytes: int
    window_bytes: int
    lacks_sources: int
    num_overdue: int
    num_found: int
    found: ctypes.Array[ctypes.c_double]
    """[candidates, 8]: row; tokens of own, host, remote, to compute; milliseconds of queue, load, compute."""
    order: ctypes.Array[ctypes.c_int64]
    favoured: int
    num_ties: int
    is_near: int
    ties: ctypes.Array[ctypes.c_int64]
    ranked: ctypes.Array[ctypes.c_double]
    """[candidates, 7]: is tight, cost, local ms, load, is handed over, number of the prefill worker, hand-over ms."""
    all_wait: int
    is_one_idle: int

    _fields_ = (
        ("cached", Cached),
        ("last", _INT),
        *((name, _DOUBLE) for name in ("health_now", "usual_ratio")),
        *((name, _DOUBLE) for name in ("seconds_of_peers", "num_steps")),
        ("hand_over", _INT),
        ("prefills", _POINTER),
        ("prefill", _INT),
        *((f"source_{name}", _POINTER) for name in ("places", "ms_per_byte", "fixed_ms", "latency_ms", "until")),
        *((name, _POINTER) for name in ("free_bytes", "window_bytes")),
        *((name, _INT) for name in ("lacks_sources", "num_overdue", "num_found")),
        ("found", _DOUBLE * (MAX_CANDIDATES * NUM_ESTIMATED)),
        *((name, _INTS) for name in ("hosts", "order")),
        *((name, _INT) for name in ("favoured", "num_ties", "is_near")),
        ("ties", _INTS),
        *((name, _DOUBLES) for name in ("num_last_tokens", "overlap_ms")),
        ("ranked", _DOUBLE * (MAX_CANDIDATES * NUM_RANKED)),
        *((name, _INT) for name in ("all_wait", "is_one_idle")),
    )


class CompiledRouting:
    """The functions of the library, called with the interpreter's lock held.

    Each takes some microseconds; adding and removing places take 0.15 us for each key.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file is no library, AttributeError if a function is missing."""
        library = ctypes.PyDLL(str(path))
        self.score_prefills = library.tandem_score_prefills
        self.score_decodes = library.tandem_score_decodes
        for function in (self.score_prefills, self.score_decodes):
            function.argtypes, function.restype = (_POINTER, _POINTER), None
        self.compare_prefills = library.tandem_compare_prefills
        self.compare_decodes = library.tandem_compare_decodes
        for function in (self.compare_prefills, self.compare_decodes):
            function.argtypes, function.restype = (_POINTER, _POINTER, _POINTER), None
        self.find_places = library.tandem_find_places
        self.find_places.argtypes = (_POINTER, ctypes.c_char_p, _INT, ctypes.c_uint64)
        self.find_places.restype = _INT
        self.add_places, self.remove_places = library.tandem_add_places, library.tandem_remove_places
        self.add_places.argtypes = (_POINTER, _POINTER, _POINTER, _INT, ctypes.c_uint32, ctypes.c_uint32)
        self.remove_places.argtypes = (_POINTER, _POINTER, _POINTER, _INT, _INT)
        self.add_places.restype = self.remove_places.restype = None


def address(array: npt.NDArray[Any], dtype: type[np.generic]) -> int:
    """Return where an array's values are, which lie one after the other. The caller keeps the array.

    `dtype`: what the library takes the values for.
    """
    assert array.flags.c_contiguous, "rows of a whole array, not columns"
    assert array.dtype == dtype, f"{array.dtype} where the library reads {dtype.__name__}"
    return int(array.ctypes.data)
