"""Calls the compiled library of routing; the structures here mirror those in cpp/routing.cpp.

It scores a table, and finds a prompt's places, in one pass each. In numpy a decision takes some fifty calls for these,
a microsecond each whatever the size.
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
_INT, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


def file_name(machine: str) -> str:
    """Return the name of the library for a machine, as `platform.machine()` names that.

    It is for any machine of its kind: with SSE2 alone a table of 500 workers takes 3 to 5 us.
    """
    return f"{SOURCES.digest()}-{machine}.so"


class IndexMemory(ctypes.Structure):
    """The arrays of a prefix index."""

    _fields_ = (("keys", _POINTER), ("places", _POINTER), ("num_buckets", ctypes.c_uint64), ("found", _POINTER))


class TableMemory(ctypes.Structure):
    """The columns of a table, and memory for its scores."""

    _fields_ = (
        ("values", _POINTER),
        *((name, _INT) for name in ("capacity", "num_rows", "num_hosts")),
        *((name, _POINTER) for name in ("host_numbers", "host_hashes", "worker_hashes")),
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
    free_bytes: int | None
    window_bytes: int | None
    from_host: int
    has_key: int
    key: int
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
        *((name, _POINTER) for name in ("ms_per_byte", "fixed_ms", "free_bytes", "window_bytes")),
        ("from_host", _INT),
        ("has_key", _INT),
        ("key", ctypes.c_uint64),
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


class CompiledRouting:
    """The functions of the library. They are called with the interpreter's lock held: each takes some microseconds."""

    def __init__(self, path: Path) -> None:
        """Raises OSError if the file is no library, AttributeError if a function is missing."""
        library = ctypes.PyDLL(str(path))
        self.score_prefills = library.tandem_score_prefills
        self.score_decodes = library.tandem_score_decodes
        for function in (self.score_prefills, self.score_decodes):
            function.argtypes, function.restype = (_POINTER, _POINTER), None
        self.find_places = library.tandem_find_places
        self.find_places.argtypes = (_POINTER, ctypes.c_char_p, _INT, ctypes.c_uint64)
        self.find_places.restype = _INT


def address(array: npt.NDArray[Any], dtype: type[np.generic]) -> int:
    """Return where an array's values are, which lie one after the other. The caller keeps the array.

    `dtype`: what the library takes the values for.
    """
    assert array.flags.c_contiguous, "rows of a whole array, not columns"
    assert array.dtype == dtype, f"{array.dtype} where the library reads {dtype.__name__}"
    return int(array.ctypes.data)
