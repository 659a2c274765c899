"""The wheel: its contents are the tree's, and every module of it can be imported without the clone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from infra.wheels.pure import shipped_files

# Alembic runs these two itself, with a context of its own.
_WITH_VLLM = ["arguments", "assembly", "connector", "engine", "exchange", "model", "ranks", "sampling", "vllm_blocks"]
_RUN_BY_OTHERS = (
    "control_plane.storage.migrations.",  # Alembic
    *(f"tandem_vllm.{name}" for name in _WITH_VLLM),  # they import vLLM
)
_IMPORT_ALL = """
import importlib, json, pathlib, sys
site, names = sys.argv[1], json.load(sys.stdin)
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in f"{finder!r}"]
sys.path = [site, *(entry for entry in sys.path if (pathlib.Path(entry) / "pyproject.toml").exists() is False)]
sys.argv = ["-", "--help"]  # a `__main__` that runs at once shows its help and ends
elsewhere = {}
for name in names:
    try:
        found = importlib.import_module(name).__file__
    except SystemExit:
        found = sys.modules.get(name.removesuffix(".__main__")).__file__
    if not found.startswith(site):
        elsewhere[name] = found
print()
print(json.dumps(elsewhere))
"""


def test_the_wheel_holds_the_files_of_its_packages_and_no_others(wheel: Path) -> None:
    expected = shipped_files()
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert sorted(names) == sorted(expected)
        assert [name for name in sorted(names) if archive.read(name) != expected[name].read_bytes()] == []


def test_the_wheel_brings_the_command_and_the_licence(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        metadata = {name.split(".dist-info/")[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "tandem = tandem_client.cli:main" in archive.read(metadata["entry_points.txt"]).decode()
        assert "licenses/LICENSE" in metadata


def test_every_module_of_the_installed_wheel_is_imported_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    modules = [name for path in shipped_files() if path.endswith(".py") and (name := _module(path))]

    imported = subprocess.run(
        [sys.executable, "-I", "-c", _IMPORT_ALL, str(site)],
        cwd=tmp_path,
        input=json.dumps(modules),
        capture_output=True,
        text=True,
    )

    assert imported.returncode == 0, imported.stderr
    assert json.loads(imported.stdout.splitlines()[-1]) == {}, "modules that came from elsewhere"


def _module(path: str) -> str | None:
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return None if name.startswith(_RUN_BY_OTHERS) else name
