"""The share of prompts that caches save is counted per worker and start, and the tiers are sums over the fleet."""

from __future__ import annotations

from control_plane.fleet.registry import WorkerRegistry
from control_plane.live.cache_history import MAX_POINTS, CacheHistory
from tandem.v1 import types_pb2 as pb
from tests.herd import GIB, Herd, load_of


class World:
    def __init__(self, num_workers: int) -> None:
        self.now = 0.0
        self.registry = WorkerRegistry(3600.0, 7200.0, lambda: self.now)
        self.herd = Herd(self.registry, num_workers)
        self.history = CacheHistory(self.registry, lambda: self.now)

    def beat(self, place: int, computed: float, cached: float, loaded: float) -> None:
        load = load_of(place)
        load.counters["prompt_tokens_computed"] = computed
        load.counters["prompt_tokens_cached"] = cached
        load.counters["prompt_tokens_loaded"] = loaded
        self.herd.beat(place, load)

    async def sample(self) -> dict[str, object]:
        self.now += 5
        await self.history.sample()
        return self.history.points[-1].to_json()


async def test_the_first_sample_counts_nothing_and_the_next_what_came_since() -> None:
    world = World(2)
    world.beat(0, 1000, 500, 100)
    first = await world.sample()
    assert (first["prompt_tokens"], first["hit_share"]) == (0, None) and world.history.hit_share() is None
    world.beat(0, 1100, 800, 200)
    second = await world.sample()
    assert (second["prompt_tokens"], second["pool_tokens"], second["store_tokens"]) == (400, 200, 100)
    assert second["hit_share"] == world.history.hit_share() == 0.75


async def test_a_worker_that_starts_again_counts_from_zero_and_one_that_leaves_subtracts_nothing() -> None:
    world = World(2)
    world.beat(0, 1000, 1000, 0)
    await world.sample()
    world.herd.leave(0)
    assert (await world.sample())["prompt_tokens"] == 0
    info = pb.WorkerInfo()
    info.CopyFrom(world.herd.infos[0])
    info.incarnation = "another"
    load = load_of(0)
    load.counters["prompt_tokens_computed"] = 30
    world.registry.register(info, load)
    assert (await world.sample())["prompt_tokens"] == 30


async def test_tiers_are_the_bytes_of_all_pools_and_stores() -> None:
    world = World(8)
    await world.sample()
    pool, store, disk = world.history.tiers
    assert pool["total_bytes"] == 7 * 1000 * (2 << 20) and pool["used_bytes"] == 7 * 300 * (2 << 20)
    assert pool["used_bytes"] + pool["cached_bytes"] + pool["free_bytes"] == pool["total_bytes"]
    assert (store["cached_bytes"], store["free_bytes"], disk["total_bytes"]) == (24 * GIB, 40 * GIB, 0)


async def test_the_history_is_bounded() -> None:
    world = World(1)
    for _ in range(MAX_POINTS + 5):
        await world.sample()
    assert len(world.history.points) == MAX_POINTS and world.history.points[0].time_ms == 30_000
