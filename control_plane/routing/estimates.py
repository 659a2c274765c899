"""How soon would a worker have a prompt's KV cache, and what of it would it find rather than compute?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.cost_model import MEMORY_BYTES_PER_SECOND, Speeds
from control_plane.routing.prefix_index import Cached, PrefixIndex, Runs
from tandem.v1 import types_pb2 as pb

HandOver = Literal["if_cheaper", "always", "never"]

_SHARE_OF_OTHERS = 0.5
"""A running answer that waits for another's prompt counts half as much as that prompt itself. One is always counted: an
idle decode worker may be given an answer to write at any moment, and would be free for it if prefill reads."""


@dataclass(frozen=True)
class Ask:
    """What of a request decides where it goes."""

    model_id: str
    num_prompt_tokens: int
    max_tokens: int
    block_hashes: Sequence[bytes] = ()
    """Of the full blocks; none: the prompt's cache is nobody's."""
    block_size: int = 1
    session_id: str = ""
    hand_over: HandOver = "if_cheaper"
    """Whether a prefill worker reads the prompt: a probe always has to go the whole way, a choice that moves never."""


@dataclass
class InFlight:
    """What this gateway has sent to workers and has not come back; by incarnation.

    Kept here and not only read from heartbeats, which are up to a second old: a burst would all go to one worker.
    """

    prefill_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that are to be computed before a first one is sampled, at prefill workers and at decode workers."""
    decode_tokens: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        return self.prefill_tokens.total() + self.decode_tokens.total() + self.answers.total()


@dataclass(frozen=True, eq=False)
class Reading:
    """What it would take one worker to have the KV cache of a prompt."""

    worker: Worker
    cached: Cached
    """Tokens, as the index has them; the times know how far it has been right lately."""
    source: str
    """Address of the KV service that the remote ones come from."""
    num_computed_tokens: int
    queue_ms: float
    load_ms: float
    compute_ms: float

    @property
    def total_ms(self) -> float:
        return self.queue_ms + self.load_ms + self.compute_ms

    def __str__(self) -> str:
        return (
            f"{self.worker.worker_id} in {self.total_ms:.1f} ms (queue {self.queue_ms:.1f}, load {self.load_ms:.1f}, "
            f"compute {self.compute_ms:.1f}; cached {self.cached.own} own, {self.cached.host} host, "
            f"{self.cached.remote} remote, {self.num_computed_tokens} to compute)"
        )


class Estimator:
    """Predicts readings from the prefix index, measured speeds and what is in flight."""

    def __init__(self, registry: WorkerRegistry, in_flight: InFlight, prefixes: PrefixIndex, speeds: Speeds) -> None:
        self._registry = registry
        self._in_flight = in_flight
        self._prefixes = prefixes
        self._speeds = speeds

    def runs(self, ask: Ask) -> Runs:
        """Return where the prompt's beginning lies; its last token is never taken from a cache."""
        num_useful = (ask.num_prompt_tokens - 1) // ask.block_size
        runs = self._prefixes.find(ask.block_hashes[:num_useful])
        return replace(runs, hosts={host: num for host, num in runs.hosts.items() if self._registry.store_of(host)})

    def reading(self, worker: Worker, ask: Ask, runs: Runs) -> Reading:
        """Predict a worker's reading of the whole prompt, what waits there before it included."""
        pool, rate = worker.load.kv, self._speeds.tokens_per_second(worker)
        blocks = runs.seen_from(worker.incarnation, worker.info.host_id)
        size = ask.block_size
        num_found = size * blocks.host * self._speeds.kept_promise(worker.info.host_id)
        source, fetch_ms = self._source(worker, blocks, size / rate)
        num_remote = size * blocks.remote if source else 0
        num_missing = max(1, round(ask.num_prompt_tokens - size * blocks.own - num_found - num_remote))
        return Reading(
            worker=worker,
            cached=Cached(size * blocks.own, size * blocks.host, num_remote, blocks.remote_host if source else ""),
            source=source,
            num_computed_tokens=num_missing,
            queue_ms=1000.0 * self._num_before(worker) / rate,
            load_ms=1000.0 * num_found / size * pool.bytes_per_block / MEMORY_BYTES_PER_SECOND + fetch_ms,
            compute_ms=1000.0 * num_missing / rate,
        )

    def local_ms(self, reading: Reading) -> float:
        """Return what a reading costs at a decode worker, the delay of the answers that run there included."""
        worker = reading.worker
        num_running = max(1, worker.load.num_running, self._in_flight.answers[worker.incarnation])
        own_ms = reading.load_ms + reading.compute_ms
        return reading.queue_ms + own_ms * (1 + _SHARE_OF_OTHERS * num_running)

    def hand_over_ms(self, reading: Reading) -> float:
        """Return what a reading costs at a prefill worker, the hand-over included."""
        return reading.total_ms + self._speeds.hand_over_ms

    def _source(self, worker: Worker, blocks: Cached, seconds_per_block: float) -> tuple[str, float]:
        """Return the KV service to fetch remote blocks from and the milliseconds; "" if computing them is sooner."""
        if not blocks.remote:
            return "", 0.0
        here, there = self._registry.store_of(worker.info.host_id), self._registry.store_of(blocks.remote_host)
        if here is None or there is None:
            return "", 0.0
        fetch_ms = self._speeds.fetch_ms(there, here, blocks.remote * worker.load.kv.bytes_per_block)
        is_sooner = fetch_ms < 1000.0 * blocks.remote * seconds_per_block
        return (there.info.address, fetch_ms) if is_sooner else ("", 0.0)

    def _num_before(self, worker: Worker) -> int:
        """A prefill worker reports what it has to read; what a decode worker reports are the answers it writes."""
        num_mine = self._in_flight.prefill_tokens[worker.incarnation]
        is_prefill = worker.role == pb.WORKER_ROLE_PREFILL
        return max(num_mine, worker.load.num_tokens_in_flight) if is_prefill else num_mine
