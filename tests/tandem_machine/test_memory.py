"""A process knows the memory that it may use, and whether the kernel has killed for lack of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem_engine.execution.kv_cache import KVGeometry
from tandem_engine.execution.pool_size import choose_num_blocks
from tandem_engine.settings import EngineConfig
from tandem_machine.memory import num_oom_kills, usable_memory
from tests.tandem_machine.cgroup_tree import put_into_cgroup

GIB = 1 << 30


def test_a_pool_keeps_within_the_limit_of_a_cgroup_of_version_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": str(GIB // 2)}
    put_into_cgroup(tmp_path, monkeypatch, "4:memory:/\n", limit)
    assert usable_memory().available_bytes == GIB // 2
    geometry = KVGeometry(32, 32, 128, 16, torch.float32)
    num_blocks = choose_num_blocks(EngineConfig("m"), geometry, 8192, torch.device("cpu"))
    assert 0 < num_blocks * geometry.bytes_per_block < GIB // 2


@pytest.mark.parametrize(
    ("membership", "files", "kills"),
    [
        pytest.param("0::/box\n", {"box/memory.events": "low 0\noom 3\noom_kill 2\n"}, 2, id="v2"),
        pytest.param(
            "4:memory:/box\n0::/\n",
            {"memory/box/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n"},
            7,
            id="v1",
        ),
    ],
)
def test_kills_for_lack_of_memory_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], kills: int
) -> None:
    put_into_cgroup(tmp_path, monkeypatch, membership, files)
    assert num_oom_kills() == kills
