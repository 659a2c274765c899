"""Reads the NUMA nodes of the machine: their cores, and their memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tandem_machine.cgroups import read

ROOT = Path("/sys/devices/system/node")
STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Node:
    """One NUMA node. A node may have no cores (memory on CXL), and a node may have no memory."""

    number: int
    cores: tuple[int, ...]
    """Ascending; offline cores are left out."""
    total_bytes: int
    """0 also for memory that the cpuset of this process forbids (`cpuset.mems`)."""
    available_bytes: int
    """Free memory, and what the kernel can drop: pages of files, reclaimable slabs. A little more than MemAvailable,
    which leaves a reserve out."""


def nodes() -> tuple[Node, ...]:
    """Return the nodes of the machine in ascending order; () if the kernel does not tell.

    With less than two nodes there is nothing to choose: then only the list of nodes is read, and a node has its number
    alone.
    """
    online = numbers_in(read(ROOT / "online"))
    if len(online) < 2:
        return tuple(Node(number, (), 0, 0) for number in online)
    allowed = _memory_nodes()
    return tuple(_node(number, has_memory=allowed is None or number in allowed) for number in online)


def nodes_of(cores: Collection[int]) -> tuple[Node, ...]:
    """Return the nodes that `cores` lie on, each with these cores alone; () on a machine with one node."""
    found = nodes()
    if len(found) < 2:
        return ()
    narrowed = (replace(node, cores=tuple(core for core in node.cores if core in cores)) for node in found)
    return tuple(node for node in narrowed if node.cores)


def node_of(cores: Collection[int]) -> Node | None:
    """Return the node that all of `cores` lie on and whose memory may be used.

    None if there is no such node, and None on a machine where only one node has memory: there is nothing to choose.
    """
    found = nodes()
    num_with_memory = sum(node.total_bytes > 0 for node in found)
    own = next((node for node in found if cores and set(cores) <= set(node.cores)), None)
    return own if own is not None and own.total_bytes and num_with_memory > 1 else None


def total_bytes_of(number: int) -> int:
    """Return the memory of one node of several; 0 for a node that is not there."""
    return sum(node.total_bytes for node in nodes() if node.number == number)


def available_bytes_of(number: int) -> int:
    """Return the bytes that one node of several can still give; 0 for a node that is not there."""
    return sum(node.available_bytes for node in nodes() if node.number == number)


def numbers_in(text: str) -> tuple[int, ...]:
    """Parse a list of the kernel: "0-2,8" is (0, 1, 2, 8)."""
    return tuple(number for part in text.strip().split(",") if part for number in _range(part))


def _range(part: str) -> Iterator[int]:
    first, _, last = part.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _node(number: int, *, has_memory: bool) -> Node:
    folder = ROOT / f"node{number}"
    cores = numbers_in(read(folder / "cpulist"))
    sizes = _sizes(read(folder / "meminfo")) if has_memory else {}
    droppable = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
    return Node(number, cores, sizes.get("MemTotal", 0), sum(sizes.get(name, 0) for name in droppable))


def _sizes(text: str) -> dict[str, int]:
    """Parse lines "Node 0 MemFree:  123 kB" to bytes by name."""
    fields = (line.split() for line in text.splitlines())
    return {field[2].rstrip(":"): int(field[3]) * 1024 for field in fields if len(field) > 3}


def _memory_nodes() -> tuple[int, ...] | None:
    """Return the nodes whose memory this process may use; None if the kernel does not tell."""
    for line in read(STATUS).splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return numbers_in(value)
    return None
