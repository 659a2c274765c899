"""Tests that work is shared by a bounded number of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tandem_engine.execution import thread_pool
from tandem_engine.execution.thread_pool import parallel_for, use_threads


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    yield
    use_threads(0)


def _num_helpers() -> int:
    return sum(thread.name.startswith("kv-memory") for thread in threading.enumerate())


def test_copies_of_any_size_have_no_more_threads_than_were_given() -> None:
    use_threads(16)
    for num_items in range(1, 65):
        parts: list[tuple[int, int]] = []
        parallel_for(lambda start, end: parts.append((start, end)), num_items, 1 << 20)  # noqa: B023
        assert sorted(parts) == [
            (num_items * index // len(parts), num_items * (index + 1) // len(parts)) for index in range(len(parts))
        ]
        assert len(parts) == min(16, num_items)
    assert 1 <= _num_helpers() <= 15


def test_another_number_of_threads_ends_those_of_before() -> None:
    use_threads(8)
    parallel_for(lambda start, end: None, 64, 1 << 20)
    use_threads(2)
    parallel_for(lambda start, end: None, 64, 1 << 20)
    assert _num_helpers() <= 1


def test_one_thread_needs_no_helper() -> None:
    use_threads(1)
    parallel_for(lambda start, end: None, 64, 1 << 20)
    assert thread_pool._pool is None
