"""Devices are read on a thread of their own, and each worker's memory is told from that of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tandem.v1 import types_pb2 as pb
from tandem_runtime.host_workers import HOST_PID_NAMESPACE
from tests.tandem_runtime.stub_machine import StubMachine
from tests.tandem_runtime.test_memory import GIB, MIG_B, UUID_A, UUID_B

CUDA_A, CUDA_B = UUID_A.removeprefix("GPU-"), UUID_B.removeprefix("GPU-")
PREFILL: dict[str, Any] = {"pids": [100, 101], "engine": (CUDA_A, 29 * GIB)}
DECODE: dict[str, Any] = {"pids": [200, 201], "engine": (CUDA_A, 39 * GIB)}


def owned(device: pb.Device) -> tuple[float | None, float | None]:
    """Return own and foreign memory in GiB; None: not known."""
    return (
        device.own_bytes / GIB if device.HasField("own_bytes") else None,
        device.foreign_bytes / GIB if device.HasField("foreign_bytes") else None,
    )


def test_prefill_and_decode_share_a_card_on_the_host(tmp_path: Path) -> None:
    with StubMachine(tmp_path) as machine:
        machine.scene("process 0 101 30720", "process 0 201 40960", "process 0 999 1024", "used 0 74000")
        for _ in range(2):  # decode is not known to prefill before it has read once
            prefill = machine.read("prefill", namespace=HOST_PID_NAMESPACE, **PREFILL)
            decode = machine.read("decode", namespace=HOST_PID_NAMESPACE, **DECODE)
        assert [owned(device) for device in prefill] == [(30, 1), (0, 0)]
        assert [owned(device) for device in decode] == [(40, 1), (0, 0)]


def test_prefill_and_decode_share_a_card_in_one_container(tmp_path: Path) -> None:
    with StubMachine(tmp_path) as machine:
        machine.scene("process 0 70101 30720", "process 0 70201 40960", "used 0 73000")
        for _ in range(2):
            prefill = machine.read("prefill", **PREFILL)
            decode = machine.read("decode", **DECODE)
        assert (owned(prefill[0]), owned(decode[0])) == ((30, 0), (40, 0)), "the driver gives the host's pids"
        machine.scene("process 0 101 0", "process 0 201 0", "used 0 72500")
        assert owned(machine.read("prefill", **PREFILL)[0]) == (29, 0), "it translates them, and gives 0 bytes"
        machine.scene("process 0 101 30720", "process 0 201 40960", "used 0 80000")
        own, foreign = owned(machine.read("decode", **DECODE)[0])
        assert own == 40 and foreign is not None and 6 < foreign < 8, "and others are in containers of their own"


def test_prefill_and_decode_share_a_card_from_two_containers(tmp_path: Path) -> None:
    """Both have pid 101: their own containers count it."""
    decode_of = {**DECODE, "pids": [100, 101]}
    with StubMachine(tmp_path) as machine:
        machine.scene("process 0 70101 30720", "process 0 70201 40960", "process 0 70999 5120", "used 0 79000")
        for _ in range(2):
            prefill = machine.read("prefill", namespace=11, **PREFILL)
            decode = machine.read("decode", namespace=12, **decode_of)
        assert (owned(prefill[0]), owned(decode[0])) == ((30, 5), (40, 5))


def test_a_worker_that_loads_makes_nothing_up(tmp_path: Path) -> None:
    with StubMachine(tmp_path) as machine:
        machine.scene("process 0 70101 30720", "process 0 70999 5120", "used 0 37000")
        [card, other] = machine.read("prefill", pids=[100, 101], engine=None)
        assert owned(card) == (None, None) and "loads" in card.foreign_unknown
        assert owned(other) == (None, 0), "nothing is there"
        [card, _] = machine.read("prefill", **PREFILL)
        assert owned(card) == (30, 5) and card.foreign_unknown == ""


def test_an_engine_in_a_mig_instance_is_found_whatever_cuda_calls_its_device(tmp_path: Path) -> None:
    for number, name in enumerate((CUDA_A, MIG_B.removeprefix("MIG-"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with StubMachine(folder, NVML_STUB_MIG="1", CUDA_VISIBLE_DEVICES=MIG_B) as machine:
            machine.scene("process 0/3/0 70999 5120", "process 0/4/0 70101 7168")
            [instance] = machine.read("decode", pids=[100, 101], engine=(name, 6 * GIB))
            assert (instance.uuid, owned(instance)) == (MIG_B, (7, 0))


def test_the_second_card_belongs_to_the_engine_that_has_it(tmp_path: Path) -> None:
    fastest = {"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "FASTEST_FIRST"}  # CUDA's 0 is NVML's 1 here
    with StubMachine(tmp_path, **fastest) as machine:
        machine.scene("process 0 70101 5120", "process 1 70201 7168", "used 1 8000")
        [card] = machine.read("decode", pids=[200, 201], engine=(CUDA_B, 6 * GIB))
        assert (card.index, card.uuid, owned(card)) == (1, UUID_B, (7, 0))


def test_a_driver_that_hangs_from_the_start_delays_no_start(tmp_path: Path) -> None:
    with StubMachine(tmp_path) as machine:
        machine.scene("hang")
        report = machine.report("decode", first_seconds=0.01)
        assert (list(report.devices), report.source) == ([], "host: NVML has not been read yet")
        while report.source != "host: NVML has not answered for 1 s":
            report = machine.report("decode", how="report", silent_seconds=1.0)
        assert list(report.devices) == [] and report.host.total_bytes > 0
        machine.scene()
        assert machine.report("decode").source == "nvml"


def test_a_driver_that_hangs_leaves_the_last_figures_and_their_age_and_one_call(tmp_path: Path) -> None:
    with StubMachine(tmp_path) as machine:
        before = machine.report("decode", **DECODE)
        assert before.device_age_seconds == 0 and before.devices[0].error == ""
        machine.scene("hang")
        hanging = [machine.report("decode", how="report", silent_seconds=1.0, **DECODE)]
        while not hanging[-1].device_age_seconds:  # reports go on meanwhile
            hanging.append(machine.report("decode", how="report", silent_seconds=1.0, **DECODE))
        assert machine.num_reader_threads == 1
        silent = hanging[-1]
        assert silent.device_age_seconds >= 1
        assert silent.devices[0].error == f"NVML has not answered for {silent.device_age_seconds:.0f} s"
        assert silent.devices[1].error.endswith(" s; power: Not Supported")
        assert silent.devices[0].used_bytes == before.devices[0].used_bytes
        machine.scene("used 0 2048")
        after = machine.report("decode", **DECODE)
        assert after.device_age_seconds == 0 and after.devices[0].error == ""
        assert after.devices[0].used_bytes == 2 * GIB
