"""An error for lack of threads, processes or folders says what to set."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
from pathlib import Path

import pytest
from rich.console import Console

from tandem_client.cli.plan import UpOptions
from tandem_client.cli.up import CannotStart, prepare_logs, up
from tandem_machine.limits import PROCESSES_PER_SERVICE, max_processes, too_few_processes, with_remedy
from tandem_runtime.lifecycle import run
from tests.ports import free_ports
from tests.tandem_machine.cgroup_tree import put_into_cgroup


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: can't start new thread",
        "terminate called after throwing 'std::system_error'\n  what():  Resource temporarily unavailable",
        str(BlockingIOError(11, "Resource temporarily unavailable")),
    ],
)
def test_a_lack_of_threads_is_named_with_what_to_raise(text: str) -> None:
    assert with_remedy(text).startswith(text) and "pids.max" in with_remedy(text)


def test_other_errors_stay_as_they_are() -> None:
    assert with_remedy("no such file") == "no such file"


def test_the_tightest_limit_of_processes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"pids/pids.max": "max\n", "pids/box/pids.max": "50\n", "slice/box/pids.max": "70\n"}
    put_into_cgroup(tmp_path, monkeypatch, "8:pids:/box\n", files)
    limit_user(monkeypatch, None)
    assert max_processes() == 50
    (tmp_path / "membership").write_text("0::/slice/box\n")
    assert max_processes() == 70
    limit_user(monkeypatch, 60)
    assert max_processes() == 60
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert max_processes() == 70, "the user's limit is not for root"


def test_services_are_not_started_where_they_would_hang_for_lack_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_into_cgroup(tmp_path, monkeypatch, "0::/\n", {})
    limit_user(monkeypatch, None)
    assert too_few_processes(100) == ""
    limit_user(monkeypatch, 4 * PROCESSES_PER_SERVICE)
    assert too_few_processes(4) == ""
    assert "is 80, 100 are needed at least; raise it (pids.max" in too_few_processes(5)

    async def main(drain: asyncio.Event) -> int:
        raise AssertionError("it was started")

    limit_user(monkeypatch, PROCESSES_PER_SERVICE - 1)
    assert run(main) == 2


def limit_user(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    """Set RLIMIT_NPROC, for a user without rights."""
    limits = (resource.RLIM_INFINITY if limit is None else limit, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_up_ends_with_a_sentence_when_others_have_used_up_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*command: str, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    port, grpc_port = free_ports(2)
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    with pytest.raises(CannotStart, match="Resource temporarily unavailable; the limit of processes and threads"):
        up(UpOptions(port=port, grpc_port=grpc_port), Console(quiet=True))


def test_logs_that_cannot_be_written_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("where the folder should be")
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path / "file"))
    with pytest.raises(CannotStart, match="set TANDEM_STATE_DIR to a folder that can be written"):
        prepare_logs([], 8642)
