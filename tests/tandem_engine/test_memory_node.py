"""An engine whose cores lie on one NUMA node takes its memory from that node."""

from __future__ import annotations

import ctypes
import errno
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem_engine import memory_node
from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.execution.pool_size import choose_num_blocks
from tandem_engine.settings import EngineConfig
from tandem_machine import memory_policy
from tandem_machine.memory import Memory
from tests.tandem_machine.node_tree import DROPPABLE_BYTES, GIB, put_on_nodes

TWO = {0: ("0-3", 64), 1: ("4-7", 64)}


class Kernel:
    """Records the system calls for memory policies, and answers them on x86-64."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, mode: int = 0, error: int = 0) -> None:
        self.mode, self.error = mode, error
        self.preferred: list[int] = []
        self.num_calls = 0
        monkeypatch.setattr(memory_policy, "system_call", self.call)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def call(self, number: int, *arguments: Any) -> int:
        self.num_calls += 1
        if self.error:
            ctypes.set_errno(self.error)
            return -1
        if number == 239:
            arguments[0]._obj.value = self.mode
        else:
            self.preferred.append(sum(word << 64 * index for index, word in enumerate(arguments[1])))
        return 0


def run_on(monkeypatch: pytest.MonkeyPatch, cores: Sequence[int]) -> tuple[int | None, list[str]]:
    """Return the chosen node of a process that may use `cores`, and what it has reported."""
    reports: list[str] = []
    monkeypatch.setattr(memory_node, "allowed_cores", lambda: tuple(cores))
    return memory_node.use_memory_node(lambda what, fraction: reports.append(what)), reports


def test_the_node_of_the_cores_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_nodes(tmp_path, monkeypatch, TWO)
    kernel = Kernel(monkeypatch)
    assert run_on(monkeypatch, (4, 5)) == (1, [])
    assert kernel.preferred == [0b10]


def test_cores_on_several_nodes_prefer_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_nodes(tmp_path, monkeypatch, TWO)
    kernel = Kernel(monkeypatch)
    assert run_on(monkeypatch, (3, 4)) == (None, [])
    assert kernel.num_calls == 0


def test_on_a_machine_with_one_node_nothing_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_nodes(tmp_path, monkeypatch, {0: ("0-7", 64)})
    kernel = Kernel(monkeypatch)
    assert run_on(monkeypatch, (0, 1)) == (None, [])
    assert kernel.num_calls == 0


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_an_engine_whose_policy_is_refused_goes_on_and_says_once_what_to_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    """Docker's default seccomp profile answers EPERM, others ENOSYS."""
    put_on_nodes(tmp_path, monkeypatch, TWO)
    kernel = Kernel(monkeypatch, error=error)
    number, reports = run_on(monkeypatch, (4, 5))
    assert (number, kernel.num_calls, len(reports)) == (1, 1, 1)
    assert "NUMA node 1" in reports[0] and "--cap-add SYS_NICE" in reports[0]


def test_a_policy_of_numactl_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_on_nodes(tmp_path, monkeypatch, TWO)
    kernel = Kernel(monkeypatch, mode=3)
    number, reports = run_on(monkeypatch, (4, 5))
    assert (number, kernel.preferred) == (None, [])
    assert reports == ["the memory policy interleave was set before this engine started, and stays"]


def test_a_pool_takes_a_fifth_of_the_memory_and_at_most_three_fifths_of_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On two nodes a fifth of the machine lies on one node; on eight nodes it would not fit."""
    geometry = KVGeometry(32, 32, 128, 16, torch.float32)
    monkeypatch.setattr("tandem_engine.execution.pool_size.usable_memory", lambda: Memory(512 * GIB, 256 * GIB))
    put_on_nodes(tmp_path, monkeypatch, {0: ("0-3", 256), 1: ("4-7", 64)})

    def pool_bytes(numa_node: int | None, mapped_bytes: int = 0) -> int:
        config = EngineConfig("m", max_num_seqs=512)
        num_blocks = choose_num_blocks(
            config, geometry, 1 << 20, torch.device("cpu"), mapped_bytes, numa_node=numa_node
        )
        return num_blocks * geometry.bytes_per_block

    def about(num_bytes: float) -> range:
        return range(int(num_bytes) - geometry.bytes_per_block, int(num_bytes) + 1)

    assert pool_bytes(None) in about(256 * GIB / 5)
    assert pool_bytes(0) in about(256 * GIB / 5)
    assert pool_bytes(1) in about(0.6 * (32 * GIB + DROPPABLE_BYTES))
    assert pool_bytes(1, mapped_bytes=12 * GIB) in about(0.6 * (20 * GIB + DROPPABLE_BYTES)), "weights lie there too"


_CHILD = """
import sys
from pathlib import Path
from tandem_machine import nodes
nodes.ROOT, nodes.STATUS = Path(sys.argv[1]), Path(sys.argv[1], "status")
from tandem_engine.memory_node import use_memory_node
print(use_memory_node(lambda what, fraction: print(what)))
from tandem_engine.execution.regions import OwnedRegion
region = OwnedRegion(4 << 20)
print(*(line for line in Path("/proc/self/numa_maps").read_text().splitlines() if "tandem-kv" in line))
"""


def test_the_pool_lies_on_the_preferred_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 is real; the tree adds a second one, so that there is something to choose."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA")
    put_on_nodes(tmp_path, monkeypatch, {0: ("0-1023", 64), 1: ("", 64)})
    done = subprocess.run([sys.executable, "-c", _CHILD, str(tmp_path)], capture_output=True, text=True, check=False)
    if "refuses" in done.stdout:
        pytest.skip("a seccomp profile refuses set_mempolicy here")
    assert done.stderr == ""
    number, pool = done.stdout.splitlines()
    assert (number, pool.split()[1]) == ("0", "prefer:0")
    assert " N0=" in pool
