"""A process computes with as many threads as its affinity and its CPU quota allow, and pins only where it is told."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_engine.cores import num_threads, pinned_cores, use_cores
from tandem_engine.errors import ModelUnusable
from tandem_engine.settings import EngineConfig
from tandem_machine import cores
from tandem_machine.cores import cpu_quota, num_usable_cores
from tests.tandem_machine.cgroup_tree import put_into_cgroup


@pytest.mark.parametrize(
    ("membership", "files", "quota", "num_cores"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0, 2, id="v2"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, None, 64, id="v2 without a quota"),
        pytest.param("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5, 2, id="whole cores only"),
        pytest.param("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5, 1, id="at least one"),
        pytest.param("0::/pod/box\n", {"pod/cpu.max": "300000 100000", "pod/box/cpu.max": "max 100000"}, 3.0, 3),
        pytest.param("0::/../elsewhere\n", {"cpu.max": "400000 100000"}, 4.0, 4, id="outside of its namespace"),
        pytest.param(
            "4:cpu,cpuacct:/docker/1\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            2.0,
            2,
            id="v1 in a container that does not see its own path",
        ),
        pytest.param(
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
            64,
            id="v1 without",
        ),
        pytest.param("0::/\n", {}, None, 64, id="no cgroups"),
    ],
)
def test_the_cores_are_those_of_the_affinity_or_of_a_smaller_quota(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    membership: str,
    files: dict[str, str],
    quota: float | None,
    num_cores: int,
) -> None:
    put_into_cgroup(tmp_path, monkeypatch, membership, files)
    monkeypatch.setattr(cores, "allowed_cores", lambda: tuple(range(64)))
    assert (cpu_quota(), num_usable_cores()) == (quota, num_cores)


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        pytest.param("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, id="v1"),
        pytest.param("0::/box\n", {"box/cpu.max": "200000 100000"}, id="v2"),
    ],
)
def test_an_engine_under_a_quota_has_as_many_threads_as_it_may_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str]
) -> None:
    put_into_cgroup(tmp_path, monkeypatch, membership, files)
    monkeypatch.setattr(cores, "allowed_cores", lambda: tuple(range(64)))
    assert num_threads(EngineConfig("m")) == 2
    assert num_threads(EngineConfig("m", num_threads=5)) == 5, "what is configured wins"


def test_threads_are_pinned_only_to_cores_that_were_given() -> None:
    assert pinned_cores(EngineConfig("m", num_threads=2)) == (), "two engines would choose the same cores"
    assert pinned_cores(EngineConfig("m", num_threads=2, cpus=(5, 3, 4))) == (3, 4)
    assert pinned_cores(EngineConfig("m", num_threads=1, cpus=(3,))) == (), "the affinity of the process does it"
    assert pinned_cores(EngineConfig("m", num_threads=4, cpus=(0, 1))) == (), "too few cores to have one each"


@pytest.fixture
def own_affinity(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, ...]]:
    """Yield the allowed cores; restore them, and the environment that `use_cores` changes."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    allowed = cores.allowed_cores()
    yield allowed
    os.sched_setaffinity(0, allowed)


def test_cores_that_the_process_may_not_use_are_refused_with_those_that_it_may(own_affinity: tuple[int, ...]) -> None:
    first, absent = own_affinity[0], 1023
    with pytest.raises(ModelUnusable, match=rf"--cpus {first},{absent}: of these this process may use {first} alone"):
        use_cores(EngineConfig("m", cpus=(first, absent)))


def test_cores_outside_of_the_inherited_affinity_are_taken(own_affinity: tuple[int, ...]) -> None:
    """`tandem up` keeps itself off the cores that decode, and its engines inherit that."""
    if len(own_affinity) < 2:
        pytest.skip("one core only")
    os.sched_setaffinity(0, own_affinity[:1])
    use_cores(EngineConfig("m", cpus=own_affinity[1:]))
    assert cores.allowed_cores() == own_affinity[1:]


def test_the_kernels_threads_may_run_anywhere_unless_they_are_pinned() -> None:
    from tests.tandem_engine.ops.cpu_machines import cpu_ops

    ops, allowed = cpu_ops(), os.sched_getaffinity(0)
    before = set(os.listdir("/proc/self/task"))  # noqa: PTH208 - names only
    ops.set_num_threads(2)
    try:
        started = set(os.listdir("/proc/self/task")) - before  # noqa: PTH208
        assert [os.sched_getaffinity(int(thread)) for thread in started] == [allowed]
        own = max(allowed)
        ops.set_num_threads(2, (own, own))
        pinned = set(os.listdir("/proc/self/task")) - before - started  # noqa: PTH208
        assert [os.sched_getaffinity(int(thread)) for thread in pinned] == [{own}]
    finally:
        ops.set_num_threads(1)
