"""Measures where a step's time goes, from the scheduler to the kernels.

python -m benchmarks.engine_profile [--quick] [--json FILE] [--markdown FILE] [--plot FILE] [--shapes S,M]

Random Llamas in float32 through the engine's own step loop, in this process: decode at batches of 1, 8 and 32 with
contexts of 512 tokens, and one prompt of 512. Steps whose op layer, model and runner are wrapped in clocks alternate
with plain ones. A clock needs each op to itself, while a plain step runs all layers at once: "clocks" is what both
cost, the difference of their means.

The contexts are not computed: they come, as from a prefill worker, out of a region full of random numbers.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.engine_profile.plot import draw
from benchmarks.lib.command import Outcome, Progress, Sheet, parser, run
from benchmarks.lib.engine_models import SHAPES, made
from benchmarks.lib.stats import Figures, flat

if TYPE_CHECKING:
    from benchmarks.engine_profile.profiled_engine import ProfiledEngine

_NUM_TOKENS = 512
_NUM_THREADS = 2
_BATCHES = (1, 8, 32)


@dataclass(frozen=True)
class Plan:
    """How often plain and timed steps alternate, and how many there are in each turn."""

    num_rounds: int
    num_steps: int


_PLANS = {"S": Plan(6, 10), "M": Plan(4, 5), "tiny": Plan(2, 3)}


@dataclass
class Profile:
    """Steps of one phase: seconds of each part, summed, and of all steps with and without clocks."""

    parts: dict[str, float] = field(default_factory=dict)
    timed_steps: list[float] = field(default_factory=list)
    plain_steps: list[float] = field(default_factory=list)

    @property
    def timed_ms(self) -> float:
        """Mean of a step."""
        return 1000 * sum(self.timed_steps) / len(self.timed_steps)

    @property
    def plain_ms(self) -> float:
        return 1000 * sum(self.plain_steps) / len(self.plain_steps)

    @property
    def percents(self) -> dict[str, float]:
        """Of a timed step, by part; they add up to 100."""
        return {part: 100 * seconds / sum(self.timed_steps) for part, seconds in self.parts.items()}


Profiles = dict[str, dict[str, Profile]]
"""By shape and phase."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("engine_profile", __doc__, "a tiny shape, few steps: does it still work?")
    options_of.add_argument("--plot", type=Path, metavar="FILE", help="draw the parts there, as SVG")
    options_of.add_argument("--shapes", default="", metavar="NAME,...", help="of S, M and tiny; S,M if not given")
    options = options_of.parse_args(arguments)
    shapes = options.shapes.split(",") if options.shapes else (["tiny"] if options.quick else ["S", "M"])
    if unknown := sorted(set(shapes) - set(SHAPES)):
        raise SystemExit(f"no such shape: {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    cpus = sorted(os.sched_getaffinity(0))[: 1 if options.quick else _NUM_THREADS]
    conditions = {
        "client": "none: the engine's core steps in the benchmark's own process",
        "requests": f"greedy, random token ids, contexts of {_NUM_TOKENS} tokens; {len(cpus)} threads on cores {cpus}",
        "numbers": "weights, keys and values in float32",
        "parts": "of steps op by op, in which each is timed; a plain step runs all layers at once",
    }

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        os.sched_setaffinity(0, cpus)
        from benchmarks.engine_profile.profiled_engine import ProfiledEngine  # not before the affinity is set

        profiles: Profiles = {}
        for shape in shapes:
            progress(f"{shape}: loading")
            engine = ProfiledEngine(made(shape, "bf16"), len(cpus), max(_BATCHES), _NUM_TOKENS)
            profiles[shape] = {}
            for name, profile in measure_phases(engine, _PLANS[shape]):
                progress(f"{shape}: {name}: {profile.plain_ms:.2f} ms, {profile.timed_ms:.2f} ms with clocks")
                profiles[shape][name] = profile
            add(outcome, shape, profiles[shape])
        if options.plot:
            plot(profiles, options.plot)

    return run("engine_profile", options, conditions, measure)


def measure_phases(engine: ProfiledEngine, plan: Plan) -> list[tuple[str, Profile]]:
    """Return all phases' profiles."""
    chance = random.Random(1)

    def prefill() -> float:
        engine.add_prompt([chance.randrange(10, engine.vocab_size) for _ in range(_NUM_TOKENS)])
        return engine.step()

    prefill()  # the first pass over weights and buffers
    phases = [("prefill 512", _profile(engine, prefill, Plan(plan.num_rounds, 1)))]
    for batch in _BATCHES:
        engine.hold(batch, plan.num_rounds * 2 * plan.num_steps + 2)
        engine.step()
        phases.append((f"decode, batch {batch}", _profile(engine, engine.step, plan)))
        engine.release()
    return phases


def _profile(engine: ProfiledEngine, take_step: Callable[[], float], plan: Plan) -> Profile:
    profile = Profile()
    engine.watch.clear()
    for _ in range(plan.num_rounds):
        for is_timed, steps in ((False, profile.plain_steps), (True, profile.timed_steps)):
            engine.use_clocks(is_timed)
            steps += [take_step() for _ in range(plan.num_steps)]
    engine.use_clocks(False)
    profile.parts = engine.watch.parts_of(sum(profile.timed_steps))
    return profile


# -------------------------------------------------------------------------------------------------- pure from here on


def add(outcome: Outcome, shape: str, profiles: dict[str, Profile]) -> None:
    """Enter one shape's table and figures."""
    for phase, profile in profiles.items():
        outcome.figures |= flat(f"{shape}.{phase.replace(', ', '_').replace(' ', '_')}", _figures(profile))
    parts = list(next(iter(profiles.values())).parts)
    rows = [(part, *(_cell(profile, part) for profile in profiles.values())) for part in parts]
    rows.append(("a step with clocks, ms", *(f"{profile.timed_ms:.2f}" for profile in profiles.values())))
    rows.append(("a plain step, ms", *(f"{profile.plain_ms:.2f}" for profile in profiles.values())))
    rows.append(("clocks", *(f"{profile.timed_ms / profile.plain_ms - 1:+.1%}" for profile in profiles.values())))
    outcome.sheets.append(Sheet(f"shape {shape}: ms and share of a step", ("", *profiles), rows))


def plot(profiles: Profiles, out: Path) -> None:
    by_shape = {
        shape: {name: profile.percents for name, profile in phases.items()} for shape, phases in profiles.items()
    }
    milliseconds = {(shape, name): phases[name].plain_ms for shape, phases in profiles.items() for name in phases}
    draw(by_shape, milliseconds, out)


def _figures(profile: Profile) -> Figures:
    shares = {f"percent.{part.replace(': ', '_').replace(', ', '_').replace(' ', '_')}": percent
              for part, percent in profile.percents.items()}  # fmt: skip
    return {"plain_ms": profile.plain_ms, "timed_ms": profile.timed_ms, **shares}


def _cell(profile: Profile, part: str) -> str:
    return f"{1000 * profile.parts[part] / len(profile.timed_steps):.2f}  {profile.percents[part]:5.1f}%"


if __name__ == "__main__":
    sys.exit(main())
