"""GPUs are reported through NVML's own C interface, and the host where there are none."""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from tandem.v1 import types_pb2 as pb
from tandem_machine import cgroups
from tandem_runtime import memory
from tandem_runtime.host_memory import host_memory
from tandem_runtime.memory import MemoryProbe
from tandem_runtime.nvml import Nvml, NvmlUnavailable
from tandem_runtime.nvml_figures import throttle_reasons

SOURCE = Path(__file__).parent / "nvml_stub" / "nvml_stub.c"
GIB = 1024**3
UUID_A = "GPU-aaaaaaaa-0000-0000-0000-000000000000"
UUID_B = "GPU-bbbbbbbb-0000-0000-0000-000000000001"
MIG_A = "MIG-cccccccc-0000-0000-0000-000000000003"
MIG_B = "MIG-dddddddd-0000-0000-0000-000000000004"

PROBE = """
import ctypes, json, os, sys
from google.protobuf import json_format
from tandem_runtime import memory
os.environ["NVML_STUB_OWN_PID"] = str(os.getpid())
probe = memory.MemoryProbe(lambda: [os.getpid()])
reports = [json_format.MessageToDict(probe.read(), preserving_proto_field_name=True) for _ in range(int(sys.argv[1]))]
stub = ctypes.CDLL("libnvidia-ml.so.1")
counts = [ctypes.c_int.in_dll(stub, name).value for name in ("stub_num_starts", "stub_num_shutdowns")]
print(json.dumps([reports, counts]))
"""


@functools.cache
def stub_folder(*defines: str) -> Path:
    """Compile the stub once per variant; skip where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("NO C COMPILER (cc, gcc, clang): the NVML report is not tested on this machine")
    folder = Path(tempfile.mkdtemp(prefix="tandem-nvml-"))
    target = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", *defines, "-o", target, SOURCE], check=True)
    return folder


def reports(num: int = 1, defines: tuple[str, ...] = (), **variables: str) -> tuple[list[pb.MemoryReport], list[int]]:
    """Read `num` reports in a process whose NVML is the stub; also how often NVML was started and shut down."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_")}
    stub = stub_folder(*defines)
    environment |= {"LD_LIBRARY_PATH": str(stub), "TANDEM_RUNTIME_DIR": str(stub / "run"), **variables}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(num)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, counts = json.loads(done.stdout)
    return [json_format.ParseDict(report, pb.MemoryReport()) for report in found], counts


def only(**variables: str) -> pb.MemoryReport:
    [report], _ = reports(1, (), **variables)
    return report


def test_every_figure_of_a_card_is_reported() -> None:
    report = only()
    assert report.source == "nvml"
    assert report.host.total_bytes > 0
    assert report.devices[0] == pb.Device(
        index=0,
        name="Stub A",
        uuid=UUID_A,
        total_bytes=80 * GIB,
        used_bytes=10 * GIB,
        free_bytes=70 * GIB,
        foreign_bytes=6 * GIB,  # 4242 once though it is in both lists, 4243, and not ours
        utilization_percent=97,
        temperature_celsius=84,
        power_milliwatts=345678,
        throttle_reasons=["sw_power_cap", "hw_thermal_slowdown", "reason_0x8000"],
        own_bytes=3 * GIB,
        energy_millijoules=5_000_000,
        num_corrected_ecc_errors=12,
        num_uncorrected_ecc_errors=1,
    )


def test_xid_errors_are_counted_by_card_and_number_and_a_reading_does_not_wait_for_one() -> None:
    found, _ = reports(2, NVML_STUB_XIDS="0:79,1:48,0:79,0:31")
    assert [dict(device.xid_errors) for device in found[0].devices] == [{79: 2, 31: 1}, {48: 1}]
    assert [dict(device.xid_errors) for device in found[1].devices] == [{79: 2, 31: 1}, {48: 1}]


def test_xid_errors_stay_counted_when_nvml_is_started_again_after_a_lost_card() -> None:
    found, counts = reports(3, NVML_STUB_LOSE="1", NVML_STUB_XIDS="0:79")
    assert counts == [2, 1]
    assert [dict(report.devices[0].xid_errors) for report in found] == [{79: 1}] * 3


def test_a_card_without_energy_counter_and_ecc_reports_neither_and_no_error_of_them() -> None:
    card = only().devices[1]
    assert not card.HasField("energy_millijoules") and not card.HasField("num_uncorrected_ecc_errors")
    assert card.error == "power: Not Supported"


def test_a_figure_that_cannot_be_read_is_absent_and_named_and_the_others_stay() -> None:
    card = only().devices[1]
    assert card.error == "power: Not Supported"
    assert not card.HasField("power_milliwatts")
    assert (card.uuid, card.total_bytes, card.temperature_celsius) == (UUID_B, 24 * GIB, 31)
    assert card.HasField("utilization_percent") and card.utilization_percent == 0, "zero is a figure"
    assert list(card.throttle_reasons) == []  # idle is no throttling


def test_drivers_from_before_the_new_name_tell_their_throttle_reasons_too() -> None:
    [report], _ = reports(defines=("-DNVML_STUB_OLD_DRIVER",))
    assert list(report.devices[0].throttle_reasons) == ["sw_power_cap", "hw_thermal_slowdown", "reason_0x8000"]
    assert report.devices[0].error == ""


def test_a_mig_instance_has_its_own_memory_and_no_figure_that_is_its_cards() -> None:
    [device] = only(CUDA_VISIBLE_DEVICES=MIG_A, NVML_STUB_MIG="1", NVML_STUB_XIDS="0:79").devices
    assert device == pb.Device(
        index=0,
        name="Stub A MIG 3g.40gb",
        uuid=MIG_A,
        mig_instance="3/0",
        total_bytes=40 * GIB,
        used_bytes=4 * GIB,
        free_bytes=36 * GIB,
        own_bytes=4 * GIB,
        foreign_bytes=0,
        temperature_celsius=84,
        throttle_reasons=["sw_power_cap", "hw_thermal_slowdown", "reason_0x8000"],
        xid_errors={79: 1},
    )


def test_a_card_whose_instances_are_all_of_others_says_so() -> None:
    [device, other] = only(NVML_STUB_MIG="none").devices
    assert (device.index, device.total_bytes) == (0, 0)
    assert device.error == "the GPU is in MIG mode, and none of its instances can be used here"
    assert other.uuid == UUID_B


def test_nvml_is_started_once_for_many_reports() -> None:
    _, counts = reports(num=3)
    assert counts == [1, 0]


def test_nvml_is_started_again_after_it_lost_a_card() -> None:
    (before, lost, after), counts = reports(num=3, NVML_STUB_LOSE="1")
    assert before.devices[0].error == ""
    assert "memory: GPU is lost" in lost.devices[0].error
    assert lost.devices[1].total_bytes == 24 * GIB
    assert after.devices[0] == before.devices[0]
    assert counts == [2, 1]


def test_without_a_driver_the_host_is_reported_and_the_reason_said() -> None:
    report = only(NVML_STUB_NO_DRIVER="1")
    assert list(report.devices) == []
    assert report.source == "host: NVML does not start: Driver Not Loaded"
    assert report.host.total_bytes > report.host.available_bytes > 0


def test_a_real_card_reports_itself() -> None:
    try:
        found = Nvml().devices()
    except NvmlUnavailable as reason:
        pytest.skip(f"no real card: {reason}")
    for device, use in found:
        assert device.name and device.uuid.startswith(("GPU-", "MIG-"))
        assert 0 < device.used_bytes + device.free_bytes <= device.total_bytes
        assert use is not None and use.used_bytes == device.used_bytes
        assert device.utilization_percent <= 100


def test_reports_within_half_a_second_are_one_reading() -> None:
    num_readings = []
    probe = MemoryProbe(lambda: num_readings.append(1) or [os.getpid()], has_devices=False)  # type: ignore[func-returns-value]
    assert probe.read() is probe.report() is probe.report() is probe.latest
    assert num_readings == [1]


def test_a_report_never_waits_for_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readers: list[threading.Thread] = []
    has_begun, may_end = threading.Event(), threading.Event()

    def own_pids() -> list[int]:
        readers.append(threading.current_thread())
        if len(readers) == 2:
            has_begun.set()
            assert may_end.wait(10)
        return [os.getpid()]

    probe = MemoryProbe(own_pids, has_devices=False)
    first = probe.read()
    monkeypatch.setattr(memory, "FRESH_SECONDS", -1.0)  # every reading is old
    assert probe.report() is first
    assert has_begun.wait(10)
    assert probe.report() is first and len(readers) == 2  # one reading at a time
    may_end.set()
    readers[1].join(10)
    monkeypatch.setattr(memory, "FRESH_SECONDS", 60.0)
    assert probe.report() is not first
    assert readers[0] is threading.current_thread() is not readers[1]


def test_the_memory_of_our_processes_is_summed_and_ended_ones_count_nothing() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = host_memory([os.getpid()])
    assert own.process_bytes > 1024**2
    assert host_memory([ended.pid]).process_bytes == 0


def test_a_reading_that_lacks_a_descriptor_leaves_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = MemoryProbe(lambda: [os.getpid()], has_devices=False)
    before = probe.read()
    with monkeypatch.context() as used_up:
        used_up.setattr(memory, "host_memory", _no_descriptor)
        assert probe.read() is before
    assert probe.read() is not before


def _no_descriptor(*_: object) -> pb.HostMemory:
    raise OSError(errno.EMFILE, "Too many open files")


def test_a_broken_list_of_processes_does_not_break_the_heartbeat() -> None:
    def broken() -> list[int]:
        raise ProcessLookupError("the engine is gone")

    report = MemoryProbe(broken).read()
    assert report.host.total_bytes > 0


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        pytest.param("0::/\n", {"memory.max": "1000", "memory.current": "400"}, (1000, 600), id="v2"),
        pytest.param("0::/\n", {"memory.max": "max", "memory.current": "400"}, None, id="v2 without a limit"),
        pytest.param(
            "0::/\n",
            {"memory.max": "1000", "memory.current": "400", "memory.stat": "anon 5\ninactive_file 150\n"},
            (1000, 750),
            id="file cache is free to take",
        ),
        pytest.param(
            "0::/pod/box\n",
            {
                "pod/box/memory.max": "1000",
                "pod/box/memory.current": "100",
                "pod/memory.max": "2000",
                "pod/memory.current": "1900",
            },
            (1000, 100),
            id="the pod above the box is nearly full",
        ),
        pytest.param(
            "4:memory:/gone\n0::/\n",
            {"memory/memory.limit_in_bytes": "1000", "memory/memory.usage_in_bytes": "990"},
            (1000, 10),
            id="v1 in a container that does not see its own path",
        ),
        pytest.param(
            "4:memory:/\n",
            {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "9"},
            None,
        ),
    ],
)
def test_a_cgroups_limit_is_the_hosts_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], expected: Any
) -> None:
    root = tmp_path / "cgroup"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    without = host_memory([])
    monkeypatch.setattr(cgroups, "ROOT", root)
    monkeypatch.setattr(cgroups, "MEMBERSHIP", tmp_path / "membership")
    report = host_memory([])
    if expected is None:
        assert report.total_bytes == without.total_bytes
    else:
        assert (report.total_bytes, report.available_bytes) == expected


def test_throttle_reasons_have_names() -> None:
    assert throttle_reasons(0) == throttle_reasons(1) == []
    assert throttle_reasons(0x28) == ["hw_slowdown", "sw_thermal_slowdown"]
