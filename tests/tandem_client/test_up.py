"""Tests that `tandem up` starts, shows, restarts and stops processes: the real command over four fake services."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tandem_client.cli.plan import UpOptions
from tandem_client.cli.up import CannotStart, check_options, curl_line
from tests.ports import free_ports
from tests.tandem_client.fake_services import make_fake_services
from tests.tandem_client.stub_gateway import StubGateway


class Up:
    """A running `tandem up` and its output."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.lines: list[str] = []

    def until(self, words: str) -> str:
        """Read until a line contains `words`; the test's timeout ends the wait."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if words in line:
                return line
        raise AssertionError(f"{words!r} was never printed:\n" + "\n".join(self.lines))

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait(30)


@contextmanager
def tandem_up(folder: Path, *arguments: str) -> Iterator[Up]:
    environment = make_fake_services(folder)
    port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", "tandem_client.cli", "up", "--port", str(port), "--grpc-port", str(grpc_port)]
    with subprocess.Popen(
        [*command, *arguments], env=environment, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            yield Up(process, port)
        finally:
            if process.poll() is None:
                process.kill()


def test_it_shows_what_loads_then_the_url_and_a_line_to_paste_and_drains(tmp_path: Path) -> None:
    with tandem_up(tmp_path) as up:
        up.until("Tandem is ready after")
        assert up.url in up.lines[-1]
        shown = [line.split(maxsplit=1) for line in up.lines[:-1] if line]
        assert ["control-plane", "starting"] in shown
        assert ["kv-service", "ready"] in shown
        assert any(
            name == "prefill-0" and what.startswith("ready · @tandem/demo · 1,024 KV blocks") for name, what in shown
        )
        curl = up.until("curl")
        assert shlex.split(curl)[:2] == ["curl", "-N"]
        assert shlex.split(up.until("chat")) == ["tandem", "chat", "--url", up.url]
        children = psutil.Process(up.process.pid).children()
        assert len(children) == 4
        assert up.end() == 0
        assert up.lines[-1] == "Stopped."
        assert not any(child.is_running() for child in children)


def test_one_that_dies_is_said_and_started_again(tmp_path: Path) -> None:
    with tandem_up(tmp_path, "--prefill", "0", "--decode", "2") as up:
        up.until("Ctrl-C drains")
        [victim, *_] = [c for c in psutil.Process(up.process.pid).children() if "decode-1" in c.cmdline()]
        os.kill(victim.pid, signal.SIGKILL)
        assert "was killed by SIGKILL; starting again" in up.until("decode-1")
        assert up.end(signal.SIGTERM) == 0


def test_a_refused_model_ends_the_command_with_the_reason(tmp_path: Path) -> None:
    with tandem_up(tmp_path, "--model", "bad") as up:
        assert up.wait() == 1
        assert any("refused to start: model bad: no config.json there" in line for line in up.lines), up.lines
        assert up.lines[-1] == "Stopped, because of the error above."


def test_children_end_when_the_command_is_killed_with_9(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux tells children of their parent's death")
    with tandem_up(tmp_path) as up:
        up.until("Ctrl-C drains")
        children = psutil.Process(up.process.pid).children()
        up.process.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert alive == []


def test_verbose_shows_the_logs(tmp_path: Path) -> None:
    with tandem_up(tmp_path, "--verbose") as up:
        up.until("decode-0      │ up")
        assert up.end() == 0


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path, gateway: StubGateway) -> None:
    port = gateway.url.rpartition(":")[2]
    with tandem_up(tmp_path, "--port", port) as up:
        assert up.wait() == 1
        [text] = [" ".join(up.lines)]
        assert f"port {port} on 127.0.0.1 is in use by a Tandem that already runs" in text
        assert f"--port {int(port) + 10}" in text
        assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (UpOptions(num_decode=0), "--decode is 0"),
        (UpOptions(num_prefill=-1), "--prefill is -1"),
        (UpOptions(host="0.0.0.0"), "--insecure-http"),
    ],
)
def test_options_that_cannot_work_are_refused_with_the_remedy(options: UpOptions, words: str) -> None:
    with pytest.raises(CannotStart, match=words):
        check_options(options)


def test_the_curl_line_survives_a_shell() -> None:
    words = shlex.split(curl_line("http://127.0.0.1:8642", "it's a model"))
    assert words[2] == "http://127.0.0.1:8642/client/v4/accounts/default/ai/run/it's a model"
    assert words[-1] == '{"prompt": "What is a KV cache?", "stream": true}'
