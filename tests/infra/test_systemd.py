"""The units are what systemd takes, and what the services take; a process may do little."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from infra.systemd.units import FOLDER, UNITS, Unit, read, variables_of
from tests.infra.commands import SERVICES, check_program, load

_MOST_EXPOSED = 20
"""Tenths: an exposure of 2.0 of 10."""
_ENCODER = {"TANDEM_ENCODE_MODEL": "/models/encoder"}


@pytest.fixture
def analyze() -> str:
    """Return systemd-analyze. Skips, with the reason, where there is none."""
    program = shutil.which("systemd-analyze")
    if program is None:
        reason = "there is no systemd-analyze; run `make services`"
        if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    return program


def _installed(folder: Path) -> Path:
    """Make a root with the units and what they run, and with systemd's own units."""
    subprocess.run([str(FOLDER / "install.sh")], env={**os.environ, "DESTDIR": str(folder)}, check=True)
    python = folder / "opt" / "tandem" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    [units] = [each for each in (Path("/usr/lib/systemd/system"), Path("/lib/systemd/system")) if each.exists()][:1]
    shutil.copytree(units, folder / "usr" / "lib" / "systemd" / "system", symlinks=True)
    if not (folder / "lib").exists():
        (folder / "lib").symlink_to("usr/lib")
    return folder


def _variables(module: str) -> dict[str, str]:
    """Return the variables of the module's unit, and of an encoder's."""
    [unit] = [unit for unit in map(read, UNITS) if unit.command[2] == module]
    return {**unit.variables, **_ENCODER}


def _names() -> list[str]:
    return ["tandem.target", *(path.name.replace("@.", "@1.") for path in UNITS)]


@pytest.mark.services
def test_systemd_takes_every_unit(analyze: str, tmp_path: Path) -> None:
    root = _installed(tmp_path)
    done = subprocess.run([analyze, "verify", f"--root={root}", *_names()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.services
def test_systemd_finds_a_key_that_is_none(analyze: str, tmp_path: Path) -> None:
    root = _installed(tmp_path)
    unit = root / "etc/systemd/system/tandem-kv.service"
    unit.write_text(unit.read_text().replace("ProtectSystem=", "ProtectSystems="))
    done = subprocess.run([analyze, "verify", f"--root={root}", unit.name], capture_output=True, text=True, check=False)
    assert "ProtectSystems" in done.stderr


@pytest.mark.services
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_process_may_do_little(analyze: str, path: Path, tmp_path: Path) -> None:
    command = [analyze, "security", "--offline=true", f"--threshold={_MOST_EXPOSED}"]
    good = subprocess.run([*command, str(path)], capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout + good.stderr
    weaker = tmp_path / path.name
    weaker.write_text(
        re.sub(r"^(SystemCallFilter|CapabilityBoundingSet)=.*\n", "", path.read_text(), flags=re.MULTILINE)
    )
    assert subprocess.run([*command, str(weaker)], capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_the_services_take_every_flag_and_variable(path: Path) -> None:
    unit = read(path)
    assert unit.command[:2] == ["/opt/tandem/bin/python", "-m"]
    variables = {**unit.variables, **(_ENCODER if "encode" in unit.name else {})}
    assert check_program(unit.command, variables) == []


def test_every_setting_of_the_example_exists_also_those_in_comments(tmp_path: Path) -> None:
    """The services refuse a key that they do not know."""
    text = (FOLDER / "tandem.toml").read_text()
    active = tmp_path / "tandem.toml"
    active.write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert tomllib.loads(active.read_text()).keys() == {"control", "kv", "prefill", "decode", "model", "log_json"}
    for file in (active, FOLDER / "tandem.toml"):
        for module in SERVICES:
            settings = load(module, ["--config", str(file)], _variables(module))
            assert settings.log_json is True
    active.write_text(active.read_text().replace("drain_seconds", "drain_second"))
    with pytest.raises(ValueError, match="drain_second"):
        load("control_plane", ["--config", str(active)], {})


@pytest.mark.parametrize(("file", "num_variables"), [("secrets.env", 6), ("worker.env.example", 3)])
def test_every_variable_of_the_examples_exists_also_those_in_comments(file: str, num_variables: int) -> None:
    text = re.sub(r"^# (TANDEM_\w+=)", r"\1", (FOLDER / file).read_text(), flags=re.MULTILINE)
    found = variables_of(text)
    assert len(found) == num_variables
    for name in found:
        problems = [str(check_program(["python", "-m", each], {name: "1", **_ENCODER})) for each in SERVICES]
        assert any("no setting has the variable" not in each for each in problems), f"{name} of {file}"


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_gives_its_process_the_time_to_drain(path: Path) -> None:
    unit = read(path)
    variables = _ENCODER if "encode" in unit.name else {}
    settings = load(unit.command[2], unit.command[3:], variables)
    assert getattr(settings, "longest_drain_seconds", settings.drain_seconds) < unit.stop_seconds
    assert (unit.one("Restart"), unit.one("KillMode")) == ("always", "mixed")
    assert unit.one("RestartPreventExitStatus").split() == ["2", "78"]


def test_services_share_a_users_folders_and_the_target() -> None:
    for unit in map(read, UNITS):
        assert (unit.one("User"), unit.one("StateDirectory"), unit.one("RuntimeDirectory")) == ("tandem",) * 3
        assert unit.one("RuntimeDirectoryPreserve") == "yes", "else a service that ends takes the others' sockets along"
        assert unit.variables["TANDEM_STATE_DIR"] == "/var/lib/" + unit.one("StateDirectory")
        assert unit.variables["TANDEM_RUNTIME_DIR"] == "/run/" + unit.one("RuntimeDirectory")
        assert unit.all("PartOf", "Unit") == unit.all("WantedBy", "Install") == ["tandem.target"]


def test_gateways_stop_before_workers_and_workers_before_the_kv_service() -> None:
    """systemd stops in the reverse order of the start."""
    units = {path.stem: read(path) for path in UNITS}
    for name in ("tandem-prefill@", "tandem-decode@"):
        assert units[name].all("After", "Unit")[-1] == "tandem-kv.service"
    for name in units.keys() - {"tandem-gateway"}:
        assert units[name].all("Before", "Unit") == ["tandem-gateway.service"]


def test_a_line_that_is_none_is_refused(tmp_path: Path) -> None:
    unit = tmp_path / "x.service"
    unit.write_text("[Service]\nExecStart\n")
    with pytest.raises(ValueError, match="line 2"):
        read(unit)
    assert isinstance(read(FOLDER / "tandem-kv.service"), Unit)
