"""Tests that shared memory of any size is complete, shared and freed, and on huge pages if Linux has them."""

from __future__ import annotations

import gc
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tandem_engine.execution.huge_pages import HUGE_BYTES, map_read_only, map_shared, take_pages


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("tests")
    yield number
    os.close(number)


def _address(mapped: memoryview) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def _smaps_of(address: int) -> dict[str, int]:
    """Return the kilobytes of each kind in the mapping that begins at `address`."""
    kinds: dict[str, int] = {}
    is_ours = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":")
        if "-" in line.split()[0]:
            is_ours = line.startswith(f"{address:x}-")
        elif is_ours and rest.endswith("kB"):
            kinds[name] = int(rest.split()[0])
    return kinds


@pytest.mark.parametrize("num_bytes", [1, 4097, HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_what_the_owner_writes_a_reader_sees_to_the_last_byte(fd: int, num_bytes: int) -> None:
    mine = np.frombuffer(map_shared(fd, num_bytes), np.uint8)
    theirs = np.frombuffer(map_read_only(fd, num_bytes), np.uint8)
    assert os.fstat(fd).st_size == num_bytes == len(mine)
    assert not theirs.any()
    mine[-1] = 7
    assert theirs[-1] == 7
    assert mine.flags.writeable and not theirs.flags.writeable


def test_all_of_it_is_there_from_the_start(fd: int) -> None:
    mapped = map_shared(fd, 2 * HUGE_BYTES + 4096)
    assert os.fstat(fd).st_blocks * 512 == len(mapped)
    assert _smaps_of(_address(mapped))["Rss"] * 1024 == len(mapped)


def test_whole_huge_pages_are_huge_for_owner_and_reader(fd: int) -> None:
    mapped = map_shared(fd, 2 * HUGE_BYTES + 4096)
    if not _smaps_of(_address(mapped)).get("ShmemPmdMapped"):
        pytest.skip("this kernel has no MADV_COLLAPSE, or no huge page is free")
    assert _smaps_of(_address(mapped))["ShmemPmdMapped"] * 1024 == 2 * HUGE_BYTES
    view = np.frombuffer(map_read_only(fd, len(mapped)), np.uint8)
    assert view.sum() == 0  # its pages are mapped as they are read
    assert _smaps_of(view.ctypes.data)["ShmemPmdMapped"] * 1024 == 2 * HUGE_BYTES


def test_a_map_goes_with_the_last_array_made_from_it(fd: int) -> None:
    address = _address(mapped := map_shared(fd, HUGE_BYTES))
    array = np.frombuffer(mapped, np.uint8)[1:]
    del mapped
    gc.collect()
    assert _smaps_of(address), "an array still reads it"
    assert array.sum() == 0
    del array
    gc.collect()
    assert not _smaps_of(address)


def _faults_of_writing(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    memory[:: mmap.PAGESIZE] |= 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_private_memory_gets_its_pages_before_its_first_use_and_keeps_its_content() -> None:
    size = 3 * HUGE_BYTES + 4097
    taken, fresh = (np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE), np.uint8) for _ in range(2))
    taken[5] = 6
    take_pages(int(taken.ctypes.data) + 5, size - 5)
    assert taken[5] == 6
    num_pages = size // mmap.PAGESIZE
    assert _faults_of_writing(taken) < num_pages // 10
    assert taken[5] == 6
    if _faults_of_writing(fresh) < num_pages // 10:
        pytest.skip("this kernel gives huge pages unasked")


@pytest.mark.parametrize("size", [0, 1, 100])
def test_less_than_a_page_has_none_to_take(size: int) -> None:
    take_pages(int(np.frombuffer(mmap.mmap(-1, 4096), np.uint8).ctypes.data) + 1, size)
