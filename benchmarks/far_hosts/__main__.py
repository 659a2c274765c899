"""Measures whether prompts are handed over between two hosts that are far apart where that is sooner, and nowhere else.

    python -m benchmarks.far_hosts [--quick] [--json FILE] [--markdown FILE]

Prefill is on one host and decode on another, each in a network namespace of its own. What their KV services say to each
other passes a link of 80 ms and 1 Gbit/s (`link.py`), with Linux's send buffers; the gateway is as near to both. Some
prompts begin with what prefill has in its pool. Each is asked as the router chooses; then another one that is as long,
and as cached, is asked the other way. An answer runs at decode all the while.

A way costs the time to the answer's second token, which is the first of decode where a prompt is handed over, and half
of the time in which decode computes the prompt: the answer that runs there waits for it (`SHARE_OF_OTHERS`).

Needs root (namespaces, TUN devices).
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.far_hosts.link import far_link
from benchmarks.lib.command import Outcome, Progress, Sheet, Target, parser, run
from benchmarks.lib.namespaces import NetworkHost, join, leave_network, why_not
from benchmarks.lib.random_model import made
from benchmarks.lib.report import Rows
from benchmarks.lib.stats import percentile
from control_plane.dispatch.dispatcher import Dispatcher
from control_plane.generation import TokenRequest
from control_plane.routing.cost_model import SHARE_OF_OTHERS, HandOver, RoutingRequest
from control_plane.routing.router import Route, Router
from tests.system.fleet import Fleet, token_request

ROUND_TRIP_MS, BITS_PER_SECOND = 80.0, 1e9
EQUAL = 1.1
"""Ways whose costs differ by less are equal: the same way twice differs as much."""
MAX_WRONG_SHARE = 0.05
_NEAR = "10.231.0.1", "10.231.0.2"
_FAR = "10.232.0.1", "10.232.0.2"
_SHAPE, _VOCABULARY = "far", 2000
_NUM_ANSWER_TOKENS = 4
_NUM_RUNNING_TOKENS = 1500
_DEADLINE_SECONDS = 300.0
_SMALL = (
    *("--dtype", "float32", "--num-threads", "1", "--max-model-len", "4096"),
    *("--kv-memory-bytes", str(640 << 20), "--speculation", "off"),
)


@dataclass(frozen=True)
class Size:
    """`num_pairs` of prompts are asked in each of both ways, after some that only teach."""

    num_pairs: int
    num_lessons: int
    lengths: tuple[int, int]


FULL, QUICK = Size(200, 12, (32, 3_200)), Size(6, 4, (32, 3_200))


@dataclass(frozen=True)
class Asked:
    """What one prompt took."""

    is_handed_over: bool
    first_ms: float
    """Until the first token."""
    own_ms: float
    """Until the second token."""
    delay_ms: float
    """In which decode computed the prompt."""
    num_computed: int
    """Prompt tokens that decode computed."""
    num_twice: int
    """Of them, those that prefill had computed."""

    @property
    def cost_ms(self) -> float:
        return self.own_ms + SHARE_OF_OTHERS * self.delay_ms


@dataclass(frozen=True)
class Pair:
    """Two prompts that are as long: one went where the router chose, the other one the other way."""

    num_tokens: int
    num_cached: int
    """Of them, in prefill's pool."""
    chosen: Asked
    other: Asked
    predicted_ms: tuple[float, float]
    """Of the hand-over and of decode, by the router."""

    @property
    def is_wrong(self) -> bool:
        return self.chosen.cost_ms > EQUAL * self.other.cost_ms

    @property
    def regret_ms(self) -> float:
        return max(0.0, self.chosen.cost_ms - self.other.cost_ms)


class _Forced(Router):
    """Chooses among the ways of one kind. All of the gateway's routers count its answers, and each learns by itself."""

    def __init__(self, router: Router, fleet: Fleet, hand_over: HandOver) -> None:
        super().__init__(fleet.registry, prefixes=router.prefixes)
        self.in_flight = router.in_flight
        self._forced: HandOver = hand_over

    def choose(self, request: RoutingRequest, avoid: Collection[str] = ()) -> Route:
        return super().choose(replace(request, hand_over=self._forced), avoid)


class Asker:
    """Asks prompts that nobody has seen."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._rng = random.Random(seed)
        router = Router(fleet.registry, "auto")
        self._auto = fleet.gateway.make_dispatcher(router)
        self._forced = {
            True: fleet.gateway.make_dispatcher(_Forced(router, fleet, "always")),
            False: fleet.gateway.make_dispatcher(_Forced(router, fleet, "never")),
        }
        worker = fleet.worker("decode")
        assert worker is not None, "ready before"
        self._model = worker.info.card.model_id

    async def pair(self, num_tokens: int, num_cached: int) -> Pair:
        """Ask as the router chooses, and then the other way."""
        chosen, route = await self._ask(self._auto, await self._prompt(num_tokens, num_cached))
        prompt = await self._prompt(num_tokens, num_cached)
        other, _ = await self._ask(self._forced[not chosen.is_handed_over], prompt)
        assert other.is_handed_over != chosen.is_handed_over, "it was forced"
        predicted = route["predicted_hand_over_ms"], route["predicted_local_ms"]
        return Pair(num_tokens, num_cached, chosen, other, predicted)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Let an answer run at decode."""
        task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            request = self._request(self._words(16), _NUM_RUNNING_TOKENS)
            stream = await self._forced[False].submit(request)
            try:
                async for _ in stream:
                    pass
            finally:
                await stream.aclose()

    async def _prompt(self, num_tokens: int, num_cached: int) -> list[int]:
        """Return a prompt of which prefill has so many tokens in its pool."""
        prompt = self._words(num_tokens)
        if num_cached:
            await self._ask(self._forced[True], prompt[:num_cached], num_answer_tokens=1)
        return prompt

    def _request(self, prompt: Sequence[int], num_answer_tokens: int) -> TokenRequest:
        return token_request(self._model, prompt, num_answer_tokens, deadline=time.monotonic() + _DEADLINE_SECONDS)

    def _words(self, number: int) -> list[int]:
        return self._rng.choices(range(10, _VOCABULARY), k=number)

    async def _ask(
        self, dispatcher: Dispatcher, prompt: Sequence[int], num_answer_tokens: int = _NUM_ANSWER_TOKENS
    ) -> tuple[Asked, dict[str, float]]:
        request = self._request(prompt, num_answer_tokens)
        begun, at = time.perf_counter(), []
        stream = await dispatcher.submit(request)
        async for delta in stream:
            at += [1000 * (time.perf_counter() - begun)] * len(delta.token_ids)
        ledger = stream.state.choices[0].ledger
        is_handed_over = stream.state.prefill_ledger is not None
        computes = ledger is not None and not is_handed_over
        delay_ms = (ledger.first_token_ns - ledger.scheduled_ns) / 1e6 if computes and ledger is not None else 0.0
        num_computed = ledger.num_computed_tokens if ledger is not None else 0
        num_twice = 0 if ledger is None else ledger.num_reprefill_tokens
        if is_handed_over:
            num_twice = max(num_twice, num_computed)
        return Asked(is_handed_over, at[0], at[min(1, len(at) - 1)], delay_ms, num_computed, num_twice), dict(
            stream.route
        )


@asynccontextmanager
async def far_fleet(folder: Path, here: NetworkHost, there: NetworkHost, progress: Progress) -> AsyncIterator[Fleet]:
    """Run a gateway and prefill on this host, and decode on the other one."""
    flags = ("--model", str(made(folder, _SHAPE)), *_SMALL)
    networks = tuple(f"{address}/32" for address in _FAR)  # the KV services' other interfaces
    fleet = Fleet(
        folder,
        grpc_listen=f"{here.address}:0",
        insecure_plaintext=True,
        worker_networks=networks,
        local_prefill="auto",
    )
    async with fleet:
        for host, far, role, core in ((here, _FAR[0], "prefill", "0"), (there, _FAR[1], "decode", "1")):
            place = ("--host-id", f"host-{host.name}")

            def start(
                host: NetworkHost = host,
                far: str = far,
                role: str = role,
                core: str = core,
                place: tuple[str, ...] = place,
            ) -> None:
                fleet.start("kv", f"kv-{host.name}", *place, "--listen", f"{far}:0", "--store-bytes", "0")
                fleet.start(role, role, *place, "--listen", f"{host.address}:0", "--cpus", core, *flags)

            progress(f"starting {role} on host {host.name}")
            host.run(start)
        await fleet.ready()
        yield fleet


async def measure(outcome: Outcome, size: Size, folder: Path, progress: Progress) -> None:
    """Ask all prompts, and enter what was found."""
    here, there = NetworkHost("a", _NEAR[0], is_new=False), NetworkHost("b", _NEAR[1])
    try:
        join(here, there)
        with far_link(here, there, _FAR, ROUND_TRIP_MS, BITS_PER_SECOND):
            async with far_fleet(folder, here, there, progress) as fleet:
                asker, rng = Asker(fleet, 1), random.Random(2)
                async with asker.running():
                    pairs = [
                        await _next_pair(asker, size, rng, number, progress)
                        for number in range(size.num_lessons + size.num_pairs)
                    ]
    finally:
        here.close()
        there.close()
    enter(outcome, pairs[size.num_lessons :])


async def _next_pair(asker: Asker, size: Size, rng: random.Random, number: int, progress: Progress) -> Pair:
    """Ask for a pair whose length is as often of one order of magnitude as of another; half of them cached."""
    least, most = size.lengths
    num_tokens = round(least * (most / least) ** rng.random())
    num_cached = num_tokens - max(16, num_tokens // 16) if number % 2 else 0
    pair = await asker.pair(num_tokens, max(0, num_cached))
    if number % 20 == 19:
        progress(f"{number + 1} pairs")
    return pair


_KINDS = (("computed by prefill", False), ("in prefill's pool", True))


def enter(outcome: Outcome, pairs: Sequence[Pair]) -> None:
    """Enter figures, tables and targets."""
    rows: Rows = []
    for name, is_cached in _KINDS:
        for is_handed_over in (True, False):
            of_kind = [
                each
                for each in pairs
                if (each.num_cached > 0) == is_cached and each.chosen.is_handed_over == is_handed_over
            ]
            rows.append(_row(name, "handed over" if is_handed_over else "read by decode", of_kind))
    head = (
        "prompts",
        "the router chose",
        "number",
        "tokens",
        "wrong",
        "cost, p50 ms",
        "the other way, p50 ms",
        "lost, ms",
    )
    outcome.sheets.append(Sheet("Where prompts went, beside the same the other way", head, rows))
    handed_over = [each for each in pairs if each.chosen.is_handed_over]
    wrong = [each for each in pairs if each.is_wrong]
    num_twice = sum(each.num_twice for pair in pairs for each in (pair.chosen, pair.other))
    best_ms = sum(min(each.chosen.cost_ms, each.other.cost_ms) for each in pairs)
    always_ms = sum(_way(each, is_handed_over=True).cost_ms for each in pairs)
    never_ms = sum(_way(each, is_handed_over=False).cost_ms for each in pairs)
    chosen_ms = sum(each.chosen.cost_ms for each in pairs)
    outcome.figures |= {
        "num_pairs": len(pairs),
        "num_handed_over": len(handed_over),
        "num_wrongly_handed_over": sum(each.chosen.is_handed_over for each in wrong),
        "num_wrongly_local": sum(not each.chosen.is_handed_over for each in wrong),
        "num_later_for_itself": sum(each.chosen.own_ms > EQUAL * each.other.own_ms for each in pairs),
        "chosen_over_best": chosen_ms / best_ms,
        "always_over_best": always_ms / best_ms,
        "never_over_best": never_ms / best_ms,
        "num_computed_twice": num_twice,
    }
    ratios = (("as the router chose", chosen_ms), ("always handed over", always_ms), ("never handed over", never_ms))
    sums: Rows = [(name, f"{ms / 1000:,.1f}", f"{ms / best_ms:.3f}") for name, ms in ratios]
    outcome.sheets.append(Sheet("Costs of all prompts", ("way", "s", "of the best way of each"), sums))
    share = len(wrong) / len(pairs)
    outcome.targets += [
        Target(
            f"{len(wrong)} of {len(pairs)} prompts went the way that was more than {EQUAL - 1:.0%} dearer, "
            f"{MAX_WRONG_SHARE:.0%} are allowed",
            share <= MAX_WRONG_SHARE,
        ),
        Target(
            f"{len(handed_over)} prompts were handed over and {len(pairs) - len(handed_over)} were not",
            0 < len(handed_over) < len(pairs),
        ),
        Target(f"decode computed {num_twice} prompt tokens that prefill had computed", num_twice == 0),
    ]


def _row(name: str, way: str, pairs: Sequence[Pair]) -> tuple[str, ...]:
    if not pairs:
        return name, way, "0", "", "", "", "", ""
    lengths = [each.num_tokens for each in pairs]
    return (
        name,
        way,
        f"{len(pairs)}",
        f"{min(lengths):,} to {max(lengths):,}",
        f"{sum(each.is_wrong for each in pairs)}",
        f"{percentile([each.chosen.cost_ms for each in pairs], 50):,.0f}",
        f"{percentile([each.other.cost_ms for each in pairs], 50):,.0f}",
        f"{sum(each.regret_ms for each in pairs):,.0f}",
    )


def _way(pair: Pair, *, is_handed_over: bool) -> Asked:
    return pair.chosen if pair.chosen.is_handed_over == is_handed_over else pair.other


def _of_tcp(setting: str) -> str:
    return " ".join(Path("/proc/sys/net/ipv4", setting).read_text().split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save; return 1 if a target is missed."""
    options = parser("far_hosts", __doc__ or "", "six pairs").parse_args(arguments)
    if reason := why_not():
        raise SystemExit(reason)
    leave_network()  # before there are threads: the gateway and all that asks is on the first host
    size = QUICK if options.quick else FULL

    async def measured(outcome: Outcome, folder: Path, progress: Progress) -> None:
        await measure(outcome, size, folder, progress)

    conditions = {
        "model": f"random Llama, shape {_SHAPE}, float32, 16 KiB of KV per token; one core each",
        "link": f"{ROUND_TRIP_MS:g} ms there and back, {BITS_PER_SECOND / 1e9:g} Gbit/s; packets of 65,000 bytes",
        "tcp": f"{_of_tcp('tcp_congestion_control')}, send buffers of {_of_tcp('tcp_wmem')} bytes, "
        "no slow start after a pause",
        "prompts": f"{size.lengths[0]} to {size.lengths[1]:,} tokens",
    }
    return run("far_hosts", options, conditions, measured)


if __name__ == "__main__":
    sys.exit(main())
