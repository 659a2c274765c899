"""Tests `tandem doctor`: each failure is caused, and each names its remedy."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from rich.console import Console
from typer.testing import CliRunner

from tandem_client.cli.app import app
from tandem_client.cli.doctor import certificates, gpu, machine, network
from tandem_client.cli.doctor.command import exit_code, view
from tandem_client.cli.doctor.finding import Finding
from tandem_machine.memory import Memory
from tests.ports import free_port
from tests.tandem_client.stub_gateway import StubGateway

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)


def _worst(findings: Iterator[Finding]) -> Finding:
    ranks = ("ok", "note", "warn", "fail")
    return max(findings, key=lambda finding: ranks.index(finding.level))


def test_too_little_memory_fails_and_names_what_is_needed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1024)
    finding = _worst(machine.memory(tmp_path, Memory(4 << 30, 1 << 30), oom_kills=0))
    assert finding.level == "fail"
    assert "1.0 GiB of 4.0 GiB free" in finding.text
    assert "needs about 2.0 GiB" in finding.text


def test_memory_counts_the_weights_of_the_model(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(3 << 30)  # sparse
    assert _worst(machine.memory(tmp_path, Memory(16 << 30, 7 << 30), oom_kills=0)).level == "fail"
    assert _worst(machine.memory(tmp_path, Memory(16 << 30, 9 << 30), oom_kills=0)).level == "ok"


def test_killed_processes_are_a_warning() -> None:
    finding = _worst(machine.memory(None, Memory(16 << 30, 16 << 30), oom_kills=3))
    assert finding.level == "warn"
    assert "killed 3 processes" in finding.text


def test_a_state_folder_that_cannot_be_written_fails() -> None:
    finding = _worst(machine.disk(Path("/proc/tandem")))
    assert finding.level == "fail"
    assert "TANDEM_STATE_DIR" in finding.remedy


def test_a_full_disk_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10 << 20))
    finding = _worst(machine.disk(tmp_path / "not" / "there" / "yet"))
    assert (finding.level, finding.text.split(" free")[0]) == ("fail", "10 MiB")
    assert not (tmp_path / "not").exists(), "an examination changes nothing"


def test_a_system_without_memory_files_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(name: str) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(machine, "memory_file", refused)
    assert _worst(machine.shared_memory()).level == "fail"


def test_kernels_come_from_the_package_or_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _worst(machine.compiler(tmp_path)).level == "ok"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    finding = _worst(machine.compiler(tmp_path))
    assert (finding.level, "g++" in finding.remedy) == ("warn", True)
    prebuilt = tmp_path / "ops" / "cpu" / "prebuilt"
    prebuilt.mkdir(parents=True)
    (prebuilt / "0-x86-64-v3.so").touch()
    assert _worst(machine.compiler(tmp_path)).level == "ok"


def test_tight_limits_are_found() -> None:
    assert _worst(machine.limits(open_files=1024, processes=10_000)).level == "warn"
    finding = _worst(machine.limits(open_files=65_536, processes=50))
    assert (finding.level, "pids.max" in finding.remedy) == ("fail", True)
    assert _worst(machine.limits(open_files=65_536, processes=10_000)).level == "ok"


def test_one_core_is_a_warning() -> None:
    assert _worst(machine.processor(1)).level == "warn"


def test_a_taken_port_names_its_process() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        finding = _worst(network.ports(port, free_port()))
    assert finding.level == "fail"
    assert f"{port} (HTTP) is taken by process {os.getpid()}" in finding.text
    assert "--port" in finding.remedy


def test_free_ports_are_fine() -> None:
    assert _worst(network.ports(free_port(), free_port())).level == "ok"


def test_a_clock_apart_from_the_gateways_is_found() -> None:
    assert network.clock_finding(2.0, "http://g").level == "ok"
    assert network.clock_finding(-30.0, "http://g").level == "warn"
    far = network.clock_finding(3600.0, "http://g")
    assert (far.level, "3,600 s ahead" in far.text) == ("fail", True)


def test_the_clock_is_compared_with_a_gateway_that_answers(gateway: StubGateway) -> None:
    assert _worst(network.clock(gateway.url)).text.startswith("agrees with the gateway")
    assert _worst(network.clock("http://127.0.0.1:1")).level == "note"


@pytest.mark.parametrize(
    ("date", "level", "words"),
    [
        (-3600.0, "fail", "ahead of the gateway"),
        (60.0, "warn", "behind the gateway"),
        ("yesterday", "note", "no Date header"),
        ("", "note", "no Date header"),
    ],
)
def test_the_gateways_date_is_believed_or_not_there(date: str | float, level: str, words: str) -> None:
    """A number is seconds from now."""
    sent = date if isinstance(date, str) else formatdate(time.time() + date, usegmt=True)
    with _gateway_with_date(sent) as url:
        finding = _worst(network.clock(url))
    assert (finding.level, words in finding.text) == (level, True)


@contextmanager
def _gateway_with_date(date: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(200)
            if date:
                self.send_header("Date", date)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_system_that_hides_its_listeners_is_only_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: str) -> Any:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refused)
    assert _worst(network.ports(1, 2)).level == "note"


def test_a_model_without_weights_fails(tmp_path: Path) -> None:
    found = {finding.about: finding for finding in machine.memory(tmp_path, Memory(16 << 30, 16 << 30), oom_kills=0)}
    assert (found["model"].level, "no *.safetensors" in found["model"].text) == ("fail", True)


@pytest.mark.parametrize(
    ("expires", "level", "words"),
    [
        (timedelta(hours=23), "ok", "valid"),
        (timedelta(hours=2), "warn", "expires in 2.0 hours"),
        (timedelta(hours=-5), "warn", "expired 5.0 hours ago"),
        (timedelta(days=-40), "fail", "too long to renew"),
    ],
)
def test_certificates_are_judged_by_their_expiry(tmp_path: Path, expires: timedelta, level: str, words: str) -> None:
    _certificate(tmp_path, "decode", expires)
    finding = _worst(certificates.certificates(tmp_path, NOW))
    assert (finding.level, words in finding.text) == (level, True)


def test_a_broken_certificate_fails_by_its_name(tmp_path: Path) -> None:
    _certificate(tmp_path, "prefill", timedelta(hours=20))
    _certificate(tmp_path, "decode", timedelta(hours=20))
    (tmp_path / "certificates" / "decode" / "current" / "certificate.pem").write_text("nonsense")
    finding = _worst(certificates.certificates(tmp_path, NOW))
    assert (finding.level, finding.text.split(":")[0]) == ("fail", "decode")


def _certificate(state_dir: Path, name: str, expires: timedelta) -> None:
    folder = state_dir / "certificates" / name / "current"
    folder.mkdir(parents=True)
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW - timedelta(days=60))
        .not_valid_after(NOW + expires)
        .sign(key, hashes.SHA256())
    )
    (folder / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


class StubNvml:
    """The calls of pynvml that `tandem doctor` makes: a healthy card, but for the answers in `changes`."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver_fails: bool = False, card_fails: bool = False, **changes: Any) -> None:
        self._driver_fails = driver_fails
        self._card_fails = card_fails
        self._changes = changes
        self.is_running = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def nvmlInit(self) -> None:
        self.may_answer.wait(30)
        if self._driver_fails:
            raise self.NVMLError("Driver Not Loaded")
        self.is_running = True

    def nvmlShutdown(self) -> None:
        self.is_running = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.1"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return int(self._changes.get("cuda", 13_010))

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if self._card_fails:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return {0: "GPU-0a", "instance": "MIG-0b"}[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(free=100 << 30, total=140 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any) -> tuple[int, int]:
        return self._changes.get("capability", (9, 0))  # type: ignore[no-any-return]

    def nvmlDeviceGetComputeMode(self, handle: Any) -> int:
        return int(self._changes.get("compute_mode", 0))

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, since: int) -> int:
        assert (kind, since) == (1, 0), "uncorrected, volatile"
        if self._changes.get("ecc") is None:
            raise self.NVMLError("Not Supported")
        return int(self._changes["ecc"])

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        return [int("instances" in self._changes)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, place: int) -> str:
        if place < 6 or not self._changes["instances"]:
            raise self.NVMLError("Not Found")
        return "instance"


def _pci(folder: Path, *, has_card: bool) -> Path:
    if has_card:
        device = folder / "0000:01:00.0"
        device.mkdir()
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
    return folder


def test_a_card_without_a_driver_fails(tmp_path: Path) -> None:
    finding = _worst(gpu.gpu(_pci(tmp_path, has_card=True), StubNvml(driver_fails=True)))
    assert (finding.level, "nvidia-smi" in finding.remedy) == ("fail", True)


def test_a_machine_without_a_card_is_only_noted(tmp_path: Path) -> None:
    finding = _worst(gpu.gpu(_pci(tmp_path, has_card=False), StubNvml(driver_fails=True)))
    assert finding.level == "note"


def test_cards_are_listed_with_their_memory(tmp_path: Path) -> None:
    nvml = StubNvml()
    first = next(gpu.gpu(_pci(tmp_path, has_card=True), nvml))
    assert first.text == "NVIDIA H200: 100.0 GiB of 140.0 GiB free, driver 590.1"


def test_a_lost_card_fails(tmp_path: Path) -> None:
    nvml = StubNvml(card_fails=True)
    assert _worst(gpu.gpu(_pci(tmp_path, has_card=True), nvml)).level == "fail"
    assert not nvml.is_running, "NVML is shut down"


def _of_card(tmp_path: Path, nvml: StubNvml, cuda: str = "13.0") -> list[Finding]:
    for name in ("nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (tmp_path / "pci").mkdir()
    return list(gpu.gpu(_pci(tmp_path / "pci", has_card=True), nvml, dev=tmp_path, torch_cuda=cuda, answer_seconds=30))


def test_a_healthy_card_with_torch_for_it_is_all_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,GPU-0")
    assert [finding.level for finding in _of_card(tmp_path, StubNvml())] == ["ok"]


@pytest.mark.parametrize(
    ("nvml", "cuda", "level", "words"),
    [
        (
            StubNvml(cuda=12_080),
            "13.0",
            "fail",
            "has CUDA 12.8, torch is built for CUDA 13.0: the workers would compute",
        ),
        (StubNvml(), "", "warn", "torch is built for CPUs only"),
        (StubNvml(capability=(7, 0)), "13.0", "warn", "has compute capability 7.0, CUDA 13.0 needs 7.5"),
        (StubNvml(compute_mode=2), "13.0", "fail", "admits no process"),
        (StubNvml(compute_mode=3), "13.0", "warn", "prefill and decode cannot share it"),
        (StubNvml(ecc=2), "13.0", "warn", "2 uncorrected ECC errors"),
        (StubNvml(instances=False), "13.0", "fail", "is in MIG mode and has no instance"),
    ],
)
def test_what_is_wrong_with_a_card_is_found(tmp_path: Path, nvml: StubNvml, cuda: str, level: str, words: str) -> None:
    [finding] = [each for each in _of_card(tmp_path, nvml, cuda) if each.level != "ok"]
    assert (finding.level, words in finding.text) == (level, True), finding


@pytest.mark.parametrize(
    ("nvml", "cuda"),
    [
        (StubNvml(cuda=12_020), "12.8"),  # within a major version
        (StubNvml(capability=(7, 0)), "12.8"),
        (StubNvml(ecc=0), "13.0"),
        (StubNvml(instances=True), "13.0"),
    ],
)
def test_what_does_well_is_not_complained_of(tmp_path: Path, nvml: StubNvml, cuda: str) -> None:
    assert [each.level for each in _of_card(tmp_path, nvml, cuda)] == ["ok"]


def test_a_driver_without_unified_memory_fails_although_nvml_answers(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    findings = list(gpu.gpu(tmp_path, StubNvml(), dev=tmp_path, torch_cuda="13.0"))
    assert "CUDA does not start" in _worst(iter(findings)).text and _worst(iter(findings)).level == "fail"


@pytest.mark.parametrize(
    ("chosen", "complaint"),
    [
        ("MIG-0b", ""),
        ("GPU-0a, 0", ""),
        ("0,3,GPU-0a", "'3'"),
        ("GPU-9", "'GPU-9'"),
        ("MIG-7", "'MIG-7'"),
        ("0,,GPU-0a", "''"),
        ("", ""),
    ],
)
def test_a_name_without_a_card_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: str, complaint: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    complaints = [each.text for each in _of_card(tmp_path, StubNvml(instances=True)) if each.level == "warn"]
    assert [complaint in text for text in complaints] == ([True] if complaint else [])


def test_a_driver_that_hangs_fails(tmp_path: Path) -> None:
    nvml = StubNvml()
    nvml.may_answer.clear()
    [finding] = gpu.gpu(_pci(tmp_path, has_card=True), nvml, answer_seconds=0.01)
    nvml.may_answer.set()
    assert (finding.level, finding.text) == ("fail", "the driver has not answered for 0 s")


def test_the_table_fits_80_columns_and_shows_each_remedy() -> None:
    findings = [Finding("disk", "fail", "cannot write " * 20, "free space"), Finding("gpu", "note", "no card")]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(view(findings))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "→ free space" in text
    assert "1 to mend" in text
    assert exit_code(findings) == 1


def test_a_warning_without_a_remedy_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="remedy"):
        Finding("disk", "warn", "nearly full")


def test_the_command_ends_with_1_if_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        arguments = ["doctor", "--port", str(port), "--grpc-port", str(free_port()), "--json"]
        answer = CliRunner().invoke(app, [*arguments, "--url", "http://127.0.0.1:1"])
    document = json.loads(answer.stdout)
    failed = {finding["about"] for finding in document["findings"] if finding["level"] == "fail"}
    assert answer.exit_code == 1
    assert "ports" in failed
    assert document["ok"] is False


def test_a_model_that_is_no_folder_is_refused() -> None:
    answer = CliRunner().invoke(app, ["doctor", "--model", "/nonexistent"])
    assert (answer.exit_code, "not a folder" in answer.output) == (1, True)
