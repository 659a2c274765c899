"""Work beside the event loop changes how the interpreter switches threads, only while it lasts."""

from __future__ import annotations

import gc
import sys

import pytest

from tandem_runtime.short_turns import beside_the_loop


def state() -> tuple[float, bool]:
    return round(sys.getswitchinterval(), 6), gc.isenabled()


def test_turns_are_short_inside_and_as_before_after_the_last_of_overlapping_blocks() -> None:
    usual, inside = state(), (0.0005, False)
    first, second = beside_the_loop(), beside_the_loop()
    first.__enter__()
    assert state() == inside
    second.__enter__()
    first.__exit__(None, None, None)
    assert state() == inside
    second.__exit__(None, None, None)
    assert state() == usual != inside


def test_an_error_inside_leaves_all_as_it_was() -> None:
    usual = state()
    with pytest.raises(ValueError, match="x"), beside_the_loop():
        raise ValueError("x")
    assert state() == usual
