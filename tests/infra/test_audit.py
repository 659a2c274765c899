"""The audit is clean only if every locked package was compared; an SBOM exists after every run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from infra import audit
from infra.audit import LOCKED_SET, locked_packages, main, normalized


def _fake(folder: Path, name: str, body: str) -> None:
    tool = folder / name
    tool.write_text(f"#!{sys.executable}\nimport json, sys\n{body}\n")
    tool.chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands first on PATH; the virtual environment's tools follow."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), str(Path(sys.executable).parent)]))
    return folder


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A locked set of two packages, which keeps the SBOM's tool quick."""
    path = tmp_path / "constraints.txt"
    path.write_text("Jinja2==3.1.6\nmypy_extensions==1.2.0\n")
    return path


_REPORT = """
assert "--strict" in sys.argv and "--disable-pip" in sys.argv, sys.argv
report = sys.argv[sys.argv.index("--output") + 1]
packages = [dict(name="jinja2", version="3.1.6", vulns=[]), dict(name="mypy-extensions", version="1.2.0", vulns=[])]
%s
json.dump(dict(dependencies=packages, fixes=[]), open(report, "w"))
sys.exit(%d)
"""


@pytest.mark.parametrize(
    ("change", "pip_audit_exit_code", "exit_code", "last_line"),
    [
        ("", 0, 0, "clean: 2 packages, no known vulnerability"),
        (
            'packages[0]["vulns"] = [dict(id="PYSEC-2099-1", fix_versions=[], aliases=[], description="")]',
            1,
            1,
            "vulnerable: jinja2 3.1.6 (PYSEC-2099-1)",
        ),
        ("del packages[1]", 0, 2, "not audited: 1 of 2 packages, mypy-extensions among them"),
        (
            'packages[1] = dict(name="mypy-extensions", skip_reason="not found")',
            0,
            2,
            "not audited: 1 of 2 packages, mypy-extensions among them",
        ),
        (
            "",
            1,
            2,
            "not audited: pip-audit ended with exit code 1 after a report without findings",
        ),
        (
            'print("could not reach the feed", file=sys.stderr); sys.exit(1)',
            1,
            2,
            "not audited: pip-audit ended with exit code 1 and no report: could not reach the feed",
        ),
    ],
    ids=["clean", "vulnerable", "incomplete", "skipped", "exit code", "no database"],
)
def test_the_three_results_have_their_exit_codes_and_one_line(
    tools: Path,
    locked: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: str,
    pip_audit_exit_code: int,
    exit_code: int,
    last_line: str,
) -> None:
    _fake(tools, "pip-audit", _REPORT % (change, pip_audit_exit_code))
    _fake(tools, "cyclonedx-py", 'open(sys.argv[sys.argv.index("--output-file") + 1], "w").write("{}")')
    sbom = tmp_path / "build" / "sbom.json"
    assert main(["--locked-set", str(locked), "--sbom", str(sbom)]) == exit_code
    assert capsys.readouterr().out.splitlines()[-1] == last_line
    assert sbom.exists()


def test_a_missing_tool_is_not_audited_and_a_missing_sbom_is_its_own_result(
    tmp_path: Path, locked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--locked-set", str(locked), "--sbom", str(tmp_path / "sbom.json")]) == 3
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("no sbom: cyclonedx-py is not installed")
    assert "not audited: pip-audit is not installed" in line


def test_an_audit_that_never_ends_is_not_audited(tools: Path, locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake(tools, "pip-audit", "import select\nselect.select([], [], [])")
    monkeypatch.setattr(audit, "_AUDIT_SECONDS", 0.2)
    assert audit.audit(locked).line == "not audited: pip-audit did not end within 0.2 s"


def test_the_sbom_is_valid_and_has_every_locked_package_with_its_version(tools: Path, tmp_path: Path) -> None:
    """`write_sbom` returns nothing only if the library's own validator of CycloneDX's schema found nothing."""
    sbom = tmp_path / "sbom.json"
    assert audit.write_sbom(LOCKED_SET, sbom) is None
    document = json.loads(sbom.read_text())
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    components = document["components"]
    assert {normalized(each["name"]): each["version"] for each in components} == locked_packages(LOCKED_SET)
    assert all(each["purl"].startswith("pkg:pypi/") for each in components)


def test_an_sbom_that_is_not_valid_is_no_sbom(tools: Path, locked: Path, tmp_path: Path) -> None:
    _fake(tools, "cyclonedx-py", 'assert "--validate" in sys.argv\nsys.exit("CRITICAL: the document is not valid")')
    failure = audit.write_sbom(locked, tmp_path / "sbom.json")
    assert failure == "cyclonedx-py ended with exit code 1: CRITICAL: the document is not valid"


def test_a_line_that_pins_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("Jinja2==3.1.6\nrich>=15\n")
    with pytest.raises(ValueError, match=r"line 2: 'rich>=15' is not NAME==VERSION"):
        locked_packages(tmp_path / "constraints.txt")
