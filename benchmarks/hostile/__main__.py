"""Measures what hostile requests of one client do to the token streams of another.

python -m benchmarks.hostile [--quick] [--json FILE] [--only kinds|together|long|connections] [--kind NAME ...]

Streams of 20 tokens a second run through a real gateway with accounts; stand-in workers emit the tokens, so the
gateway has a core for itself. A second account sends each kind of hostile request, one at a time (`kinds`), then
sixteen at once while a third account sends ordinary prompts (`together`); then ordinary long prompts, sixteen at once
(`long`); then half heads, slow bodies and workers that reconnect all at once (`connections`). Gaps are compared with
quiet runs in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gateway.processes import ALL_CORES, OTHER_CORES
from benchmarks.hostile.encoder_kinds import EMBEDDER
from benchmarks.hostile.exchange import Answer, Script, post
from benchmarks.hostile.kinds import KINDS
from benchmarks.hostile.maker import BODY_RATE_SECONDS, CHAT, HEAD_SECONDS, Kind, words
from benchmarks.hostile.results import Crowded, Lag, Quiet, Results, Seen, enter
from benchmarks.hostile.vocabulary import NUM_TOKENS
from benchmarks.hostile.world import CONTEXT_TOKENS, LARGE_MODEL, SHORT_CONTEXT, SHORT_MODEL, World
from benchmarks.lib.command import Outcome, Progress, parser, run

_LARGE_KIND = "a_new_model_with_a_large_vocabulary"
_NUM_AT_ONCE = 16
_OUR_NICE = 10
_MEMORY_SECONDS = 0.25
_HONEST_PAUSE_SECONDS = 1.0
_LONG_BYTES = (100_000, 250_000, 500_000, 1_000_000, 2_000_000)
_CLOSE_SECONDS = 3.0


@dataclass(frozen=True)
class Size:
    """How much and how long."""

    num_streams: int
    max_body_bytes: int
    quiet_seconds: float
    kind_seconds: float
    """A kind is watched at least so long."""
    settle_seconds: float
    """And so long after its answer: a stall shows as a gap once it is over."""
    give_up_seconds: float
    kinds_per_quiet: int
    num_vocabulary_tokens: int
    num_long_rounds: int
    num_half_heads: int
    num_slow_bodies: int
    num_workers: int
    crowd_seconds: float


FULL = Size(32, 9_500_000, 10.0, 3.0, 1.5, 120.0, 8, NUM_TOKENS, 5, 500, 200, 500, 12.0)
QUICK = Size(32, 300_000, 3.0, 1.0, 0.5, 60.0, 20, 8_000, 1, 100, 40, 60, 6.0)
PARTS = ("kinds", "together", "long", "connections")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return the exit code."""
    options_of = parser("hostile", __doc__ or "", "bodies of 300 kB instead of 9.5 MB, and short watches")
    options_of.add_argument("--only", choices=PARTS, help="measure this part alone")
    options_of.add_argument("--kind", action="append", choices=sorted(KINDS), help="of the kinds, send these alone")
    options_of.add_argument("--give-up-seconds", type=float, metavar="N", help="wait so long for an answer")
    options = options_of.parse_args(arguments)
    size = QUICK if options.quick else FULL
    if options.give_up_seconds:
        size = Size(**{**vars(size), "give_up_seconds": options.give_up_seconds})
    kinds = [KINDS[name] for name in options.kind or KINDS]
    conditions = {
        "model": f"the built-in model's tokenizer, a context of {CONTEXT_TOKENS:,} tokens; tokens by a stand-in worker",
        "streams": f"{size.num_streams}, 20 tokens/s each, of an account of their own",
        "client": f"bodies of at most {size.max_body_bytes:,} bytes; client, workers and those who watch share "
        f"{len(OTHER_CORES)} core(s), the gateway's first process has one",
    }
    parts = [options.only] if options.only else list(PARTS)

    async def measure(outcome: Outcome, folder: Path, progress: Progress) -> None:
        os.sched_setaffinity(0, OTHER_CORES)  # the client is this process
        try:
            await measure_parts(outcome, size, folder / "world", progress, parts, kinds, nice=_OUR_NICE)
        finally:
            os.sched_setaffinity(0, ALL_CORES)

    return run("hostile", options, conditions, measure)


async def measure_parts(
    outcome: Outcome,
    size: Size,
    folder: Path,
    progress: Progress,
    parts: Sequence[str],
    kinds: Sequence[Kind],
    *,
    nice: int = 0,
) -> None:
    """Measure the parts; an interrupted run keeps what it has measured. `nice` is for good."""
    results = Results(num_streams=size.num_streams)
    world = World(folder, size.num_streams, size.num_vocabulary_tokens, size.max_body_bytes)
    try:
        with world:
            os.nice(nice)  # what hostile clients compute must not delay those who watch on the same cores
            measurement = Measurement(world, size, results, progress)
            await measurement.warm_up()
            for part in parts:
                await measurement.measure(part, kinds)
    finally:
        enter(outcome, results)


class Measurement:
    """The parts of a measurement in one world."""

    def __init__(self, world: World, size: Size, results: Results, progress: Progress) -> None:
        self._world = world
        self._size = size
        self._results = results
        self._progress = progress
        self._quiet_bytes = 0
        self._num_ended = 0

    async def warm_up(self) -> None:
        """Send what loads lazily: an ordinary prompt and a chat."""
        await self._world.wait_served(EMBEDDER)
        for answer in (await self._world.honest_prompt(), await self._world.honest_chat()):
            if answer.status != 200:
                raise RuntimeError(f"an honest prompt was refused: {answer.body[:500].decode(errors='replace')}")
        self._world.gaps()

    async def measure(self, part: str, kinds: Sequence[Kind]) -> None:
        if part == "kinds":
            await self._one_at_a_time(kinds)
        elif part == "together":
            await self._together([kind for kind in kinds if kind.part == "bodies" and kind.name != _LARGE_KIND])
        elif part == "long":
            await self._long_prompts()
        else:
            await self._connections()

    async def quiet(self) -> Quiet:
        """Watch the streams alone; the gateway's memory of that moment is what others are compared with."""
        self._world.gaps()
        await asyncio.sleep(self._size.quiet_seconds)
        seen = self._world.gaps()
        self._quiet_bytes = self._quiet_bytes or self._world.gateway.pss_bytes
        quiet = Quiet(seen.p99, seen.longest)
        self._results.quiet.append(quiet)
        self._progress(f"quiet: p99 {1000 * quiet.p99_seconds:.0f} ms, longest {1000 * quiet.longest_seconds:.0f} ms")
        return quiet

    # ------------------------------------------------------------------------------------------------ one at a time

    async def _one_at_a_time(self, kinds: Sequence[Kind]) -> None:
        # The large vocabulary is loaded last: its memory, which is honest, would be in every later figure.
        ordered = sorted(kinds, key=lambda kind: kind.name == _LARGE_KIND)
        for index, kind in enumerate(ordered):
            if index % self._size.kinds_per_quiet == 0:
                await self.quiet()
            seen = await self._one(kind)
            self._results.kinds.append(seen)
            self._progress(
                f"{kind.name}: {seen.statuses}; p99 {1000 * seen.p99_seconds:.0f} ms, "
                f"longest {1000 * seen.longest_seconds:.0f} ms, {seen.memory_bytes / 1e6:+.0f} MB"
            )

    async def _one(self, kind: Kind) -> Seen:
        scripts = kind.make(self._world.maker)
        if kind.name == _LARGE_KIND:
            return await self._seen(kind, scripts, self._after_it_is_served(scripts))
        return await self._seen(kind, scripts, self._send_all(scripts))

    async def _send_all(self, scripts: Sequence[Script]) -> list[Answer]:
        give_up = self._size.give_up_seconds
        return list(await asyncio.gather(*(self._world.send(script, give_up) for script in scripts)))

    async def _after_it_is_served(self, scripts: Sequence[Script]) -> list[Answer]:
        """Register the model, and use it as soon as it is served."""
        self._world.start_large_model()
        await self._world.wait_served(LARGE_MODEL)
        return await self._send_all(scripts)

    async def _seen(self, kind: Kind, scripts: Sequence[Script], sending: Coroutine[Any, Any, list[Answer]]) -> Seen:
        self._world.gaps()
        async with self._memory() as most:
            answers, _ = await asyncio.gather(sending, asyncio.sleep(self._size.kind_seconds))
            await asyncio.sleep(self._size.settle_seconds)
        gaps = self._world.gaps()
        num_bytes = sum(script.num_bytes for script in scripts)
        ended = self._newly_ended(gaps.num_ended)
        return Seen(kind, num_bytes, answers, gaps.p99, gaps.longest, most() - self._quiet_bytes, ended)

    def _newly_ended(self, num_ended: int) -> int:
        newly, self._num_ended = num_ended - self._num_ended, num_ended
        return newly

    @contextlib.asynccontextmanager
    async def _memory(self) -> AsyncIterator[Callable[[], int]]:
        """Read the memory of the gateway and its children all the while; yield a function that returns the most."""
        most = self._world.gateway.pss_bytes

        async def read() -> None:
            nonlocal most
            while True:
                await asyncio.sleep(_MEMORY_SECONDS)
                most = max(most, self._world.gateway.pss_bytes)

        reading = asyncio.create_task(read())
        try:
            yield lambda: most
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        most = max(most, self._world.gateway.pss_bytes)

    # --------------------------------------------------------------------------------------------------- many at once

    async def _together(self, kinds: Sequence[Kind]) -> None:
        waiting = [script for kind in kinds for script in kind.make(self._world.maker)[:4]]
        self._world.maker.chance.shuffle(waiting)
        await self._crowded("sixteen at once: all kinds of bodies", waiting, must_be_ok=False)

    async def _long_prompts(self) -> None:
        maker = self._world.maker
        sizes = [num_bytes for num_bytes in _LONG_BYTES if num_bytes <= maker.max_body_bytes]
        prompts = [maker.chance.choice(sizes) for _ in range(_NUM_AT_ONCE * self._size.num_long_rounds)]
        scripts = [
            maker.chat([{"role": "user", "content": words(num_bytes, maker.chance)}])[0] for num_bytes in prompts
        ]
        await self._crowded("long prompts: 100 KB to 2 MB, sixteen at once", scripts, must_be_ok=True)
        await self._beyond_the_limit()

    async def _beyond_the_limit(self) -> None:
        """Send long prompts to a model with a short context: refused by their length."""
        self._world.start_short_model()
        await self._world.wait_served(SHORT_MODEL)
        maker = self._world.maker
        text = words(min(2_000_000, maker.max_body_bytes), maker.chance)
        body = {"model": SHORT_MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
        kind = Kind(f"long prompts for a context of {SHORT_CONTEXT:,} tokens", lambda _: [])
        scripts = [Script([post(CHAT, body, maker.token)])] * _NUM_AT_ONCE
        self._results.kinds.append(await self._seen(kind, scripts, self._send_all(scripts)))

    async def _crowded(self, title: str, waiting: Sequence[Script], *, must_be_ok: bool) -> None:
        self._progress(title)
        quiet = await self.quiet()
        honest: list[Answer] = []
        answers: list[Answer] = []
        left = list(waiting)
        async with self._memory() as most:
            asking = asyncio.create_task(self._ask_honestly(honest))
            await asyncio.gather(*(self._send_in_turn(left, answers) for _ in range(_NUM_AT_ONCE)))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await asyncio.sleep(self._size.settle_seconds)
        gaps = self._world.gaps()
        self._results.crowded.append(
            Crowded(
                title,
                answers,
                honest,
                gaps.p99,
                gaps.longest,
                most() - self._quiet_bytes,
                self._newly_ended(gaps.num_ended),
                must_be_ok,
                quiet,
            )
        )

    async def _send_in_turn(self, left: list[Script], answers: list[Answer]) -> None:
        while left:
            answers.append(await self._world.send(left.pop(), self._size.give_up_seconds))

    async def _ask_honestly(self, answers: list[Answer]) -> None:
        while True:
            answers.append(await self._world.honest_prompt())
            await asyncio.sleep(_HONEST_PAUSE_SECONDS)

    # ---------------------------------------------------------------------------------------------------- connections

    async def _connections(self) -> None:
        await self.quiet()
        half = Kind("half heads, all at once", lambda _: [], HEAD_SECONDS)
        half_scripts = [Script([b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Half:"])] * self._size.num_half_heads
        self._results.kinds.append(await self._seen(half, half_scripts, self._closed(half_scripts, HEAD_SECONDS)))
        slow = Kind("slow bodies, all at once", lambda _: [], BODY_RATE_SECONDS)
        slow_scripts = [KINDS["a_body_byte_by_byte"].make(self._world.maker)[0]] * self._size.num_slow_bodies
        self._results.kinds.append(await self._seen(slow, slow_scripts, self._closed(slow_scripts, BODY_RATE_SECONDS)))
        await self._reconnecting_workers()

    async def _closed(self, scripts: Sequence[Script], limit_seconds: float) -> list[Answer]:
        give_up = limit_seconds + 4 * _CLOSE_SECONDS
        return list(await asyncio.gather(*(self._world.send(script, give_up) for script in scripts)))

    async def _reconnecting_workers(self) -> None:
        world, seconds = self._world, self._size.crowd_seconds
        world.ping_seconds()
        await asyncio.sleep(self._size.quiet_seconds)
        quiet = world.ping_seconds()
        crowd = world.start_crowd(self._size.num_workers)
        await asyncio.sleep(seconds)
        arriving = world.ping_seconds()
        crowd.signal(signal.SIGUSR1)
        await asyncio.sleep(seconds)
        title = f"{self._size.num_workers} workers reconnect at once"
        self._results.lags.append(Lag(title, quiet, [*arriving, *world.ping_seconds()]))


if __name__ == "__main__":
    sys.exit(main())
