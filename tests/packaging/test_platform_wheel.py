"""A platform wheel is the pure one and the compiled kernels of a machine, under a tag that is true."""

from __future__ import annotations

import csv
import hashlib
import io
import os
import platform
import re
import subprocess
import sys
from base64 import urlsafe_b64encode
from pathlib import Path
from zipfile import ZipFile

import pytest

from infra.wheels import __main__ as command
from infra.wheels.libraries import (
    MACHINES,
    CannotBuild,
    compiler_for,
    glibc_of,
    libraries_for,
    platform_tag,
    routing_for,
)
from infra.wheels.platform_wheel import IN_WHEEL, build_platform_wheel, routing_in_wheel
from tandem_engine.ops.cpu.prebuilt import file_name, levels_of
from tests.tandem_engine.ops.wheel_kernels import lacking, own_levels

_LOADED = """
import pathlib, sys
sys.path = [sys.argv[1], *(entry for entry in sys.path if not (pathlib.Path(entry) / "pyproject.toml").exists())]
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in f"{finder!r}"]
from tandem_engine.ops.cpu import load_cpu_ops
ops = load_cpu_ops()
print(ops.origin, ops.library._name, sep="|")
from control_plane.compiled_routing import load_routing
assert load_routing() is not None
"""


@pytest.fixture(scope="module", params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    """Return a machine whose wheel can be built here; its libraries are compiled once into build/kernels."""
    name: str = request.param
    try:
        compiler_for(name)
    except CannotBuild as error:
        lacking(str(error))
    return name


@pytest.fixture(scope="module")
def made(machine: str, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_platform_wheel(wheel, machine, tmp_path_factory.mktemp("platform"))


def test_it_holds_the_pure_wheel_and_the_library_of_every_level(made: Path, machine: str, wheel: Path) -> None:
    with ZipFile(wheel) as pure, ZipFile(made) as archive:
        names = set(archive.namelist())
        libraries = {f"{IN_WHEEL}/{file_name(level)}" for level in levels_of(machine)}
        libraries.add(f"{routing_in_wheel(machine)}")
        assert names - set(pure.namelist()) == libraries
        assert set(pure.namelist()) <= names
        described = ("/RECORD", "/WHEEL")
        same = [name for name in pure.namelist() if not name.endswith(described)]
        assert [name for name in same if archive.read(name) != pure.read(name)] == []


def test_the_record_has_the_digest_of_every_file(made: Path) -> None:
    with ZipFile(made) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert rows.pop(record) == ("", "")
        assert set(rows) == set(archive.namelist()) - {record}
        for name, (digest, size) in rows.items():
            content = archive.read(name)
            found = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert (digest, size) == (f"sha256={found}", str(len(content))), name


def test_its_tag_is_the_oldest_glibc_with_all_symbols_that_the_libraries_need(made: Path, machine: str) -> None:
    libraries = [*libraries_for(machine).values(), routing_for(machine)]
    needed = [_glibc_of_symbols(library) for library in libraries]
    assert [glibc_of(library) for library in libraries] == needed
    major, minor = max(needed)
    tag = f"py3-none-manylinux_{major}_{minor}_{machine}"
    assert made.name.endswith(f"-{tag}.whl")
    with ZipFile(made) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/WHEEL"))
        described = archive.read(name).decode().splitlines()
    assert f"Tag: {tag}" in described and "Root-Is-Purelib: false" in described


def test_its_libraries_show_our_functions_alone(machine: str) -> None:
    """A symbol of the static libstdc++ would take the place of torch's."""
    for library in (*libraries_for(machine).values(), routing_for(machine)):
        shown = [row[7] for row in _symbols(library) if row[6] != "UND" and row[4] != "LOCAL"]
        assert shown and [name for name in shown if not name.startswith("tandem_")] == []


def test_a_library_that_needs_another_one_gets_no_tag(tmp_path: Path) -> None:
    try:
        compiler = compiler_for(platform.machine())
    except CannotBuild as error:
        lacking(str(error))
    source, library = tmp_path / "other.cpp", tmp_path / "other.so"
    source.write_text(
        '#include <string>\nextern "C" char* made(const char* of) { return new char[std::string(of).size()]; }'
    )
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(CannotBuild, match=r"other\.so needs libstdc\+\+\.so\.6, which a machine may lack"):
        platform_tag(platform.machine(), [library])


def test_the_installed_wheel_loads_its_own_kernels_without_a_compiler(made: Path, machine: str, tmp_path: Path) -> None:
    if machine != platform.machine():
        pytest.skip(f"this machine is no {machine}")
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(made)], check=True, capture_output=True)
    environment = {name: value for name, value in os.environ.items() if name not in ("CXX", "PYTHONPATH")}
    asked = subprocess.run(
        [sys.executable, "-c", _LOADED, str(site)],
        cwd=tmp_path,
        env={**environment, "PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert asked.returncode == 0, asked.stderr
    best = own_levels()[0]
    chosen, _, routing = asked.stdout.strip().partition("\n")
    assert chosen == f"prebuilt for {best.name}|{site / IN_WHEEL / file_name(best)}"
    assert "routing_compiled" in routing and f"{site / routing_in_wheel(machine)}" in routing


def test_a_machine_without_a_compiler_is_told_the_package_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (other,) = set(MACHINES) - {platform.machine()}
    monkeypatch.setattr(command, "build_wheel", lambda _: tmp_path / "pure.whl")
    monkeypatch.setenv("PATH", str(tmp_path))
    for machine, package in ((platform.machine(), "g++"), (other, f"g++-{other.replace('_', '-')}-linux-gnu")):
        assert command.main(["--platform", machine, "--out", str(tmp_path / "dist")]) == 1
        said = capsys.readouterr().err
        assert f"no wheel for {machine}: no compiler for {machine}" in said
        assert f"`apt-get install {package}` brings it, or build the pure wheel with --platform any" in said


def _glibc_of_symbols(library: Path) -> tuple[int, int]:
    """Return the newest version of a single symbol, as another table of the file names them."""
    names = [row[7] for row in _symbols(library) if row[6] == "UND" and len(row) > 7]
    return max((int(a), int(b)) for name in names for a, b in re.findall(r"@GLIBC_(\d+)\.(\d+)", name))


def _symbols(library: Path) -> list[list[str]]:
    """Return the rows of `readelf --dyn-syms` that have a name."""
    listing = ["readelf", "--wide", "--dyn-syms", str(library)]
    output = subprocess.run(listing, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in output.splitlines()]
    return [row for row in rows if len(row) > 7 and row[0].rstrip(":").isdigit()]
