"""Examines the ports of `tandem up`, and compares this machine's clock with the gateway's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import httpx
import psutil

from tandem_client.cli.doctor.finding import Finding, Level
from tandem_client.connection import Connection

_TIMEOUT_SECONDS = 3.0
_LOCAL_TIMEOUT_SECONDS = 1.0
_SKEW_SECONDS = 5.0
"""The Date header has whole seconds, and a request takes some time."""
_BAD_SKEW_SECONDS = 300.0
"""Certificates are valid from two hours before their issue; their end is near sooner on a clock that is ahead."""


def ports(port: int, grpc_port: int) -> Iterator[Finding]:
    """Say who listens on the HTTP port, the gRPC port and the enrolment port behind the gRPC port."""
    wanted = {port: "HTTP", grpc_port: "gRPC", grpc_port + 1: "enrolment"}
    try:
        listeners = _listeners()
    except (psutil.Error, OSError) as error:
        yield Finding("ports", "note", f"not examined: this system does not say who listens ({error})")
        return
    running = _tandem_at(port) if port in listeners else ""
    owner = listeners.get(port)
    for number, what in wanted.items():
        if number not in listeners:
            yield Finding("ports", "ok", f"{number} ({what}) is free")
        elif running and listeners[number] == owner:
            yield Finding("ports", "ok", f"{number} ({what}): Tandem {running} listens")
        else:
            yield Finding(
                "ports",
                "fail",
                f"{number} ({what}) is taken by {_process(listeners[number])}",
                f"end that process, or choose another port with {'--port' if number == port else '--grpc-port'}",
            )


def clock(url: str | None) -> Iterator[Finding]:
    """Compare this machine's clock with the gateway's Date header."""
    connection = Connection.resolve(url, None, "default")
    try:
        with httpx.Client(timeout=_TIMEOUT_SECONDS, **connection.client_options) as client:
            answer = client.get("/healthz")
    except httpx.TransportError:
        yield Finding("clock", "note", f"not compared: no gateway at {connection.base_url} (--url names another)")
        return
    try:
        date = parsedate_to_datetime(answer.headers["date"])
    except (KeyError, ValueError):
        yield Finding("clock", "note", f"not compared: {connection.base_url} sends no Date header")
        return
    yield clock_finding(time.time() - date.timestamp(), connection.base_url)


def clock_finding(seconds_ahead: float, url: str) -> Finding:
    """Return the finding for a clock that is ahead of the gateway's by so many seconds (behind it, if negative)."""
    text = f"{abs(seconds_ahead):,.0f} s {'ahead of' if seconds_ahead > 0 else 'behind'} the gateway at {url}"
    if abs(seconds_ahead) <= _SKEW_SECONDS:
        return Finding("clock", "ok", f"agrees with the gateway at {url}")
    level: Level = "fail" if abs(seconds_ahead) > _BAD_SKEW_SECONDS else "warn"
    return Finding("clock", level, text, "let NTP set both clocks (timedatectl set-ntp true, or chrony)")


def _listeners() -> dict[int, int | None]:
    """Return the listening TCP ports with the process of each; None where this user may not know."""
    found: dict[int, int | None] = {}
    for connection in psutil.net_connections(kind="tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr:
            port = connection.laddr.port
            found[port] = connection.pid or found.get(port)
    return found


def _process(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    try:
        return f"process {pid} ({psutil.Process(pid).name()})"
    except psutil.Error:
        return f"process {pid}"


def _tandem_at(port: int) -> str:
    """Return the version of the Tandem that answers there, "" if none does."""
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/version", timeout=_LOCAL_TIMEOUT_SECONDS, trust_env=False)
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            return "(with accounts)"
        version = answer.json()["version"] if answer.is_success else ""
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""
    return str(version)
