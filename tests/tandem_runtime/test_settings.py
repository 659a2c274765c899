"""Each setting comes from the right source, and a wrong value is explained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from tandem_runtime.settings import describe, load_settings, setting


@dataclass(frozen=True)
class Example:
    """An example of a service."""

    listen: str = setting("127.0.0.1:0", "Address to listen on")
    control: tuple[str, ...] = setting((), "Control-plane addresses", shared=True)
    max_num_running: int = setting(64, "Requests in one batch, at most")
    kv_fraction: float = setting(0.2, "Share of free memory for KV, 0..1")
    insecure: bool = setting(False, "Allow listening beyond loopback")
    verify_kv: bool = setting(True, "Check each block's checksum")
    dtype: Literal["auto", "float32"] = setting("auto", "Type of weights")
    host_id: str | None = setting(None, "Host this process counts to", shared=True)
    num_threads: int | None = setting(None, "Threads of the engine")
    model: Path = setting(Path("demo"), "Folder of the checkpoint; 100 % local")
    ports: tuple[int, ...] = setting((1, 2), "Ports")
    names: list[str] = setting(["a"], "Names")
    token: str = setting("", "Token of the control plane", shared=True, secret=True)

    def __post_init__(self) -> None:
        if not 0 <= self.kv_fraction <= 1:
            raise ValueError(f"--kv-fraction is {self.kv_fraction}, it goes from 0 to 1; give 0.2 for a fifth")


@pytest.fixture(autouse=True)
def empty_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TANDEM_CONFIG", "TANDEM_CONTROL", "TANDEM_HOST_ID", "TANDEM_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def load(*argv: str) -> Example:
    return load_settings(Example, "decode", argv)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as ended:
        load(*argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_without_anything_the_defaults_hold() -> None:
    assert load() == Example()


def test_flag_beats_own_variable_beats_shared_variable_beats_table_beats_top_level_beats_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = Path("tandem.toml")
    file.write_text('host_id = "top"\n')
    assert load().host_id == "top"
    file.write_text('host_id = "top"\n[decode]\nhost_id = "table"\n[prefill]\nhost_id = "another service"\n')
    assert load().host_id == "table"
    monkeypatch.setenv("TANDEM_HOST_ID", "shared")
    assert load().host_id == "shared"
    monkeypatch.setenv("TANDEM_DECODE_HOST_ID", "own")
    assert load().host_id == "own"
    assert load("--host-id", "flag").host_id == "flag"


def test_the_gateways_table_is_no_address_of_the_control_plane() -> None:
    Path("tandem.toml").write_text("[control]\nlisten = '127.0.0.1:1'\n[decode]\nmax_num_running = 3\n")
    assert load() == Example(max_num_running=3)
    Path("tandem.toml").write_text("control = ['a:1']\n")
    assert load().control == ("a:1",)


def test_a_field_that_is_not_shared_takes_no_shared_source(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tandem.toml").write_text("max_num_running = 7\n")
    monkeypatch.setenv("TANDEM_MAX_NUM_RUNNING", "8")
    assert load().max_num_running == 64
    monkeypatch.setenv("TANDEM_DECODE_MAX_NUM_RUNNING", "9")
    assert load().max_num_running == 9


def test_every_type_reads_from_flags() -> None:
    argv = "--control a:1,b:2 --max-num-running 1_000 --kv-fraction 1 --insecure --no-verify-kv --dtype float32"
    settings = load(*argv.split(), "--num-threads", "4", "--model", "~/m", "--ports", "3, 4", "--names", "x,y")
    assert settings.control == ("a:1", "b:2")
    assert (settings.max_num_running, settings.kv_fraction) == (1000, 1.0)
    assert (settings.insecure, settings.verify_kv, settings.dtype) == (True, False, "float32")
    assert (settings.num_threads, settings.model) == (4, Path.home() / "m")
    assert (settings.ports, settings.names) == ((3, 4), ["x", "y"])


def test_every_type_reads_from_the_file() -> None:
    Path("elsewhere.toml").write_text(
        '[decode]\ncontrol = ["a:1"]\nkv_fraction = 1\ninsecure = true\nnum_threads = 2\nmodel = "m"\nports = [5]\n'
        'names = []\ndtype = "float32"\n'
    )
    settings = load("--config", "elsewhere.toml")
    assert (settings.control, settings.kv_fraction, settings.insecure) == (("a:1",), 1.0, True)
    assert (settings.num_threads, settings.model, settings.ports) == (2, Path("m"), (5,))
    assert (settings.names, settings.dtype) == ([], "float32")


def test_booleans_and_nothing_read_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_DECODE_INSECURE", "Yes")
    monkeypatch.setenv("TANDEM_DECODE_VERIFY_KV", "0")
    monkeypatch.setenv("TANDEM_DECODE_NUM_THREADS", "")
    monkeypatch.setenv("TANDEM_CONTROL", "")
    settings = load()
    assert (settings.insecure, settings.verify_kv, settings.num_threads, settings.control) == (True, False, None, ())


def test_a_bad_value_is_named_with_its_source_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--max-num-running is 'many', which does not fit: give a whole number" in refusal(
        capsys, "--max-num-running", "many"
    )
    assert "--dtype is 'int3', which does not fit: choose one of auto, float32" in refusal(capsys, "--dtype", "int3")
    monkeypatch.setenv("TANDEM_DECODE_INSECURE", "maybe")
    assert "TANDEM_DECODE_INSECURE is 'maybe', which does not fit: give true or false" in refusal(capsys)
    monkeypatch.delenv("TANDEM_DECODE_INSECURE")
    Path("tandem.toml").write_text('[decode]\nkv_fraction = "much"\n')
    assert "kv_fraction in [decode] of tandem.toml is 'much', which does not fit: give a number" in refusal(capsys)


def test_what_the_dataclass_itself_refuses_ends_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--kv-fraction is 2.0, it goes from 0 to 1" in refusal(capsys, "--kv-fraction", "2")


def test_unknown_names_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--max-num" in refusal(capsys, "--max-num", "3")  # no abbreviations: they break when a flag is added
    Path("tandem.toml").write_text('[decode]\nlisten_on = "x"\n[prefill]\nlisten_on = "not ours"\n')
    assert "[decode] of tandem.toml has listen_on, which no setting is called" in refusal(capsys)


def test_a_settings_file_that_was_named_must_be_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot read the settings file nowhere.toml" in refusal(capsys, "--config", "nowhere.toml")
    monkeypatch.setenv("TANDEM_CONFIG", "gone.toml")
    assert "cannot read the settings file gone.toml" in refusal(capsys)
    Path("gone.toml").write_text("[decode\n")
    assert "cannot read the settings file gone.toml" in refusal(capsys)


def test_help_says_for_each_field_what_it_is_its_default_and_its_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "An example of a service." in text
    assert "Host this process counts to [default: none; $TANDEM_DECODE_HOST_ID, $TANDEM_HOST_ID]" in text
    assert "--insecure, --no-insecure Allow listening beyond loopback [default: false; $TANDEM_DECODE_INSECURE]" in text
    assert "--ports N,... Ports [default: 1,2; $TANDEM_DECODE_PORTS]" in text
    assert "100 % local" in text


def test_secrets_are_never_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TANDEM_TOKEN", "hunter2")
    settings = load()
    assert settings.token == "hunter2"
    assert "hunter2" not in repr(settings)
    assert describe(settings)["token"] == "(set)"
    assert describe(Example())["token"] == "(not set)"
    assert describe(settings)["ports"] == "1,2"
    Path("tandem.toml").write_text("token = 7\n")
    monkeypatch.delenv("TANDEM_TOKEN")
    assert "token of tandem.toml is a value, which does not fit" in refusal(capsys)
