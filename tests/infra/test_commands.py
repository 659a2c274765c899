"""The checker of commands finds what a service would refuse, and passes what it would take."""

from __future__ import annotations

import sys

import pytest

from tests.infra.commands import check_command, check_http_probe, check_probe, check_program

_PROBE = ["python", "-m", "tandem_runtime.health_check"]


@pytest.mark.parametrize(
    ("module", "args", "env"),
    [
        ("control_plane", ["--listen=0.0.0.0:8642", "--insecure-http"], {"TANDEM_STATE_DIR": "/var/lib/tandem"}),
        ("control_plane", ["account", "create", "ops"], {"TANDEM_CONTROL_DATABASE_URL": "postgresql://a@b/c"}),
        ("control_plane", ["fleet", "token", "--role", "kv", "--uses", "9"], {"TANDEM_SECRET": "00"}),
        ("kv_transfer_svc", ["--advertise=$(POD_IP):8650"], {"TANDEM_RUNTIME_DIR": "/run/tandem"}),
        ("prefill_svc", ["--control", "a:1,b:2"], {"TANDEM_MODEL": "/models/m", "TANDEM_PREFILL_JOIN": "tdj1"}),
        ("decode_svc", [], {"TANDEM_DECODE_CPUS": "0,1", "TANDEM_CONFIG": "/etc/tandem/tandem.toml", "HOME": "/"}),
        ("encode_svc", ["--model", "e"], {"TANDEM_LOG_JSON": "true", "TANDEM_BLOCK_SIZE": "16"}),
        ("tandem_client.cli", ["up", "--host", "0.0.0.0", "--insecure-http"], {"TANDEM_KV_STORE_BYTES": "0"}),
        ("tandem_client.cli", ["run", "--url", "http://127.0.0.1:8642", "Hi"], {"TANDEM_TOKEN": "t"}),
    ],
)
def test_a_command_that_would_start_has_no_problem(module: str, args: list[str], env: dict[str, str]) -> None:
    assert check_command(module, args, env) == []


@pytest.mark.parametrize(
    ("module", "args", "env", "problem"),
    [
        ("kv_service", [], {}, "there is no module kv_service"),
        ("decode_svc", ["--drain-second=9"], {}, "unrecognized arguments: --drain-second=9"),
        ("decode_svc", ["stray"], {}, "unrecognized arguments: stray"),
        ("decode_svc", ["--listen"], {}, "argument --listen: expected one argument"),
        ("decode_svc", ["--drain-seconds=soon"], {}, "--drain-seconds is 'soon', which does not fit: give a number"),
        ("decode_svc", ["--kernels=rust"], {}, "choose one of auto, cpp, torch"),
        ("decode_svc", ["--listen=0.0.0.0"], {}, "--listen: "),
        ("prefill_svc", ["--control=gateway"], {}, "--control: "),
        ("control_plane", ["--certificate-seconds=1"], {}, "certificate_seconds is 1"),
        ("control_plane", ["account", "creat", "ops"], {}, "invalid choice: 'creat'"),
        ("control_plane", ["fleet", "token", "--roll", "kv"], {}, "required: --role"),
        ("encode_svc", [], {}, "--model is missing"),
        ("kv_transfer_svc", [], {"TANDEM_KV_STORE_BYTES": "12"}, "--store-bytes 12 is too small"),
        ("kv_transfer_svc", [], {"TANDEM_KV_STOR_BYTES": "0"}, "is TANDEM_KV_STORE_BYTES meant?"),
        ("prefill_svc", [], {"TANDEM_DECODE_JOIN": "t"}, "is of decode_svc; prefill_svc does not read it"),
        ("prefill_svc", [], {"TANDEM_STATEDIR": "/x"}, "is TANDEM_STATE_DIR meant?"),
        ("tandem_client.cli", ["up", "--hosts", "x"], {}, "--hosts"),
        ("tandem_client.cli", ["start"], {}, "there is no command tandem start"),
        ("tandem_client.cli", ["up"], {"TANDEM_KV_STORE_BYTES": "many"}, "TANDEM_KV_STORE_BYTES is 'many'"),
        ("tandem_client.cli", ["up"], {"TANDEM_TOKENS": "t"}, "is TANDEM_TOKEN meant?"),
    ],
)
def test_what_a_service_would_refuse_is_found(module: str, args: list[str], env: dict[str, str], problem: str) -> None:
    problems = check_command(module, args, env)
    assert len(problems) == 1
    assert problem in problems[0]


def test_variables_of_this_process_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_KV_STORE_BYTES", "12")
    monkeypatch.setenv("TANDEM_CONFIG", "/missing.toml")
    assert check_command("kv_transfer_svc", [], {}) == []


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["/opt/tandem/bin/python", "-m", "kv_transfer_svc", "--oops"], "unrecognized arguments: --oops"),
        ([sys.executable, "-m", "kv_transfer_svc"], ""),
        (["/opt/tandem/bin/tandem", "up"], ""),
        (["sh", "-c", 'until [ -n "$(python -m control_plane account lst 2>/dev/null)" ]; do sleep 5; done'], "'lst'"),
        (["sh", "-c", 'until [ -n "$(python -m control_plane account list 2>/dev/null)" ]; do sleep 5; done'], ""),
        (["sh", "-c", "sleep 1"], "no command of ours"),
        (["nginx"], "nginx is no command of ours"),
        ([], "the command is empty"),
    ],
)
def test_a_whole_command_is_taken_apart(command: list[str], problem: str) -> None:
    assert [problem in each for each in check_program(command, {})] == ([True] if problem else [])


def test_a_probe_must_end_before_its_caller_ends_it() -> None:
    assert check_probe([*_PROBE, "127.0.0.1:8651", "--alive"], 10) == []
    assert "is ended after 5 s" in check_probe([*_PROBE, "127.0.0.1:8651"], 5)[0]
    assert check_probe([*_PROBE, "127.0.0.1:8651", "--seconds", "3"], 5) == []
    assert "unrecognized arguments: --alife" in check_probe([*_PROBE, "127.0.0.1:8651", "--alife"])[0]
    assert "the probe's address" in check_probe([*_PROBE, "8651"])[0]
    assert "is no probe" in check_probe(["true"])[0]


def test_an_http_probe_asks_for_a_path_and_a_port_of_the_gateway() -> None:
    assert check_http_probe("/healthz", 8642) == []
    assert "the gateway has no /health-z" in check_http_probe("/health-z", 8642)[0]
    assert check_http_probe("/readyz", 8642, "$(POD_IP):9000") == [
        "the probe asks port 8642, the gateway listens on 9000"
    ]
