"""A roll replaces workers one by one, and takes everything back in each way in which it can fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tandem_client.cli.control_socket import Caller, NotRunning, Refused, listening, socket_path
from tandem_client.cli.fleet import FleetMember
from tandem_client.cli.plan import ProcessSpec, UpOptions
from tandem_client.cli.replace import Replacements, ReplaceOptions, plan_steps
from tandem_client.cli.rolling import Roll, RollOptions, RollStep, next_name, with_flag
from tandem_client.cli.supervisor import Child, Supervisor, last_lines
from tests.tandem_client.test_supervisor import FAST, SERVE, spec

_DIES = "import sys; print('no config.json there'); sys.exit(78)"


class FakeFleet:
    """The gateway as a roll sees it: each process of the supervisor is a worker, and ready once its log says so."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.unproven: set[str] = set()
        self.running: dict[str, int] = {}
        """Requests by worker."""
        self.draining: set[str] = set()
        self.calls: list[str] = []
        self.on_drain: Callable[[str], None] = lambda name: None

    async def members(self) -> list[FleetMember]:
        return [self._member(each) for each in self._supervisor.children]

    async def probe(self, worker_id: str) -> str:
        self.calls.append(f"probe {worker_id}")
        return "it answers nothing" if worker_id in self.unproven else ""

    async def drain(self, worker_id: str, *, resume: bool = False) -> None:
        self.calls.append(f"{'resume' if resume else 'drain'} {worker_id}")
        if resume:
            self.draining.discard(worker_id)
            return
        self.draining.add(worker_id)
        self.on_drain(worker_id)

    async def report(self, state: str, **facts: object) -> None:
        self.calls.append(state)

    def _member(self, child: Child) -> FleetMember:
        name = child.spec.name
        is_up = "up" in last_lines(child.log_path, 1)
        state = "draining" if name in self.draining else "ready" if is_up else "loading"
        load = {"num_running": self.running.get(name, 0)}
        return FleetMember.parse({"id": name, "role": name.partition("-")[0], "state": state, "load": load})


class World:
    def __init__(self, folder: Path) -> None:
        specs = [spec("decode-0", "decode", SERVE), spec("prefill-0", "prefill", SERVE)]
        self.supervisor = Supervisor(specs, folder, lambda name, what: None, FAST)
        self.fleet = FakeFleet(self.supervisor)
        self.said: list[tuple[str, str]] = []

    def roll(self, *steps: RollStep, memory: int = 1 << 50, **options: float) -> Roll:
        chosen = RollOptions(**{"drain_seconds": 5.0, "start_seconds": 20.0, **options})
        return Roll(
            self.supervisor,
            self.fleet,
            steps,
            chosen,
            lambda *line: self.said.append(line),
            available_bytes=lambda: memory,
        )

    @property
    def names(self) -> list[str]:
        return sorted(child.spec.name for child in self.supervisor.children)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    here = World(folder)
    running = asyncio.create_task(here.supervisor.run())
    await asyncio.sleep(0)
    try:
        yield here
        assert not running.done(), "nothing else ends with a roll"
    finally:
        here.supervisor.stop()
        await running


def step(old: str, script: str = SERVE) -> RollStep:
    return RollStep(old, spec(f"{old}-v2", old.partition("-")[0], script))


async def test_workers_are_replaced_in_order_and_each_is_proven_before_its_predecessor_drains(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert await here.roll(step("decode-0"), step("prefill-0")).run() == ""
        assert here.names == ["decode-0-v2", "prefill-0-v2"]
        assert here.fleet.calls == [
            *("started", "probe decode-0-v2", "drain decode-0", "step"),
            *("probe prefill-0-v2", "drain prefill-0", "step", "finished"),
        ]


async def test_a_new_worker_that_ends_takes_back_what_was_replaced_before(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        why = await here.roll(step("decode-0"), step("prefill-0", _DIES)).run()
        assert why.startswith("prefill-0-v2 ended with exit code 78: no config.json there (log: ")
        assert here.names == ["decode-0-v3", "prefill-0"]
        [again] = [child for child in here.supervisor.children if child.spec.name == "decode-0-v3"]
        old = spec("decode-0", "decode", SERVE).command
        assert again.spec.command == (*old, "--worker-id", "decode-0-v3"), "the old flags, and a new name"
        assert here.fleet.calls[-3:] == ["probe decode-0-v3", "drain decode-0-v2", "rolled_back"]


async def test_a_worker_that_answers_no_probe_is_stopped_and_the_old_one_never_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_client.cli.rolling._PROBE_AGAIN_SECONDS", 0.01)
    async with world(tmp_path) as here:
        here.fleet.unproven.add("decode-0-v2")
        why = await here.roll(step("decode-0")).run()
        assert why == "decode-0-v2 is ready, but 5 probes in a row failed: it answers nothing"
        assert here.names == ["decode-0", "prefill-0"]
        assert "drain decode-0" not in here.fleet.calls


async def test_if_the_new_worker_dies_while_the_old_one_drains_the_old_one_is_resumed(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.fleet.running["decode-0"] = 3

        def kill_new(name: str) -> None:
            [new] = [child for child in here.supervisor.children if child.spec.name == "decode-0-v2"]
            new.kill()

        here.fleet.on_drain = kill_new
        why = await here.roll(step("decode-0")).run()
        assert why.startswith("decode-0-v2 was killed by SIGKILL")
        assert here.names == ["decode-0", "prefill-0"]
        assert here.fleet.calls[-2:] == ["resume decode-0", "rolled_back"]


async def test_what_does_not_end_in_the_time_to_drain_moves(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.fleet.running["decode-0"] = 3
        assert await here.roll(step("decode-0"), drain_seconds=0.0).run() == ""
        assert ("decode-0", "3 requests did not end in time, and go on at other workers") in here.said
        assert here.names == ["decode-0-v2", "prefill-0"]


async def test_without_memory_for_a_second_worker_nothing_is_started_and_the_remedy_is_named(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        [old, _] = here.supervisor.children
        async with asyncio.timeout(20):
            while not old.log_path.exists() or "up" not in old.log_path.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        why = await here.roll(step("decode-0"), memory=0).run()
        assert "a second worker beside decode-0 needs about" in why
        assert "stop `tandem up` and start the new release in its place" in why
        assert here.names == ["decode-0", "prefill-0"]


async def test_a_cancelled_roll_is_taken_back(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        here.fleet.running["decode-0"] = 1
        roll = here.roll(step("decode-0"), drain_seconds=60.0)
        here.fleet.on_drain = lambda name: roll.cancel("the command was ended")
        assert await roll.run() == "the command was ended"
        assert (here.names, here.fleet.calls[-2]) == (["decode-0", "prefill-0"], "resume decode-0")


# ------------------------------------------------------------------------------------------------- socket and commands


def test_without_a_running_tandem_up_the_command_says_which_ones_run(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match=r"no `tandem up` runs at port 8642 .*; start one with `tandem up`"):
        Caller(tmp_path, 8642)
    socket_path(tmp_path, 9000).parent.mkdir()
    socket_path(tmp_path, 9000).touch()
    with pytest.raises(NotRunning, match=r"one runs at port 9000 \(--port\)"):
        Caller(tmp_path, 8642)
    with pytest.raises(NotRunning, match="is no socket of user"):
        Caller(tmp_path, 9000)


async def test_the_socket_is_private_and_a_call_is_refused_by_name(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 120)  # longer than an address of AF_UNIX may be
    supervisor = Supervisor([], tmp_path, lambda name, what: None, FAST)
    replacements = Replacements(supervisor, UpOptions(), lambda name, what: None)

    def call(request: dict[str, Any]) -> list[dict[str, Any]]:
        with Caller(long, 1) as caller:
            caller.send(request)
            return list(caller.lines())

    async with listening(socket_path(long, 1), replacements.call):
        assert socket_path(long, 1).stat().st_mode & 0o777 == 0o600
        assert socket_path(long, 1).parent.stat().st_mode & 0o777 == 0o700
        with pytest.raises(Refused, match="still starting"):
            await asyncio.to_thread(call, {"call": "workers"})
        replacements.started()
        with pytest.raises(Refused, match="there is no call 'reboot'"):
            await asyncio.to_thread(call, {"call": "reboot"})
        step = {"old": "gateway", "new": ProcessSpec("x", "control", ("sh",)).__dict__}
        asked = {"call": "replace", "steps": [step], "drain_seconds": 1, "start_seconds": 1}
        with pytest.raises(Refused, match="gateway cannot be replaced by x"):
            await asyncio.to_thread(call, asked)
        with pytest.raises(Refused, match="another form"):
            await asyncio.to_thread(call, {"call": "replace", "steps": 3})
    assert not socket_path(long, 1).exists()


async def test_of_two_rolls_the_second_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        replacements = Replacements(here.supervisor, UpOptions(port=1), lambda name, what: None)
        replacements.started()
        steps = [{"old": "decode-0", "new": spec("decode-0-v2", "decode", SERVE).__dict__}]
        asked = {"call": "replace", "steps": steps, "drain_seconds": 1, "start_seconds": 60}
        said: list[dict[str, Any]] = []
        left = asyncio.Event()
        first = asyncio.create_task(replacements.call(asked, said.append, left))
        async with asyncio.timeout(20):
            while "decode-0-v2" not in here.names:  # noqa: ASYNC110 (no gateway: it waits to be proven)
                await asyncio.sleep(0.01)
        again = {**asked, "steps": [{"old": "prefill-0", "new": spec("prefill-0-v2", "prefill", SERVE).__dict__}]}
        with pytest.raises(Refused, match="another `tandem up --replace` runs; wait for its end"):
            await replacements.call(again, said.append, asyncio.Event())
        left.set()  # its terminal is closed
        await first
        assert said[-1] == {"end": "the command was ended"}
        assert here.names == ["decode-0", "prefill-0"]


def test_new_workers_have_the_callers_python_folder_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/new/python")
    workers = [_worker("prefill-0", "prefill", "a"), _worker("decode-0-v2", "decode", "a"), _worker("x", "decode", "b")]
    options = ReplaceOptions(8642, model="a", checkpoint="/weights")
    decode, prefill = plan_steps(workers, options, {"TANDEM_DECODE_DTYPE": "float32", "PYTHONPATH": "/code"})
    assert (decode.old, decode.new.name, prefill.new.name) == ("decode-0-v2", "decode-0-v3", "prefill-0-v2")
    assert decode.new.command == (
        *("/new/python", "-m", "decode_svc", "--worker-id", "decode-0-v3"),
        *("--model", "/weights", "--served-model-name", "a"),
    )
    assert dict(decode.new.environment) == {"OMP": "1", "PYTHONPATH": "/code", "TANDEM_DECODE_DTYPE": "float32"}
    assert "TANDEM_DECODE_DTYPE" not in dict(prefill.new.environment)
    assert (decode.new.folder, decode.new.cores) == (str(tmp_path), (1,))
    with pytest.raises(Refused, match="no worker serves c; the models here are a, b"):
        plan_steps(workers, ReplaceOptions(8642, model="c"), {})


def _worker(name: str, role: str, model: str) -> dict[str, Any]:
    command = ["/old/python", "-m", f"{role}_svc", "--worker-id", name, "--model", "old"]
    facts = {"name": name, "role": role, "command": command, "environment": [["OMP", "1"]]}
    return {**facts, "cores": [1], "folder": "", "model": model}


def test_names_count_up_and_flags_are_replaced() -> None:
    assert next_name("decode-0", set()) == "decode-0-v2"
    assert next_name("decode-0-v9", {"decode-0-v10"}) == "decode-0-v11"
    assert with_flag(("x", "--a", "1", "--b", "2"), "--a", "3") == ("x", "--a", "3", "--b", "2")
    assert with_flag(("x",), "--a", "3") == ("x", "--a", "3")
