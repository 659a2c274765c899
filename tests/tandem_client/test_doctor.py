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
    """The calls of pynvml that `tandem doctor` makes."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, driver_fails: bool = False, card_fails: bool = False) -> None:
        self._driver_fails = driver_fails
        self._card_fails = card_fails
        self.is_running = False

    def nvmlInit(self) -> None:
        if self._driver_fails:
            raise self.NVMLError("Driver Not Loaded")
        self.is_running = True

    def nvmlShutdown(self) -> None:
        self.is_running = False

    def nvmlSystemGetDriverVersion(self) -> str:
        return "590.1"

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        if self._card_fails:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(free=100 << 30, total=140 << 30)


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
