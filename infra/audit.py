"""Audits the locked packages for known vulnerabilities, and writes their bill of materials (SBOM).

python -m infra.audit [--sbom FILE]      exit code 0 clean, 1 vulnerable, 2 not audited, 3 no SBOM

`constraints.txt` is the locked set. cyclonedx-py writes the SBOM in CycloneDX's JSON form, first and always: it needs
no network. pip-audit compares the set with an advisory database, which does. A run that could not ask the database, or
not about every package, is "not audited": never clean. The last line of the output is the result.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOCKED_SET = ROOT / "constraints.txt"
SBOM = ROOT / "build" / "sbom.cdx.json"
_SPEC_VERSION = "1.6"
_AUDIT_SECONDS = 600.0
_SBOM_SECONDS = 120.0
_SHOWN_CHARACTERS = 300


class Result(IntEnum):
    """The exit codes."""

    CLEAN = 0
    VULNERABLE = 1
    NOT_AUDITED = 2
    NO_SBOM = 3


@dataclass(frozen=True)
class Verdict:
    result: Result
    reason: str

    @property
    def line(self) -> str:
        return f"{self.result.name.lower().replace('_', ' ')}: {self.reason}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the SBOM, audit, print the result; return the exit code."""
    options_of = argparse.ArgumentParser(prog="python -m infra.audit", description=(__doc__ or "").splitlines()[0])
    options_of.add_argument("--sbom", type=Path, default=SBOM, metavar="FILE", help="where the SBOM is written")
    options_of.add_argument("--locked-set", type=Path, default=LOCKED_SET, metavar="FILE", help="NAME==VERSION lines")
    options = options_of.parse_args(arguments)
    failure = write_sbom(options.locked_set, options.sbom)
    if failure is None:
        print(f"SBOM: {options.sbom}")
    verdict = audit(options.locked_set)
    if failure is not None:
        verdict = Verdict(Result.NO_SBOM, f"{failure}; the audit's own result is {verdict.line!r}")
    print(verdict.line)
    return verdict.result


def locked_packages(locked_set: Path) -> dict[str, str]:
    """Return version by normalized name (PEP 503); raises ValueError for a line that is not NAME==VERSION."""
    packages = {}
    for number, line in enumerate(locked_set.read_text().splitlines(), start=1):
        name, pinned, version = line.partition("==")
        if not pinned or not name or not version:
            raise ValueError(f"{locked_set}, line {number}: {line!r} is not NAME==VERSION")
        packages[normalized(name)] = version
    return packages


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def write_sbom(locked_set: Path, sbom: Path) -> str | None:
    """Write the SBOM of the locked set; return why there is none."""
    sbom.parent.mkdir(parents=True, exist_ok=True)
    sbom.unlink(missing_ok=True)
    command = ["cyclonedx-py", "requirements", str(locked_set), "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--mc-type", "application", "--output-reproducible", "--validate"]
    command += ["--spec-version", _SPEC_VERSION, "--output-format", "JSON", "--output-file", str(sbom)]
    done = _run(command, _SBOM_SECONDS)
    if isinstance(done, str):
        return done
    if done.returncode or not sbom.exists():
        return f"cyclonedx-py ended with exit code {done.returncode}: {_last_line(done.stderr)}"
    return None


def audit(locked_set: Path) -> Verdict:
    """Compare the locked set with the advisory database."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = ["pip-audit", "--strict", "--requirement", str(locked_set), "--no-deps", "--disable-pip"]
        command += ["--progress-spinner", "off", "--format", "json", "--output", str(report)]
        done = _run(command, _AUDIT_SECONDS)
        if isinstance(done, str):
            return Verdict(Result.NOT_AUDITED, done)
        try:
            audited: list[Mapping[str, Any]] = json.loads(report.read_text())["dependencies"]
        except (OSError, ValueError, KeyError, TypeError):
            reason = f"pip-audit ended with exit code {done.returncode} and no report: {_last_line(done.stderr)}"
            return Verdict(Result.NOT_AUDITED, reason)
    return _judge(audited, locked_packages(locked_set), done.returncode)


def _judge(audited: Sequence[Mapping[str, Any]], locked: Mapping[str, str], exit_code: int) -> Verdict:
    """A known vulnerability counts even where the audit is incomplete; a clean result needs every package."""
    found = {f"{each['name']} {each['version']}": each["vulns"] for each in audited if each.get("vulns")}
    if found:
        ids = (f"{package} ({', '.join(vuln['id'] for vuln in vulns)})" for package, vulns in sorted(found.items()))
        return Verdict(Result.VULNERABLE, "; ".join(ids))
    complete = {normalized(each["name"]): each["version"] for each in audited if "skip_reason" not in each}
    missing = sorted(name for name, version in locked.items() if complete.get(name) != version)
    if missing:
        return Verdict(Result.NOT_AUDITED, f"{len(missing)} of {len(locked)} packages, {missing[0]} among them")
    if exit_code:
        return Verdict(
            Result.NOT_AUDITED, f"pip-audit ended with exit code {exit_code} after a report without findings"
        )
    return Verdict(Result.CLEAN, f"{len(locked)} packages, no known vulnerability")


def _run(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str] | str:
    """Run a command, found on PATH; return why it did not end by itself."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=ROOT)
    except FileNotFoundError:
        return f"{command[0]} is not installed; run `make audit`, which installs it"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {seconds:g} s"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_SHOWN_CHARACTERS] if lines else "it printed no reason"


if __name__ == "__main__":
    sys.exit(main())
