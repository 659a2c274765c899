"""Measures an engine under a quota of one core beside an engine with that core by affinity, by turns."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cores.limited_engine import CGROUP, IGNORES_QUOTA
from benchmarks.engine.kinds import EngineKind
from benchmarks.engine.process import EngineProcess, Room
from benchmarks.lib.command import Progress
from tandem_machine.cgroups import cgroups

PERIOD_US = 100_000
BATCH, PROMPT_TOKENS = 8, 512


class QuotaRefused(Exception):
    """This process may not make a cgroup with a quota; the message names the cause."""


@dataclass(frozen=True)
class Side:
    """One way to get a core's worth of time."""

    name: str
    cpus: tuple[int, ...]
    has_quota: bool = False
    ignores_quota: bool = False
    """Computes with a thread for each core of its affinity, as before quotas were read."""


def sides(cores: Sequence[int]) -> tuple[Side, ...]:
    """Return the sides that two cores allow: the last one shows what the quota would cost if it were not read."""
    return (
        Side("affinity", (cores[0],)),
        Side("quota", (cores[0], cores[1]), has_quota=True),
        Side("quota_ignored", (cores[0], cores[1]), has_quota=True, ignores_quota=True),
    )


@dataclass
class Speeds:
    """Tokens per second of each turn."""

    prefill: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How long and how often."""

    shape: str
    num_rounds: int
    num_steps: int
    """Decode steps of a turn; long enough for several periods of a quota."""
    num_prompts: int
    """Prompts of a turn."""

    @property
    def max_context(self) -> int:
        return PROMPT_TOKENS + (self.num_rounds + 1) * (self.num_steps + 1) + 64


@contextmanager
def one_core_of_quota() -> Iterator[Path]:
    """Make a cgroup (version 1) below our own with a quota of one core, and remove it afterwards.

    Raises QuotaRefused. The processes in it must have ended before it is removed.
    """
    ours = next((group for group in cgroups("cpu") if group.version == 1 and group.folder.is_dir()), None)
    if ours is None:
        raise QuotaRefused("no cgroup of version 1 has the cpu controller here")
    folder = ours.folder / f"tandem-benchmark-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        raise QuotaRefused(f"no cgroup can be made in {ours.folder}: {error.strerror}") from error
    try:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (folder / "cpu.cfs_quota_us").write_text(str(PERIOD_US))
        yield folder
    finally:
        folder.rmdir()


async def measure(plan: Plan, cores: Sequence[int], folder: Path, progress: Progress) -> dict[str, Speeds]:
    """Return the speeds of each side, by name. Raises QuotaRefused and EngineFault."""
    found = {side.name: Speeds() for side in sides(cores)}
    with one_core_of_quota() as cgroup:
        async with AsyncExitStack() as stack:
            engines = []
            for side in sides(cores):
                progress(f"quota: loading {side.name}")
                engine = await _started(side, plan, cgroup, folder)
                stack.push_async_callback(engine.end)
                await engine.prefill(PROMPT_TOKENS, seed=0)
                engines.append(engine)
            for turn in range(plan.num_rounds):
                for engine in [*engines[turn % len(engines) :], *engines[: turn % len(engines)]]:
                    found[engine.name].prefill.append(await _prefill_speed(engine, plan, turn))
                progress(f"prefill, turn {turn + 1}: " + _last({each: found[each].prefill for each in found}))
            for engine in engines:
                await engine.hold(BATCH, PROMPT_TOKENS)
            for turn in range(plan.num_rounds):
                for engine in [*engines[turn % len(engines) :], *engines[: turn % len(engines)]]:
                    found[engine.name].decode.append(await _decode_speed(engine, plan))
                progress(f"decode, turn {turn + 1}: " + _last({each: found[each].decode for each in found}))
    return found


async def _started(side: Side, plan: Plan, cgroup: Path, folder: Path) -> EngineProcess:
    environment = {CGROUP: str(cgroup)} if side.has_quota else {}
    if side.ignores_quota:
        environment[IGNORES_QUOTA] = "1"
    kind = EngineKind(side.name, "benchmarks.cores.limited_engine", "bf16", environment=environment)
    return await EngineProcess.started(kind, plan.shape, Room(side.cpus, BATCH, plan.max_context), folder)


async def _prefill_speed(engine: EngineProcess, plan: Plan, turn: int) -> float:
    seconds = [await engine.prefill(PROMPT_TOKENS, 100 * (turn + 1) + number) for number in range(plan.num_prompts)]
    return PROMPT_TOKENS * plan.num_prompts / sum(seconds)


async def _decode_speed(engine: EngineProcess, plan: Plan) -> float:
    return BATCH * plan.num_steps / sum(await engine.decode(plan.num_steps))


def _last(speeds: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {values[-1]:.0f}" for name, values in speeds.items())
