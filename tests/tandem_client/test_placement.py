"""On a machine with several NUMA nodes each worker has cores of one node, where the workers fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_client.cli import plan as planning
from tandem_client.cli.placement import divide_cores, place_cores
from tandem_client.cli.plan import Machine, UpOptions, cores_beside_decode, plan, this_machine
from tandem_machine.nodes import Node
from tests.tandem_machine.cgroup_tree import put_into_cgroup
from tests.tandem_machine.node_tree import GIB, put_on_nodes


def run(first: int, count: int) -> tuple[int, ...]:
    return tuple(range(first, first + count))


TWO_OF_8 = [run(0, 8), run(8, 8)]
FOUR_OF_8 = [run(0, 8), run(8, 8), run(16, 8), run(24, 8)]


@pytest.mark.parametrize(
    ("nodes", "num_workers", "placed"),
    [
        pytest.param(TWO_OF_8, 2, TWO_OF_8, id="a node each"),
        pytest.param(TWO_OF_8, 3, [run(0, 4), run(4, 4), run(8, 8)], id="three workers on two nodes"),
        pytest.param(TWO_OF_8, 4, [run(0, 4), run(4, 4), run(8, 4), run(12, 4)], id="two on each"),
        pytest.param(TWO_OF_8, 1, [run(0, 16)], id="one worker has the machine"),
        pytest.param(FOUR_OF_8, 2, [run(0, 16), run(16, 16)], id="two whole nodes each"),
        pytest.param(FOUR_OF_8, 3, [run(0, 8), run(8, 8), run(16, 8)], id="a free node costs less than a split one"),
        pytest.param(FOUR_OF_8, 4, FOUR_OF_8, id="four nodes"),
        pytest.param([(0, 2, 4, 6), (1, 3, 5, 7)], 2, [(0, 2, 4, 6), (1, 3, 5, 7)], id="numbered by turns"),
        pytest.param([run(0, 30), (30, 31)], 2, [run(0, 15), run(15, 15)], id="a node too small for a worker"),
        pytest.param([run(0, 22), run(22, 10)], 2, [run(0, 16), run(16, 16)], id="neither fits well: neighbours"),
        pytest.param([run(0, 12), run(12, 6)], 3, [run(0, 6), run(6, 6), run(12, 6)], id="uneven nodes"),
        pytest.param([(0,), (1,)], 3, [(0,), (1,), (0,)], id="fewer cores than workers"),
        pytest.param([run(0, 8)], 2, [run(0, 4), run(4, 4)], id="one node"),
    ],
)
def test_workers_are_placed_within_nodes_where_they_fit(
    nodes: list[tuple[int, ...]], num_workers: int, placed: list[tuple[int, ...]]
) -> None:
    assert place_cores(nodes, num_workers) == placed


@given(sizes=st.lists(st.integers(1, 24), min_size=1, max_size=8), num_workers=st.integers(1, 12))
def test_no_core_is_given_twice_and_nobody_loses_more_than_a_quarter(sizes: list[int], num_workers: int) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    nodes = [run(start, size) for start, size in zip(starts, sizes, strict=True)]
    placed = place_cores(nodes, num_workers)
    assert len(placed) == num_workers
    if sum(sizes) < num_workers:
        assert placed == divide_cores(run(0, sum(sizes)), num_workers)
        return
    given_cores = [core for share in placed for core in share]
    assert len(set(given_cores)) == len(given_cores)
    assert min(map(len, placed)) >= 0.75 * (sum(sizes) // num_workers)


def of_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tree: dict[int, tuple[str, int]], cores: tuple[int, ...]
) -> Machine:
    """Return the machine of a process that may use `cores` of a tree of nodes, without a quota."""
    (folder / "nodes").mkdir()
    put_on_nodes(folder / "nodes", monkeypatch, tree)
    put_into_cgroup(folder, monkeypatch, "0::/\n", {})
    for module in ("tandem_machine.cores", "tandem_client.cli.plan"):
        monkeypatch.setattr(f"{module}.allowed_cores", lambda: cores)
    return this_machine()


def test_offline_and_forbidden_cores_are_not_given_to_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 1 is offline, and the container may not use core 7."""
    machine = of_machine(tmp_path, monkeypatch, {0: ("0,2-3", 64), 1: ("4-7", 64)}, (0, 2, 3, 4, 5, 6))
    workers = plan(machine, UpOptions())[2:]
    assert [worker.cores for worker in workers] == [(0, 2, 3), (4, 5, 6)]
    assert cores_beside_decode(machine, plan(machine, UpOptions())) == (0, 2, 3)


def test_a_node_without_cores_gets_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory on CXL is a node without cores."""
    machine = of_machine(tmp_path, monkeypatch, {0: ("0-3", 64), 1: ("4-7", 64), 2: ("", 512)}, run(0, 8))
    assert [worker.cores for worker in plan(machine, UpOptions())[2:]] == [run(0, 4), run(4, 4)]


def test_a_node_without_memory_gets_a_worker_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = of_machine(tmp_path, monkeypatch, {0: ("0-3", 64), 1: ("4-7", 0)}, run(0, 8))
    workers = plan(machine, UpOptions())[2:]
    assert [worker.cores for worker in workers] == [run(0, 4), run(4, 4)]
    limits = [int(worker.command[worker.command.index("--kv-memory-limit-bytes") + 1]) for worker in workers]
    assert limits[1] == planning.kv_bytes_per_worker(machine.free_memory_bytes, 2), "its memory is on another node"


def test_workers_on_one_node_share_three_fifths_of_its_memory() -> None:
    nodes = (Node(0, run(0, 8), 64 * GIB, 40 * GIB), Node(1, run(8, 4), 16 * GIB, 5 * GIB))
    machine = Machine(cores=run(0, 12), free_memory_bytes=100 * GIB, nodes=nodes)
    shares = planning.divide(machine, 3)
    assert [share.cores for share in shares] == [run(0, 4), run(4, 4), run(8, 4)]
    assert [share.kv_limit_bytes for share in shares] == [12 * GIB, 12 * GIB, 3 * GIB]


def test_one_node_is_divided_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = of_machine(tmp_path, monkeypatch, {0: ("0-7", 64)}, run(0, 8))
    assert machine.nodes == ()
    assert [worker.cores for worker in plan(machine, UpOptions())[2:]] == [run(0, 4), run(4, 4)]


def test_under_a_quota_no_node_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quota names no cores: every container of the machine would choose the same node."""
    (tmp_path / "nodes").mkdir()
    put_on_nodes(tmp_path / "nodes", monkeypatch, {0: ("0-3", 64), 1: ("4-7", 64)})
    put_into_cgroup(tmp_path, monkeypatch, "0::/\n", {"cpu.max": "400000 100000"})
    for module in ("tandem_machine.cores", "tandem_client.cli.plan"):
        monkeypatch.setattr(f"{module}.allowed_cores", lambda: run(0, 8))
    machine = this_machine()
    assert (machine.nodes, machine.is_pinned, len(machine.cores)) == ((), False, 4)
