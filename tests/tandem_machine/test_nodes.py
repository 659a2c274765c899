"""A process knows the NUMA nodes of its cores, and what memory they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem_machine import nodes
from tandem_machine.nodes import Node, available_bytes_of, node_of, nodes_of, numbers_in
from tests.tandem_machine.node_tree import DROPPABLE_BYTES, GIB, put_on_nodes


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0-3,8,10-11\n", (0, 1, 2, 3, 8, 10, 11)), ("5\n", (5,)), ("\n", ()), ("", ())],
)
def test_lists_of_the_kernel_are_read(text: str, numbers: tuple[int, ...]) -> None:
    assert numbers_in(text) == numbers


def test_each_node_has_its_online_cores_and_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 5 is offline, so the kernel leaves it out of the node's list."""
    put_on_nodes(tmp_path, monkeypatch, {0: ("0-3", 64), 1: ("4,6-7", 32)})
    assert nodes.nodes() == (
        Node(0, (0, 1, 2, 3), 64 * GIB, 32 * GIB + DROPPABLE_BYTES),
        Node(1, (4, 6, 7), 32 * GIB, 16 * GIB + DROPPABLE_BYTES),
    )
    assert (available_bytes_of(1), available_bytes_of(7)) == (16 * GIB + DROPPABLE_BYTES, 0)


def test_cores_are_grouped_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_nodes(tmp_path, monkeypatch, {0: ("0,2,4,6", 64), 1: ("1,3,5,7", 64), 2: ("", 128)})
    assert [(node.number, node.cores) for node in nodes_of((0, 1, 2, 5))] == [(0, (0, 2)), (1, (1, 5))]
    assert [node.number for node in nodes_of((3, 7))] == [1]


TWO = {0: ("0-3", 64), 1: ("4-7", 64)}


@pytest.mark.parametrize(
    ("tree", "cores", "number"),
    [
        pytest.param(TWO, (4, 5), 1, id="some cores of one node"),
        pytest.param(TWO, (0, 1, 2, 3), 0, id="all cores of one node"),
        pytest.param(TWO, (3, 4), None, id="two nodes"),
        pytest.param(TWO, (3, 99), None, id="a core of no node"),
        pytest.param(TWO, (), None, id="no cores"),
        pytest.param({0: ("0-3", 64), 1: ("4-7", 64), 2: ("8-11", 64), 3: ("12-15", 64)}, (12, 15), 3, id="four nodes"),
        pytest.param({0: ("0-3", 64), 1: ("", 256)}, (0, 1), 0, id="beside a node without cores: CXL"),
        pytest.param({0: ("0-3", 64), 1: ("4-7", 0), 2: ("8-11", 64)}, (4, 5), None, id="a node without memory"),
        pytest.param({0: ("0-3", 64), 1: ("4-7", 0)}, (0, 1), None, id="one node has all memory"),
        pytest.param({0: ("0-3", 64), 8: ("4-7", 64)}, (4, 5), 8, id="numbers with a gap"),
        pytest.param({0: ("0-7", 64)}, (0, 1), None, id="one node"),
    ],
)
def test_a_process_is_at_home_on_the_node_that_has_all_its_cores_and_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tree: dict[int, tuple[str, int]],
    cores: tuple[int, ...],
    number: int | None,
) -> None:
    put_on_nodes(tmp_path, monkeypatch, tree)
    found = node_of(cores)
    assert (None if found is None else found.number) == number


def test_memory_that_the_cpuset_forbids_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    four = {0: ("0-3", 64), 1: ("4-7", 64), 2: ("8-11", 64), 3: ("12-15", 64)}
    put_on_nodes(tmp_path, monkeypatch, four, allowed_memory="0-1")
    assert [node.total_bytes // GIB for node in nodes.nodes()] == [64, 64, 0, 0]
    assert node_of((4,)) == nodes.nodes()[1]
    assert node_of((8,)) is None, "set_mempolicy would refuse this node"


def test_a_machine_with_one_node_costs_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_nodes(tmp_path, monkeypatch, {0: ("0-7", 64)})
    names: list[str] = []

    def read(path: Path) -> str:
        names.append(path.name)
        return path.read_text()

    monkeypatch.setattr(nodes, "read", read)
    assert (node_of((0, 1)), nodes_of((0, 1))) == (None, ())
    assert set(names) == {"online"}


def test_without_the_kernels_tree_there_are_no_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "ROOT", tmp_path / "absent")
    assert (nodes.nodes(), nodes_of((0,)), node_of((0,))) == ((), (), None)
