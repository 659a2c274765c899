"""Compiles the library of routing for tests, once."""

from __future__ import annotations

from functools import lru_cache

import pytest

from control_plane.compiled_routing import load_routing
from control_plane.routing.compiled_library import CompiledRouting


@lru_cache(maxsize=1)
def _library() -> CompiledRouting | None:
    return load_routing()


def compiled_routing() -> CompiledRouting:
    """Return the library, or skip the test: this machine has no compiler."""
    library = _library()
    if library is None:
        pytest.skip("no C++ compiler; install g++")
    return library
