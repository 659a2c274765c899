"""Replaces all workers by ones of another numerics class under streams, fails half-way once, and goes back.

    python -m benchmarks.rolling [--quick] [--json FILE] [--markdown FILE]

`tandem up` serves the built-in model. Clients ask requests of 64 to 256 tokens (greedy, seeded, constrained), first
undisturbed, then again and again while `tandem up --replace` runs three times: to workers with another
`--numerics-tag`, to workers of which the second kind cannot start (the roll is taken back), and back to the first tag.
The kernels are the same ones, so every answer has to be the undisturbed one, byte for byte, whichever class gave which
part; the seams that an answer tells of have to be those of its events.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx

from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.report import Rows
from benchmarks.lib.served import Served
from benchmarks.lib.stats import percentile
from benchmarks.rolling.streams import Ask, Seen, asks, stream

MAX_SEAMED_SHARE = 0.10
MAX_TTFT_RATIO = 1.5
_ROLL_SECONDS = 600.0
_NUM_CLASSES = 3
"""Before, after, and that of the decode workers that a roll took back."""
_TAGS = ("TANDEM_PREFILL_NUMERICS_TAG", "TANDEM_DECODE_NUMERICS_TAG")


@dataclass(frozen=True)
class Size:
    num_workers: int
    """Of each role."""
    num_streams: int
    shortest: int
    longest: int
    num_at_once: int


FULL = Size(2, 200, 64, 256, 6)
QUICK = Size(1, 12, 16, 48, 3)


@dataclass
class Clients:
    """Ask the same requests in turn, over and over, until told to stop."""

    http: httpx.AsyncClient
    model: str
    asked: Sequence[Ask]
    seen: list[tuple[Ask, Seen]] = field(default_factory=list)

    async def ask_all(self, num_at_once: int) -> None:
        """Ask each request once."""
        await self._ask(num_at_once, iter(range(len(self.asked))))

    async def ask_until(self, stop: asyncio.Event, num_at_once: int) -> None:
        """Ask until `stop` is set and each request was asked once; end the streams that run."""
        numbers = iter(number for number in count())

        def more() -> bool:
            return not stop.is_set() or len(self.seen) < len(self.asked)

        async def one() -> None:
            while more():
                await self._one(next(numbers))

        await asyncio.gather(*(one() for _ in range(num_at_once)))

    async def _ask(self, num_at_once: int, numbers: object) -> None:
        left = iter(numbers)  # type: ignore[call-overload]

        async def one() -> None:
            for number in left:
                await self._one(number)

        await asyncio.gather(*(one() for _ in range(num_at_once)))

    async def _one(self, number: int) -> None:
        ask = self.asked[number % len(self.asked)]
        self.seen.append((ask, await stream(self.http, ask, self.model)))


async def measure(outcome: Outcome, folder: Path, progress: Progress, size: Size) -> None:
    """Serve, ask, roll three times; enter what clients saw."""
    num = str(size.num_workers)
    environment = {
        "TANDEM_PREFILL_NUM_KV_BLOCKS": "1024",
        "TANDEM_DECODE_NUM_KV_BLOCKS": "1024",
        "TANDEM_PREFILL_NUM_THREADS": "1",
        "TANDEM_DECODE_NUM_THREADS": "1",
    }
    flags = ("--prefill", num, "--decode", num)
    async with (
        Served(folder / "rolling", flags, environment, ("prefill", "decode", "kv")) as served,
        httpx.AsyncClient(base_url=served.base_url, timeout=300, trust_env=False) as http,
    ):
        asked = asks(size.num_streams, size.shortest, size.longest)
        steady = Clients(http, served.model, asked)
        progress(f"{len(asked)} streams, undisturbed")
        await steady.ask_all(size.num_at_once)
        failed = [f"{ask.kind}: {seen.error}" for ask, seen in steady.seen if seen.error]
        if failed:
            raise RuntimeError(f"{len(failed)} undisturbed streams failed: {failed[0]}")
        expected = {ask: seen.text for ask, seen in steady.seen}
        rolled = Clients(http, served.model, asked)
        stop = asyncio.Event()
        asking = asyncio.create_task(rolled.ask_until(stop, size.num_at_once))
        try:
            await _roll(served, progress, "to another numerics class", 0, dict.fromkeys(_TAGS, "other"))
            broken = {**dict.fromkeys(_TAGS, "third"), "TANDEM_PREFILL_NUM_KV_BLOCKS": "no number"}
            await _roll(served, progress, "to workers that cannot start", 1, broken)
            await _roll(served, progress, "back", 0, dict.fromkeys(_TAGS, ""))
            stop.set()
            await asking
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        enter(outcome, expected, steady.seen, rolled.seen)


async def _roll(served: Served, progress: Progress, what: str, code: int, environment: dict[str, str]) -> None:
    progress(f"roll {what}")
    drain = ("--drain-seconds", "120", "--start-seconds", "120")
    found, printed = await served.replace(*drain, seconds=_ROLL_SECONDS, environment=environment)
    if found != code:
        raise RuntimeError(f"the roll {what} ended with {found} instead of {code}:\n{printed}")


def enter(
    outcome: Outcome,
    expected: dict[Ask, str],
    steady: Sequence[tuple[Ask, Seen]],
    rolled: Sequence[tuple[Ask, Seen]],
) -> None:
    """Enter what the clients of both phases saw."""
    problems = [problem for ask, seen in rolled if (problem := seen.problem(ask, expected[ask]))]
    num_failed = sum(bool(seen.error) for _, seen in rolled)
    num_seamed = sum(bool(seen.seams) for _, seen in rolled)
    num_classes = len({fingerprint for _, seen in rolled for fingerprint in seen.fingerprints})
    is_complete = num_classes == _NUM_CLASSES
    before, meanwhile = (
        percentile([seen.ttft_seconds for _, seen in each if not seen.error], 99) for each in (steady, rolled)
    )
    figures = {
        "streams": float(len(rolled)),
        "failed": float(num_failed),
        "wrong": float(len(problems) - num_failed),
        "seamed_share": num_seamed / len(rolled),
        "classes": float(num_classes),
        "steady.ttft_p99_ms": 1000 * before,
        "rolling.ttft_p99_ms": 1000 * meanwhile,
        "ttft_p99_ratio": meanwhile / before,
    }
    outcome.figures |= figures
    rows: Rows = [
        ("undisturbed", f"{len(steady)}", "0", "0", "0", f"{1000 * before:.0f}"),
        (
            "three rolls",
            f"{len(rolled)}",
            f"{num_failed}",
            f"{len(problems) - num_failed}",
            f"{num_seamed} ({num_seamed / len(rolled):.1%})",
            f"{1000 * meanwhile:.0f}",
        ),
    ]
    head = ("", "streams", "failed", "other tokens", "with a seam", "TTFT p99, ms")
    outcome.sheets.append(Sheet("Streams while all workers are replaced", head, rows))
    outcome.notes += problems[:5]
    outcome.targets += [
        Target(f"{num_failed} of {len(rolled)} streams failed, none may", num_failed == 0),
        Target(f"{len(problems) - num_failed} streams had other tokens or untold seams, none may", not problems),
        Target(f"answers of {num_classes} numerics classes were seen, {_NUM_CLASSES} are expected", is_complete),
        Target(
            f"{num_seamed / len(rolled):.1%} of the streams have a seam, at most {MAX_SEAMED_SHARE:.0%} may",
            num_seamed <= MAX_SEAMED_SHARE * len(rolled),
        ),
        Target(
            f"TTFT p99 is {meanwhile / before:.2f} times the undisturbed one, at most {MAX_TTFT_RATIO} are allowed",
            meanwhile <= MAX_TTFT_RATIO * before,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    chosen = parser("rolling", __doc__ or "", "12 short streams, one worker of each role").parse_args(arguments)
    size = QUICK if chosen.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(outcome, folder, progress, size)

    conditions = {
        "workers": f"{size.num_workers} prefill, {size.num_workers} decode; one more of a role while it is replaced",
        "streams": f"{size.num_at_once} at once, {size.shortest} to {size.longest} tokens",
    }
    return run("rolling", chosen, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
