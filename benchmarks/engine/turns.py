"""Lets loaded engines take turns, undisturbed by other load and by each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.engine.kinds import EngineKind
from benchmarks.engine.limits import Limits
from benchmarks.engine.process import EngineFault, EngineProcess, Room
from benchmarks.engine.stats import Phase, Turns
from benchmarks.lib.command import Progress
from benchmarks.lib.engine_models import SHAPES, ShapeFacts, weight_bytes
from benchmarks.lib.machine import CpuUse

MAX_FOREIGN_SHARE = 0.05
"""Of all cores, during one turn."""
_PROCESS_BYTES = 400 << 20
_MAX_SHARE_OF_AVAILABLE = 0.85
_QUIET_SECONDS = 1.0
_SPARE_TOKENS = 64
"""For an engine whose own thread steps: it makes a token or two more than asked for, each time."""


@dataclass(frozen=True)
class Plan:
    """How long and how often. A full run and a quick one differ in nothing else."""

    num_rounds: int
    num_steps: int
    """Of one turn in decoding."""
    num_prompts: int
    """Of one turn in prefill."""
    num_attempts: int
    """A turn that was disturbed is repeated until it was this often."""
    max_wait_seconds: float
    """How long a quiet moment is waited for, each time."""

    def start_tokens(self, phase: Phase) -> int:
        """Return the length of the prompts, so that the contexts pass the phase's own length half way."""
        return phase.num_tokens - self.num_rounds * (self.num_steps + 1) // 2

    def room(self, phase: Phase, cpus: tuple[int, ...]) -> Room:
        """Return the room for all turns, repeated ones too."""
        most_tokens = self.num_rounds * self.num_attempts * (self.num_steps + 1)
        start = self.start_tokens(phase) if phase.batch else phase.num_tokens
        return Room(cpus, max(1, phase.batch), start + most_tokens + _SPARE_TOKENS)


@dataclass(frozen=True)
class Stage:
    """Where engines run."""

    cpus: tuple[int, ...]
    folder: Path
    """For their logs."""
    progress: Progress
    limits: Callable[[], Awaitable[Limits]]
    """What the machine could do at this moment: memory that is shared with other machines is faster and slower."""


async def measure_phases(
    kinds: Sequence[EngineKind], shape: str, phases: Sequence[Phase], plan: Plan, stage: Stage
) -> AsyncGenerator[tuple[Phase, dict[str, Turns]], None]:
    """Yield each phase with the turns of every engine that could take part; failures are printed, and left out.

    Where all engines fit into memory with the largest phase's contexts they stay loaded; else they are loaded for each
    phase, in as many teams as memory asks for.
    """
    budget = int(psutil.virtual_memory().available * _MAX_SHARE_OF_AVAILABLE)
    largest = max(phases, key=lambda phase: phase.batch)
    if len(list(teams(kinds, shape, plan.room(largest, stage.cpus), budget))) == 1:
        async with _loaded(kinds, shape, plan.room(largest, stage.cpus), stage) as engines:
            for phase in phases:
                yield phase, await _measure_phase(engines, kinds, phase, plan, stage)
        return
    for phase in phases:
        room = plan.room(phase, stage.cpus)
        found: dict[str, Turns] = {}
        for team in teams([kind for kind in kinds if phase.has(kind.batches)], shape, room, budget):
            async with _loaded(team, shape, room, stage) as engines:
                found |= await _measure_phase(engines, team, phase, plan, stage)
        yield phase, found


def teams(kinds: Sequence[EngineKind], shape: str, room: Room, budget_bytes: int) -> Iterator[list[EngineKind]]:
    """Yield engines that fit into memory together, in their order; one at least, even if it may not fit."""
    team: list[EngineKind] = []
    left = budget_bytes
    for kind in kinds:
        needed = needed_bytes(kind, shape, room)
        if team and needed > left:
            yield team
            team, left = [], budget_bytes
        team.append(kind)
        left -= needed
    if team:
        yield team


def needed_bytes(kind: EngineKind, shape: str, room: Room) -> int:
    """Return an estimate of the most that an engine takes, while it loads."""
    kv_bytes = room.max_batch * room.max_context * ShapeFacts(SHAPES[shape]).kv_bytes_per_token
    return int(weight_bytes(shape, kind.form) * kind.copies) + kv_bytes + _PROCESS_BYTES


@asynccontextmanager
async def _loaded(
    kinds: Sequence[EngineKind], shape: str, room: Room, stage: Stage
) -> AsyncIterator[list[EngineProcess]]:
    """Yield those of the engines that could be loaded, one after the other; end them all afterwards."""
    async with AsyncExitStack() as stack:
        engines: list[EngineProcess] = []
        for kind in kinds:
            stage.progress(f"shape {shape}: loading {kind.name}")
            try:
                engine = await EngineProcess.started(kind, shape, room, stage.folder)
            except (EngineFault, RuntimeError) as error:
                stage.progress(f"{kind.name} is left out: {error}")
                continue
            stack.push_async_callback(engine.end)
            engines.append(engine)
        yield engines


async def _measure_phase(
    engines: Sequence[EngineProcess], kinds: Sequence[EngineKind], phase: Phase, plan: Plan, stage: Stage
) -> dict[str, Turns]:
    """Compute the contexts of each engine, let them take turns, and forget the contexts."""
    wanted = {kind.name for kind in kinds if phase.has(kind.batches)}
    alive: list[EngineProcess] = []
    for engine in engines:
        if engine.name in wanted:
            try:
                await _prepare(engine, phase, plan)
            except EngineFault as error:
                stage.progress(f"{engine.name} is left out of {phase.title}: {error}")
                continue
            alive.append(engine)
    found = await _take_turns(alive, phase, plan, stage)
    for engine in alive:
        if engine.name in found:
            found[engine.name].peak_bytes = engine.peak_bytes()
            if phase.batch:
                await engine.release()
    return found


async def _prepare(engine: EngineProcess, phase: Phase, plan: Plan) -> None:
    """Compute the contexts, and warm up: the first call of everything is slow."""
    if phase.batch:
        await engine.hold(phase.batch, plan.start_tokens(phase))
    else:
        await engine.prefill(phase.num_tokens, seed=0)


async def _take_turns(engines: Sequence[EngineProcess], phase: Phase, plan: Plan, stage: Stage) -> dict[str, Turns]:
    found: dict[str, Turns] = {engine.name: Turns() for engine in engines}
    alive = list(engines)
    for turn in range(plan.num_rounds):
        first = turn % max(1, len(alive))
        limits = await stage.limits()
        for engine in [*alive[first:], *alive[:first]]:  # whatever drifts, drifts for all
            try:
                await _take_turn(engine, alive, found[engine.name], phase, plan, seed=1 + turn)
                found[engine.name].limits.append(limits)
            except EngineFault as error:
                stage.progress(f"{engine.name} has failed and is left out: {error}")
                alive.remove(engine)
        stage.progress(f"{phase.title}: " + ", ".join(f"{each.name} {_last(found[each.name])}" for each in alive))
    return {engine.name: found[engine.name] for engine in alive}


async def _take_turn(
    engine: EngineProcess, all_engines: Sequence[EngineProcess], turns: Turns, phase: Phase, plan: Plan, seed: int
) -> None:
    """Measure one engine until nobody disturbed it; keep the last attempt."""
    others = [each for each in all_engines if each is not engine]
    for attempt in range(plan.num_attempts):
        await _wait_for_quiet(plan.max_wait_seconds if attempt else 0.0)
        speed, disturbed = await _watched(lambda: _speed(engine, phase, plan, seed), others)
        if not disturbed:
            break
    turns.tokens_per_second.append(speed)
    turns.num_disturbed += disturbed


async def _speed(engine: EngineProcess, phase: Phase, plan: Plan, seed: int) -> float:
    """Return tokens per second of one turn."""
    if phase.batch:
        return phase.batch * plan.num_steps / sum(await engine.decode(plan.num_steps))
    seconds = [await engine.prefill(phase.num_tokens, 100 * seed + number) for number in range(plan.num_prompts)]
    return phase.num_tokens * plan.num_prompts / sum(seconds)


async def _watched(measure: Callable[[], Awaitable[float]], others: Sequence[EngineProcess]) -> tuple[float, bool]:
    """Return what was measured, and whether others used the machine meanwhile, engines that ought to wait included."""
    before, idle_before = CpuUse.now(), sum(engine.cpu_seconds() for engine in others)
    result = await measure()
    after = CpuUse.now()
    idle_share = (sum(engine.cpu_seconds() for engine in others) - idle_before) / (
        (after.wall - before.wall) * (psutil.cpu_count() or 1)
    )
    return result, after.foreign_share_since(before) + idle_share > MAX_FOREIGN_SHARE


async def _wait_for_quiet(max_seconds: float) -> None:
    """Return as soon as others leave the machine alone for a second, or after so many seconds."""
    waited = 0.0
    while waited < max_seconds:
        before = CpuUse.now()
        await asyncio.sleep(_QUIET_SECONDS)
        waited += _QUIET_SECONDS
        if CpuUse.now().foreign_share_since(before) <= MAX_FOREIGN_SHARE:
            return


def _last(turns: Turns) -> str:
    return f"{turns.tokens_per_second[-1]:.1f}{'!' if turns.num_disturbed else ''}"
