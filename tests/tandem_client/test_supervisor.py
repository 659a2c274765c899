"""Tests that the supervisor restarts, gives up and drains real child processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem_client.cli.bounded_log import MAX_LOG_BYTES, bound_log, older_log
from tandem_client.cli.plan import ProcessSpec
from tandem_client.cli.supervisor import RestartPolicy, Supervisor, last_lines, readable
from tandem_client.cli.up import LogReader

FAST = RestartPolicy(first_delay_seconds=0.01, max_delay_seconds=0.02)

SERVE = """
import signal, sys
def drain(*_):
    print(f"{name} drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print("up", flush=True)
while True:
    signal.pause()
"""

CHATTER = """
for number in range(1_000_000):
    print(f"line {number} " + "x" * 200, flush=True)
"""

IGNORE_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
while True:
    signal.pause()
"""


def spec(name: str, role: str, script: str) -> ProcessSpec:
    return ProcessSpec(name, role, (sys.executable, "-c", f"name = {name!r}\n{script}"))


class Harness:
    """A running supervisor, and its announcements."""

    def __init__(
        self, folder: Path, *specs: ProcessSpec, policy: RestartPolicy = FAST, max_log_bytes: int = MAX_LOG_BYTES
    ) -> None:
        self.announced: list[tuple[str, str]] = []
        self.folder = folder
        self.supervisor = Supervisor(specs, folder, self._announce, policy, max_log_bytes)
        self.running = asyncio.create_task(self.supervisor.run())

    def _announce(self, name: str, what: str) -> None:
        self.announced.append((name, what))

    def log(self, name: str) -> list[str]:
        return last_lines(self.folder / f"{name}.log", 100)

    def process_id(self, index: int = 0) -> int:
        process = self.supervisor.children[index].process
        assert process is not None
        return process.pid

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 (files and processes send no events)
                await asyncio.sleep(0.01)

    async def end(self) -> int:
        self.supervisor.stop()
        return await self.running


async def test_one_that_is_killed_is_started_again_and_it_is_said(tmp_path: Path) -> None:
    harness = Harness(tmp_path, spec("decode-0", "decode", SERVE))
    await harness.until(lambda: harness.log("decode-0") == ["up"])
    os.kill(harness.process_id(), signal.SIGKILL)
    await harness.until(lambda: harness.log("decode-0") == ["up", "up"])
    assert len(harness.announced) == 1
    assert harness.announced[0][1].startswith("was killed by SIGKILL; starting again in 0.01 s")
    assert await harness.end() == 0


async def test_quick_deaths_are_bounded_and_the_last_of_a_role_ends_all(tmp_path: Path) -> None:
    harness = Harness(
        tmp_path,
        spec("control-plane", "control", SERVE),
        spec("decode-0", "decode", "print('no such device'); raise SystemExit(3)"),
    )
    assert await harness.running == 1
    assert harness.log("decode-0") == ["no such device"] * 5
    assert "5 times in a row; not starting it again" in harness.announced[-1][1]
    assert "no such device" in harness.announced[-1][1]


async def test_the_others_go_on_while_one_of_the_role_is_left(tmp_path: Path) -> None:
    harness = Harness(tmp_path, spec("decode-0", "decode", "raise SystemExit(3)"), spec("decode-1", "decode", SERVE))
    await harness.until(lambda: any("going on without it" in what for _, what in harness.announced))
    assert [left.name for left in harness.supervisor.specs] == ["decode-1"]
    assert not harness.running.done()
    assert await harness.end() == 0


@pytest.mark.parametrize("code", [78, 2])
async def test_a_refusal_is_not_tried_again_and_its_reason_is_shown(tmp_path: Path, code: int) -> None:
    script = f"print('loading'); print('model x is not a checkpoint'); raise SystemExit({code})"
    harness = Harness(tmp_path, spec("prefill-0", "prefill", script))
    assert await harness.running == 1
    [(name, what)] = harness.announced
    assert name == "prefill-0"
    assert what.startswith("refused to start: model x is not a checkpoint")
    assert harness.log("prefill-0") == ["loading", "model x is not a checkpoint"]


async def test_the_others_go_on_when_one_that_ran_is_refused(tmp_path: Path) -> None:
    script = """
print('{"event": "certificate_refused", "level": "error", "reason": "decode-1 is revoked"}')
print('{"event": "signal_received", "level": "info"}')
raise SystemExit(78)
"""
    policy = RestartPolicy(quick_death_seconds=0.0)  # every life counts as one that ran
    harness = Harness(tmp_path, spec("decode-0", "decode", SERVE), spec("decode-1", "decode", script), policy=policy)
    await harness.until(lambda: bool(harness.announced))
    [(name, what)] = harness.announced
    assert name == "decode-1"
    assert what.startswith("refuses to go on: certificate refused, reason: decode-1 is revoked; going on without it")
    assert [left.name for left in harness.supervisor.specs] == ["decode-0"]
    assert await harness.end() == 0


async def test_the_gateway_drains_first_then_workers_and_the_kv_service_last(tmp_path: Path) -> None:
    order = tmp_path / "order"
    script = SERVE.replace('print(f"{name} drained", flush=True)', f'open({str(order)!r}, "a").write(name + "\\n")')
    names = {"control-plane": "control", "kv-service": "kv", "decode-0": "decode"}
    harness = Harness(tmp_path, *(spec(name, role, script) for name, role in names.items()))
    await harness.until(lambda: all(harness.log(name) == ["up"] for name in names))
    assert await harness.end() == 0
    assert order.read_text().split() == ["control-plane", "decode-0", "kv-service"]
    assert harness.announced == []


async def test_one_that_does_not_drain_in_time_is_killed(tmp_path: Path) -> None:
    harness = Harness(tmp_path, spec("decode-0", "decode", IGNORE_SIGTERM), policy=RestartPolicy(drain_seconds=0.1))
    await harness.until(lambda: harness.log("decode-0") == ["up"])
    process_id = harness.process_id()
    harness.supervisor.stop()
    assert await harness.running == 0
    assert not psutil.pid_exists(process_id)
    assert harness.announced == [("decode-0", "did not drain in time and was killed")]


async def test_a_second_stop_does_not_wait(tmp_path: Path) -> None:
    harness = Harness(tmp_path, spec("decode-0", "decode", IGNORE_SIGTERM), policy=RestartPolicy(drain_seconds=3600))
    await harness.until(lambda: harness.log("decode-0") == ["up"])
    harness.supervisor.stop()
    harness.supervisor.stop()
    async with asyncio.timeout(30):
        assert await harness.running == 0


async def test_what_a_dead_worker_had_started_is_ended_too(tmp_path: Path) -> None:
    script = f"""
import subprocess, sys
engine = subprocess.Popen([sys.executable, "-c", {IGNORE_SIGTERM!r}], stdout=subprocess.PIPE)
engine.stdout.readline()
print(engine.pid, flush=True)
engine.wait()
"""
    harness = Harness(tmp_path, spec("decode-0", "decode", script))
    await harness.until(lambda: len(harness.log("decode-0")) == 1)
    engine = psutil.Process(int(harness.log("decode-0")[0]))
    os.kill(harness.process_id(), signal.SIGKILL)
    await harness.until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    await harness.until(lambda: len(harness.log("decode-0")) == 2)
    assert await harness.end() == 0


def test_json_log_lines_are_read_as_words() -> None:
    line = '{"event": "model_refused", "level": "error", "timestamp": "t", "error": "no tokenizer.json in /m"}'
    assert readable(line) == "model refused, error: no tokenizer.json in /m"
    assert readable("plain words") == "plain words"
    assert readable("[1, 2]") == "[1, 2]"


async def test_a_log_is_bounded_while_its_process_writes(tmp_path: Path) -> None:
    policy = RestartPolicy(first_delay_seconds=0.01, log_check_seconds=0.01)
    harness = Harness(tmp_path, spec("decode-0", "decode", CHATTER), policy=policy, max_log_bytes=100_000)
    older = tmp_path / "decode-0.log.1"
    await harness.until(older.exists)
    first = older.stat()
    await harness.until(lambda: older.stat().st_ino != first.st_ino)  # it was replaced: the bound holds again and again
    await harness.until(lambda: any(line.startswith("line ") for line in harness.log("decode-0")))
    await harness.end()


def test_a_log_that_is_moved_loses_its_oldest_part_only(tmp_path: Path) -> None:
    log = tmp_path / "decode-0.log"
    with log.open("ab", buffering=0) as writer:
        assert not bound_log(log, 30)  # an empty log
        writer.write(b"".join(b"line %03d\n" % number for number in range(10)))
        assert bound_log(log, 30)
        assert older_log(log).read_bytes().endswith(b"line 008\nline 009\n")
        assert len(older_log(log).read_bytes()) == 30
        writer.write(b"line 010\n")  # as a process does that has the log open
    assert log.read_bytes() == b"line 010\n"
    assert not bound_log(tmp_path / "none.log", 30)


def test_whoever_follows_a_log_goes_on_at_its_new_start(tmp_path: Path) -> None:
    log = tmp_path / "kv.log"
    reader = LogReader(log)
    log.write_bytes(b"one\ntwo\n")
    assert reader.new_lines() == ["one", "two"]
    assert bound_log(log, 4)
    with log.open("ab") as writer:
        writer.write(b"six\n")
    assert reader.new_lines() == ["six"]
