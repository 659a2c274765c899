"""Gives the process of a test a machine with the NUMA nodes of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem_machine import nodes

GIB = 1 << 30

_MEMINFO = """\
Node {number} MemTotal:       {total} kB
Node {number} MemFree:        {free} kB
Node {number} MemUsed:        {used} kB
Node {number} Active(anon):         0 kB
Node {number} Active(file):  {active_file} kB
Node {number} Inactive(file):  {inactive_file} kB
Node {number} Shmem:              640 kB
Node {number} SReclaimable:    {slab} kB
Node {number} HugePages_Total:      0
"""
_DROPPABLE = ("active_file", "inactive_file", "slab")
DROPPABLE_BYTES = 16 << 10
"""What each node with memory can drop."""


def put_on_nodes(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores_and_gib: Mapping[int, tuple[str, int]],
    *,
    allowed_memory: str | None = None,
) -> None:
    """Make a tree of nodes: by number, the list of online cores and the memory in GiB, of which half is free.

    `allowed_memory` is the list of nodes whose memory the cpuset of this process allows; all without it.
    """
    online = ",".join(map(str, cores_and_gib))
    (folder / "online").write_text(f"{online}\n")
    (folder / "possible").write_text("0-63\n")
    for number, (cores, gib) in cores_and_gib.items():
        node = folder / f"node{number}"
        node.mkdir()
        (node / "cpulist").write_text(f"{cores}\n")
        total = gib << 20
        sizes = {"total": total, "free": total // 2, "used": total // 2}
        droppable = {"active_file": 8, "inactive_file": 4, "slab": 4} if gib else dict.fromkeys(_DROPPABLE, 0)
        (node / "meminfo").write_text(_MEMINFO.format(number=number, **sizes, **droppable))
    status = folder / "status"
    status.write_text(f"Name:\tpython\nMems_allowed:\tf\nMems_allowed_list:\t{allowed_memory or online}\n")
    monkeypatch.setattr(nodes, "ROOT", folder)
    monkeypatch.setattr(nodes, "STATUS", status)
