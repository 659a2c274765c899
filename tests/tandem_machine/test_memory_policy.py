"""A thread takes its memory from the node that it prefers."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_machine import memory_policy
from tandem_machine.memory_policy import MemoryPolicy, prefer_node

_CHILD = """
import mmap, threading
from pathlib import Path
from tandem_machine.memory_policy import memory_policy, prefer_node

assert str(memory_policy()) == "default"
prefer_node(0)
of_thread = []
thread = threading.Thread(target=lambda: of_thread.append(str(memory_policy())))
thread.start()
thread.join()
private = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
private.write(bytes(1 << 20))
policies = {line.split()[1] for line in Path("/proc/self/numa_maps").read_text().splitlines()}
print(memory_policy(), of_thread[0], *sorted(policies))
"""


def test_a_preferred_node_holds_for_all_memory_of_a_process_and_its_threads() -> None:
    """In a process of its own: the policy of this one stays as it is. Node 0 is on every machine."""
    if not Path("/proc/self/numa_maps").exists():
        pytest.skip("this kernel has no NUMA")
    done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=False)
    if "Operation not permitted" in done.stderr:
        pytest.skip("a seccomp profile refuses set_mempolicy here")
    assert done.stderr == ""
    assert done.stdout.split() == ["preferred:0", "preferred:0", "prefer:0"]


def test_a_node_that_is_not_there_is_refused_by_the_kernel() -> None:
    code = "from tandem_machine.memory_policy import prefer_node\nprefer_node(1000)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1].startswith(("OSError: [Errno 22]", "PermissionError"))


def test_the_call_names_the_mode_the_mask_and_the_bits_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[object, ...]] = []

    def record(number: int, *arguments: object) -> int:
        mode, mask, num_bits = arguments
        calls.append((number, mode, list(mask)[:3], num_bits))  # type: ignore[call-overload]
        return 0

    monkeypatch.setattr(memory_policy, "system_call", record)
    for machine, number in (("x86_64", 238), ("aarch64", 237)):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        prefer_node(65)
        assert calls.pop() == (number, memory_policy.PREFERRED, [0, 2, 0], 1025)


def test_a_machine_whose_numbers_are_not_known_refuses_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    monkeypatch.setattr(memory_policy, "system_call", lambda *_: pytest.fail("a wrong number is another call"))
    with pytest.raises(OSError) as caught:
        prefer_node(0)
    assert caught.value.errno == errno.ENOSYS


def test_a_policy_is_written_with_its_name_and_its_nodes() -> None:
    assert str(MemoryPolicy(3, (0, 1))) == "interleave:0,1"
    assert str(MemoryPolicy(9)) == "mode 9"
    assert [MemoryPolicy(mode).is_default for mode in (0, 1, 2, 4)] == [True, False, False, True]
