"""Tests the output and the end of `tandem run` and `tandem status`."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tandem_client import AI
from tandem_client.cli.app import app
from tandem_client.cli.fleet import parse_fleet
from tandem_client.cli.run import RunOptions, run
from tandem_client.cli.status import fleet_view
from tests.tandem_client.stub_gateway import USAGE, StubGateway

WORKER: dict[str, Any] = {
    "id": "decode-0",
    "role": "decode",
    "state": "ready",
    "suspected": False,
    "address": "127.0.0.1:40001",
    "host_id": "h",
    "incarnation": "a1",
    "model": "@tandem/demo",
    "version": "0.1.0",
    "heartbeat_age_seconds": 0.4,
    "load": {"num_running": 3, "num_waiting": 1, "num_tokens_in_flight": 4321, "counters": {}},
    "kv": {"total_blocks": 1024, "free_blocks": 1000, "cached_blocks": 20, "used_blocks": 4, "bytes_per_block": 4096},
    "kv_service": None,
    "memory": {
        "source": "host: no NVML library",
        "host": {"total_bytes": 24 << 30, "available_bytes": 20 << 30, "process_bytes": 3 << 29},
        "devices": [],
    },
}
GPU = {
    "index": 0,
    "name": "NVIDIA H200",
    "total_bytes": 140 << 30,
    "used_bytes": 70 << 30,
    "foreign_bytes": 2 << 30,
    "utilization_percent": 63,
    "temperature_celsius": 54,
    "power_milliwatts": 412_300,
    "throttle_reasons": ["power cap"],
}
KV_SERVICE = {
    "id": "kv-service",
    "role": "kv",
    "state": "ready",
    "heartbeat_age_seconds": 0.1,
    "kv_service": {"arena_bytes": 1 << 30, "arena_free_bytes": 1 << 29, "num_handles": 7, "orphan_bytes": 5 << 20},
}


def tandem(*arguments: str, input: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=input)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tandem_client.cli", *arguments]


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the command as a shell does, so that Ctrl-C reaches it even if the test runner ignores SIGINT."""
    restore = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    pipe = subprocess.PIPE
    shell = [sys.executable, "-c", restore, *command(*arguments)]
    with subprocess.Popen(shell, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def shown(entries: Sequence[dict[str, Any]], width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(fleet_view(parse_fleet({"data": entries}), "http://h:1"))
    return out.getvalue()


def test_run_streams_the_first_model_by_default(gateway: StubGateway) -> None:
    result = tandem("run", "count", "--url", gateway.url)
    assert (result.exit_code, result.stdout) == (0, "One two three\n")
    [call] = gateway.calls
    assert call.path.endswith("/ai/run/@tandem/demo")
    assert call.body == {"prompt": "count", "stream": True}


def test_run_sends_what_it_was_told_and_nothing_else(gateway: StubGateway) -> None:
    flags = ["--model", "m", "--max-tokens", "5", "--temperature", "0", "--seed", "7", "--system", "Be brief."]
    assert tandem("run", "-", *flags, "--url", gateway.url, input="from a pipe").exit_code == 0
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "from a pipe"}]
    assert gateway.calls[0].body == {
        "messages": messages, "max_tokens": 5, "temperature": 0.0, "seed": 7, "stream": True
    }  # fmt: skip


def test_run_without_stream_and_raw(gateway: StubGateway) -> None:
    result = tandem("run", "hi", "--no-stream", "--raw", "--url", gateway.url)
    assert result.stdout == "You said hi\n"
    assert gateway.calls[0].body == {"prompt": "hi", "raw": True}


def test_run_as_json_is_the_whole_result(gateway: StubGateway) -> None:
    result = tandem("run", "hi", "--json", "--url", gateway.url)
    assert json.loads(result.stdout) == {"response": "You said hi", "usage": USAGE}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [True, False])
def test_a_terminal_is_not_sent_what_it_would_obey(gateway: StubGateway, stream: bool) -> None:
    options = RunOptions("\x1b[2Jgone?", model="echo" if stream else None, stream=stream)
    for out, escape in ((Terminal(), "\N{SYMBOL FOR ESCAPE}"), (io.StringIO(), "\x1b")):
        with AI(gateway.url) as ai:
            run(ai, options, out)
        assert f"{escape}[2Jgone?" in out.getvalue()


def test_raw_has_no_place_for_a_system_message(gateway: StubGateway) -> None:
    result = tandem("run", "hi", "--raw", "--system", "x", "--url", gateway.url)
    assert result.exit_code == 1
    assert "cannot be combined with --system" in result.stderr


@pytest.mark.parametrize(
    ("model", "words"),
    [("missing", "3042: no model missing here"), ("truncated", "without [DONE]"), ("failing", "3040: Capacity")],
)
def test_errors_end_run_with_1_and_a_line(gateway: StubGateway, model: str, words: str) -> None:
    result = tandem("run", "x", "--model", model, "--url", gateway.url)
    assert result.exit_code == 1
    assert words in result.stderr
    assert result.stderr.startswith("tandem: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [("run", "hi"), ("status",), ("status", "--json")])
def test_nobody_there_says_how_to_start_one(arguments: tuple[str, ...]) -> None:
    with socket.socket() as unheard:
        unheard.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unheard.getsockname()[1]}"
        result = tandem(*arguments, "--url", url)
    assert (result.exit_code, result.stderr) == (1, f"tandem: no Tandem at {url}; start one with `tandem up`\n")


def test_no_model_yet_is_said(gateway: StubGateway) -> None:
    gateway.models = []
    assert "serves no model yet" in tandem("run", "hi", "--url", gateway.url).stderr


@pytest.mark.parametrize("leave", ["close the pipe", "ctrl-c"])
def test_tokens_are_printed_as_they_come_and_leaving_cancels(gateway: StubGateway, leave: str) -> None:
    with running("run", "x", "--model", "endless", "--url", gateway.url) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(5) == b"more "
        if leave == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            process.stdout.close()
        assert gateway.client_left.wait(20)
        assert process.stderr.read() == b""
        assert process.wait(20) == (130 if leave == "ctrl-c" else 0)


def test_status_shows_load_blocks_and_memory_of_each() -> None:
    picture = shown([KV_SERVICE, WORKER])
    for words in (
        *("2 of 2 ready", "3 running", "1 waiting", "127.0.0.1:40001", "heartbeat 0.4 s ago", "@tandem/demo"),
        *("4,321", "4 used  20 cached  1,000 free", "1,024 KV blocks", "1.5 GiB own", "20.0 GiB free of 24.0 GiB"),
        *("host: no NVML library", "512 MiB used", "1.0 GiB arena", "7 handles", "5.0 MiB orphaned"),
    ):
        assert words in picture
    assert picture.index("decode-0") < picture.index("kv-service")


def test_status_shows_what_the_auditor_found_once_for_each_kind() -> None:
    kept = {"what": "a handle past its lease", "num_bytes": 3 << 20, "seconds": 21.4}
    held = {"what": "kept for a request that no dispatcher has", "num_bytes": 1 << 20, "seconds": 17.0}
    picture = shown([KV_SERVICE | {"orphans": [kept, kept | {"seconds": 30.2}]}, WORKER | {"orphans": [held]}], 200)
    assert "6.0 MiB orphaned for 30 s: a handle past its lease, 2 of them" in picture
    assert "1.0 MiB orphaned for 17 s: kept for a request that no dispatcher has" in picture
    assert "5.0 MiB orphaned" not in picture  # the total of the service itself is included


def test_status_shows_links_and_marks_one_that_fell_back() -> None:
    quick = {"address": "10.0.0.2:7", "transport": "tcp", "bytes_per_second": 2.5 * 2**30, "latency_ms": 0.31}
    fallen = {"address": "10.0.0.3:7", "transport": "grpc", "note": "fallback: no connection"}
    picture = shown([KV_SERVICE | {"kv_service": {"arena_bytes": 1, "links": [quick, fallen]}}])
    for words in ("from 10.0.0.2:7 tcp, 2.5 GiB/s, 0.3 ms", "from 10.0.0.3:7 grpc", "fallback: no connection"):
        assert words in picture


def test_status_shows_gpus_and_what_is_wrong_with_them() -> None:
    picture = shown([WORKER | {"memory": {"source": "nvml", "devices": [GPU]}}])
    for words in (
        "GPU 0 NVIDIA H200",
        "70.0 GiB used of 140.0 GiB",
        "63 % busy, 54 °C, 412 W",
        "held by others",
        "slowed: power cap",
    ):
        assert words in picture


def test_status_shows_what_nvml_does_not_tell_as_unknown() -> None:
    reason = "which are Tandem's is ambiguous"
    gauges = {"utilization_percent": None, "temperature_celsius": 54, "power_milliwatts": None}
    instance = {**GPU, **gauges, "mig_instance": "3/0", "foreign_bytes": None, "foreign_unknown": reason}
    picture = shown([WORKER | {"memory": {"source": "nvml", "devices": [instance]}}], 200)
    for words in ("GPU 0/3/0 NVIDIA H200", "load unknown, 54 °C, power unknown", f"held by others: unknown ({reason})"):
        assert words in picture
    idle = {**GPU, "utilization_percent": 0, "power_milliwatts": 0, "foreign_bytes": 0, "foreign_unknown": ""}
    picture = shown([WORKER | {"memory": {"source": "nvml", "devices": [idle]}}])
    assert "0 % busy, 54 °C, 0 W" in picture and "held by others" not in picture


def test_status_says_nothing_of_gpus_beside_a_process_that_uses_none() -> None:
    picture = shown([WORKER | {"memory": {**WORKER["memory"], "source": "host: this process uses no device"}}])
    assert "20.0 GiB free of 24.0 GiB" in picture and "device" not in picture


def test_status_shows_who_loads_who_failed_and_who_is_not_heard() -> None:
    loading = WORKER | {
        "state": "loading",
        "kv": None,
        "load": {"load_stage": "reading_weights", "load_progress": 0.43},
    }
    failed = WORKER | {"id": "decode-1", "state": "failed", "load": {"error": "CUDA is out of memory"}}
    silent = WORKER | {"id": "decode-2", "suspected": True}
    picture = shown([loading, failed, silent])
    for words in ("0 of 3 ready", "reading weights 43%", "CUDA is out of memory", "ready?"):
        assert words in picture


def test_status_shows_a_worker_that_says_ready_and_that_requests_find_sick() -> None:
    sick = WORKER | {"id": "decode-1", "health": "ejected", "health_reason": "it answered InternalError"}
    picture = shown([WORKER | {"health": "ok", "health_reason": ""}, sick])
    for words in ("1 of 2 ready", "decode-1 ejected", "it answered InternalError"):
        assert words in picture


def test_status_fits_a_terminal_of_80_columns() -> None:
    narrow, wide = (
        shown([WORKER, KV_SERVICE, WORKER | {"id": "prefill-0", "role": "prefill"}], width) for width in (80, 160)
    )
    assert narrow.count("\n") == wide.count("\n"), "no cell is folded"


def test_status_as_json_is_what_the_control_plane_said(gateway: StubGateway) -> None:
    gateway.workers = {"object": "list", "data": [WORKER]}
    assert json.loads(tandem("status", "--json", "--url", gateway.url).stdout) == gateway.workers


def test_status_of_an_empty_fleet(gateway: StubGateway) -> None:
    assert "no worker has registered yet" in tandem("status", "--url", gateway.url).stdout


def test_watch_ends_with_ctrl_c(gateway: StubGateway) -> None:
    with running("status", "--watch", "--url", gateway.url) as process:
        assert process.stdout is not None
        assert b"Tandem" in process.stdout.readline() + process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_version_and_help() -> None:
    assert tandem("--version").stdout.startswith("tandem ")
    result = subprocess.run(command("--help"), capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert all(name in result.stdout for name in ("up", "run", "status", "--version"))
