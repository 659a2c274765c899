"""A worker reports the devices that CUDA gives it: by index, by UUID, by MIG instance."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.v1 import types_pb2 as pb
from tests.tandem_runtime.stub_machine import StubMachine
from tests.tandem_runtime.test_memory import GIB, MIG_A, MIG_B, UUID_A, UUID_B

NONE = {"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None, "NVML_STUB_MIG": None, "NVML_STUB_ALIKE": None}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StubMachine]:
    with StubMachine(tmp_path_factory.mktemp("machine")) as machine:
        yield machine


def report(machine: StubMachine, engine: tuple[str, int] = ("", 0), **environment: str | None) -> pb.MemoryReport:
    return machine.report("worker", engine=engine, environment={**NONE, **environment})


@pytest.mark.parametrize(
    ("chosen", "uuids"),
    [
        (None, [UUID_A, UUID_B]),
        ("0,1", [UUID_A, UUID_B]),
        ("1,0", [UUID_B, UUID_A]),
        (" 1 ", [UUID_B]),
        (UUID_B, [UUID_B]),
        ("GPU-bbb", [UUID_B]),
        ("1,7,0", [UUID_B]),  # as CUDA does, the list ends at its first entry that names nothing
        ("GPU-", []),  # fits both
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_restricts_and_orders(machine: StubMachine, chosen: str | None, uuids: list[str]) -> None:
    found = report(machine, CUDA_VISIBLE_DEVICES=chosen)
    assert [device.uuid for device in found.devices] == uuids
    assert [device.index for device in found.devices] == [(UUID_A, UUID_B).index(uuid) for uuid in uuids], "NVML's own"
    assert found.source == ("nvml" if uuids else "host: NVML shows no device to this process")


@pytest.mark.parametrize(
    ("order", "alike", "engine", "uuids"),
    [
        (None, None, "", [UUID_A]),  # engines are started with PCI_BUS_ID
        ("PCI_BUS_ID", None, "", [UUID_A]),
        ("FASTEST_FIRST", "1", "", [UUID_A]),
        ("FASTEST_FIRST", None, "", [UUID_A, UUID_B]),
        ("FASTEST_FIRST", None, UUID_B, [UUID_B]),
    ],
)
def test_an_index_of_unlike_cards_is_believed_only_in_the_order_of_the_bus(
    machine: StubMachine, order: str | None, alike: str | None, engine: str, uuids: list[str]
) -> None:
    """The fastest card may be CUDA's 0, NVML's is the first on the bus; the engine tells which card it has."""
    variables = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": order, "NVML_STUB_ALIKE": alike}
    found = report(machine, (engine.removeprefix("GPU-"), GIB), **variables)
    assert [device.uuid for device in found.devices] == uuids


@pytest.mark.parametrize(
    ("chosen", "instances"),
    [
        (None, ["3/0", ""]),  # as CUDA does, the first instance of a card in MIG mode
        ("0", ["3/0"]),
        ("1", [""]),
        (UUID_A, ["3/0"]),
        (MIG_A, ["3/0"]),
        (f"{MIG_B},{MIG_A}", ["4/0", "3/0"]),
        ("MIG-ddd", ["4/0"]),
        (f"MIG-{UUID_A}/4/0", ["4/0"]),  # the name under drivers before 470
        (f"MIG-{UUID_A}/9/0,1", []),
        (f"MIG-{UUID_B}/4/0", []),
        ("MIG-1234,1", []),
        ("MIG-", []),  # fits both
    ],
)
def test_mig_instances_are_found_by_each_of_their_names(
    machine: StubMachine, chosen: str | None, instances: list[str]
) -> None:
    found = report(machine, NVML_STUB_MIG="1", CUDA_VISIBLE_DEVICES=chosen)
    assert [device.mig_instance for device in found.devices] == instances
