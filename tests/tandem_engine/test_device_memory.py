"""An engine reports the device memory that it counts, once and when it changes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tandem_engine import device_memory
from tandem_engine.device_memory import DeviceMemory
from tandem_engine.messages import DeviceMemoryUsed


@pytest.fixture(autouse=True)
def nothing_outside_torch() -> Iterator[None]:
    before = device_memory._outside_torch_bytes
    yield
    device_memory._outside_torch_bytes = before


def test_an_engine_on_a_cpu_says_once_that_it_holds_none() -> None:
    now = [0.0]
    memory = DeviceMemory(lambda: now[0])
    assert memory.change() == DeviceMemoryUsed("", 0)
    now[0] = 100.0
    assert memory.change() is None


def test_allocator_and_pool_are_counted_at_most_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, reserved, num_looks = [0.0], [1000], [0]

    def memory_reserved(device: int) -> int:
        assert device == 3
        num_looks[0] += 1
        return reserved[0]

    for name, value in {
        "is_initialized": lambda: True,
        "current_device": lambda: 3,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid of {device}"),
        "memory_reserved": memory_reserved,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    memory = DeviceMemory(lambda: now[0])
    assert memory.change() == DeviceMemoryUsed("uuid of 3", 1000)
    device_memory.hold(50)
    now[0] = 0.9
    assert memory.change() is None and num_looks == [1]
    now[0] = 1.1
    assert memory.change() == DeviceMemoryUsed("uuid of 3", 1050)
    now[0], reserved[0] = 2.2, 900
    device_memory.hold(-50)
    assert memory.change() == DeviceMemoryUsed("uuid of 3", 900)
