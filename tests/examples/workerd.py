"""Runs the example Worker in stock workerd, against any gateway."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "worker"
WORKERD = FOLDER / "node_modules" / ".bin" / "workerd"


def require_workerd() -> None:
    """Skip the test if `make services` has not installed workerd; fail if skips are not allowed."""
    if WORKERD.exists():
        return
    reason = f"workerd is not installed: {WORKERD} is missing; run `make services` or `npm ci` in {FOLDER}"
    if os.environ.get("TANDEM_REQUIRE_SERVICES") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@contextmanager
def example_worker(gateway_address: str, folder: Path = FOLDER) -> Iterator[str]:
    """Run the Worker of `folder` with its env.AI at `gateway_address` ("127.0.0.1:8642"); yield the Worker's URL.

    workerd takes a free port and writes it to its control pipe.
    """
    require_workerd()
    read_end, write_end = os.pipe()
    command = [
        *(str(WORKERD), "serve", "config.capnp"),
        *("--external-addr", f"tandem={gateway_address}"),
        *("--socket-addr", "http=127.0.0.1:0"),
        f"--control-fd={write_end}",
    ]
    with os.fdopen(read_end) as control, subprocess.Popen(command, cwd=folder, pass_fds=[write_end]) as process:
        os.close(write_end)
        try:
            yield f"http://127.0.0.1:{_port(control.readline())}"
        finally:
            process.kill()  # after SIGTERM it would wait for requests that a failed test left


def _port(event: str) -> int:
    assert event, "workerd ended before it listened; its message is above"
    message = json.loads(event)
    assert message["event"] == "listen", f"workerd's first message is `listen`, not {event}"
    return int(message["port"])
