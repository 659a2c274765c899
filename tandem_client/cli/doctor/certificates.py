"""Examines the certificates that the processes of this machine keep."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509

from tandem_client.cli.doctor.finding import Finding

_SOON = timedelta(hours=6)
"""A process renews a certificate of a day after twelve hours: one with less than six has missed that."""
_RENEWABLE = timedelta(days=30)


def certificates(state_dir: Path, now: datetime | None = None) -> Iterator[Finding]:
    """Read the expiry of each certificate in the state folder."""
    now = now or datetime.now(UTC)
    folders = sorted((state_dir / "certificates").glob("*/current")) if (state_dir / "certificates").is_dir() else []
    if not folders:
        yield Finding("certificates", "note", f"none in {state_dir}: the first start makes them")
        return
    findings = [_finding(folder, now) for folder in folders]
    bad = [finding for finding in findings if finding.level != "ok"]
    yield from bad
    if num_good := len(findings) - len(bad):
        yield Finding("certificates", "ok", f"{num_good} valid in {state_dir / 'certificates'}")


def _finding(folder: Path, now: datetime) -> Finding:
    name = folder.parent.name
    try:
        certificate = x509.load_pem_x509_certificates((folder / "certificate.pem").read_bytes())[0]
    except (OSError, ValueError, IndexError) as error:
        return Finding(
            "certificates",
            "fail",
            f"{name}: cannot be read ({error})",
            f"move {folder.parent} away and start the process with a join token (`tandem fleet token`)",
        )
    left = certificate.not_valid_after_utc - now
    if certificate.not_valid_before_utc > now:
        return Finding("certificates", "fail", f"{name}: is not valid yet", "set this machine's clock")
    if left > _SOON:
        return Finding("certificates", "ok", f"{name}: valid for {_hours(left)}")
    if left > timedelta(0):
        return Finding(
            "certificates",
            "warn",
            f"{name}: expires in {_hours(left)}, and was not renewed",
            "see that the process runs and reaches the gateway's enrolment port",
        )
    if -left < _RENEWABLE:
        return Finding(
            "certificates",
            "warn",
            f"{name}: expired {_hours(-left)} ago",
            "start the process: it renews the certificate with its key for 30 days",
        )
    return Finding(
        "certificates",
        "fail",
        f"{name}: expired {_hours(-left)} ago, too long to renew",
        f"move {folder.parent} away and start the process with a join token (`tandem fleet token`)",
    )


def _hours(time_left: timedelta) -> str:
    hours = time_left.total_seconds() / 3600
    return f"{hours / 24:.0f} days" if hours >= 48 else f"{hours:.1f} hours"
