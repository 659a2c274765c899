"""Faults that are injected into real processes, and the alerts that each must raise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from unittest import mock

from control_plane.routing.prefix_index import PrefixMatch
from tests.alerts.scene import Scene, stopped, stuttering

Expected = tuple[str, dict[str, str]]
"""The name of an alert, and labels that it has."""


@dataclass(frozen=True)
class Fault:
    """The cause lasts as long as the block of `inject`; after it all is repaired."""

    name: str
    alerts: Sequence[Expected]
    inject: Callable[[Scene], AbstractAsyncContextManager[None]]
    ended: Sequence[Expected] = ()
    """Alerts of an earlier fault that the repair ends, too."""


@asynccontextmanager
async def slow_workers(scene: Scene) -> AsyncIterator[None]:
    """The prefill worker stands still for 0.6 s, again and again: first tokens are late, and later than predicted."""
    async with scene.traffic(num_clients=12), stuttering(scene.services("prefill-0"), 0.6, 0.02):
        yield
    async with scene.traffic():
        await scene.prometheus.is_quiet("TandemTtftBudgetBurn")


@asynccontextmanager
async def wrong_index(scene: Scene) -> AsyncIterator[None]:
    """The index finds every prompt in every pool, as after evictions that nobody has told of."""
    gateway = scene.fleet.gateway
    index = gateway.dispatcher.router.prefixes

    def find(block_hashes: Sequence[bytes], space: bytes = b"") -> PrefixMatch:
        return PrefixMatch({worker.incarnation: len(block_hashes) for worker in gateway.registry.workers()}, {})

    with mock.patch.object(index, "find", find):
        async with scene.traffic():
            yield


@asynccontextmanager
async def stalled_loop(scene: Scene) -> AsyncIterator[None]:
    """The KV service stands still for 0.12 s, again and again: short enough that its metrics can be read."""
    async with stuttering(scene.services("kv-0"), 0.12, 0.1):
        yield


@asynccontextmanager
async def full_queue(scene: Scene) -> AsyncIterator[None]:
    """More requests come than the workers have memory for, and than the queue takes."""
    callers = [asyncio.create_task(_ask_often(scene, number)) for number in range(48)]
    try:
        yield
    finally:
        for each in callers:
            each.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


async def _ask_often(scene: Scene, number: int) -> None:
    for turn in range(1_000_000):
        if await scene.ask(f"{number} {turn}: " + "Tell me more about KV caches. " * 12, 60, ignore_eos=True) == 429:
            await asyncio.sleep(0.05)  # as hasty clients do


@asynccontextmanager
async def process_that_stands_still(scene: Scene) -> AsyncIterator[None]:
    """The prefill worker stops for longer than any lease: its memory stays mapped, and belongs to nobody."""
    async with stopped(scene.services("prefill-0")):
        yield
    await scene.fleet.ready()


@asynccontextmanager
async def dead_workers(scene: Scene) -> AsyncIterator[None]:
    """A decode worker is killed in the middle of streams, then the other one too. One is started again."""
    [first, second] = scene.services("decode-0", "decode-1")
    async with scene.traffic(num_clients=6, max_tokens=150):
        await scene.has_streams("decode-0")
        first.kill()
        await scene.prometheus.fires("TandemMigrations")
        second.kill()
        try:
            yield
        finally:
            del scene.fleet.services["decode-1"]
            scene.start_worker("decode-0")
            await scene.fleet.ready()


DEVICE_ERRORS: Sequence[Expected] = [
    ("TandemDeviceError", {"error": "xid", "xid": "79", "device": "0"}),
    ("TandemDeviceError", {"error": "ecc", "device": "0"}),
]
"""The stub of NVML has these when `decode-1` starts."""
THROTTLED: Expected = ("TandemDeviceThrottled", {"reason": "hw_thermal_slowdown", "device": "0"})
"""As long as `decode-1` lives."""
CERTIFICATES: Sequence[Expected] = [("TandemCertificateExpires", {"role": role}) for role in ("kv", "prefill")]
"""From 40 s left until the renewal, at 30 s."""

FAULTS = [
    Fault(
        "slow workers",
        [
            ("TandemTtftBudgetBurn", {"burn": "fast"}),
            ("TandemTtftBudgetBurn", {"burn": "slow"}),
            ("TandemRoutePrediction", {}),
        ],
        slow_workers,
    ),
    Fault("an index that is wrong", [("TandemCachePrediction", {"kind": "missing"})], wrong_index),
    Fault("a stalled loop", [("TandemLoopLag", {"role": "kv"})], stalled_loop),
    Fault(
        "a full queue",
        [
            ("TandemQueue", {"signal": "length"}),
            ("TandemQueue", {"signal": "wait"}),
            ("TandemErrorBudgetBurn", {"burn": "fast"}),
            ("TandemErrorBudgetBurn", {"burn": "slow"}),
        ],
        full_queue,
    ),
    Fault(
        "a process that stands still",
        [("TandemTargetDown", {"role": "prefill"}), ("TandemOrphanedKv", {})],
        process_that_stands_still,
    ),
    Fault(
        "dead workers",
        [("TandemMigrations", {}), ("TandemNoWorkers", {}), ("TandemWorkerLost", {})],
        dead_workers,
        ended=[THROTTLED],
    ),
]
