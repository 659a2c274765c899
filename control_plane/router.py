"""Which prefill and which decode worker should a request go to, and why?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from control_plane.affinity import SessionAffinity
from control_plane.registry import Worker, WorkerRegistry
from runtime.errors import ContextTooLong, ModelNotFound, Overloaded, TandemError, Unavailable
from tandem.v1 import types_pb2 as pb

_ASSUMED_PREFILL_TOKENS_PER_SECOND = 1000.0
_ASSUMED_STEP_SECONDS = 0.05
_AFFINITY_SLACK = 1.25
"""A session stays where it was while that is at most so many times as loaded as the best."""


@dataclass(frozen=True, eq=False)
class Route:
    """Where a request is to go. Decode workers come in order of preference: their answer decides, not this guess."""

    prefill: Worker | None
    """None: the decode worker computes the prompt itself."""
    decodes: tuple[Worker, ...]
    reason: str
    predicted_ms: dict[str, float]

    def describe(self) -> dict[str, Any]:
        return {
            "prefill": self.prefill.worker_id if self.prefill else "",
            "decode": self.decodes[0].worker_id,
            "reason": self.reason,
            **{f"predicted_{name}_ms": round(value, 3) for name, value in self.predicted_ms.items()},
        }


@dataclass
class InFlight:
    """Tokens that this gateway has sent to workers and that have not come back; by incarnation.

    Kept here and not only read from heartbeats, which are up to a second old: a burst would all go to one worker.
    """

    prefill_tokens: Counter[str] = field(default_factory=Counter)
    decode_tokens: Counter[str] = field(default_factory=Counter)

    def total(self) -> int:
        return self.prefill_tokens.total() + self.decode_tokens.total()


class Router:
    """Chooses by tokens in flight per worker, free KV blocks and measured speed."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self.in_flight = InFlight()
        self.affinity = SessionAffinity()

    def choose(self, model_id: str, num_prompt_tokens: int, max_tokens: int, avoid: Collection[str] = ()) -> Route:
        """Return a route; `avoid` holds incarnations that refused or failed.

        Raises ModelNotFound if nobody serves the model, Unavailable if nobody can right now, Overloaded if all that
        could are in `avoid`, ContextTooLong if no pool could ever hold the request.
        """
        fitting = self._large_enough(self._usable(model_id, pb.WORKER_ROLE_DECODE, ()), num_prompt_tokens, max_tokens)
        decodes = [worker for worker in fitting if worker.incarnation not in avoid]
        decodes = self._rank_decodes(decodes, num_prompt_tokens, max_tokens)
        prefills = self._usable(model_id, pb.WORKER_ROLE_PREFILL, avoid)
        if not decodes:
            raise self._nobody(model_id, avoid)
        prefill = self._best_prefill(prefills, num_prompt_tokens) if decodes[0].info.kv_address else None
        predicted = {"decode_step": _step_ms(decodes[0])}
        if prefill is None:
            why = "no KV service" if prefills else "no prefill worker"
            reason = f"{why}: decode computes the prompt"
        else:
            predicted["prefill"] = self._prefill_ms(prefill, num_prompt_tokens)
            reason = f"fewest tokens in flight of {len(prefills)} prefill and {len(decodes)} decode workers"
        return Route(prefill, tuple(decodes), reason, predicted)

    def with_affinity(self, route: Route, session_id: str, avoid: Collection[str] = ()) -> Route:
        """Return the route with the workers that served the session last, unless they are much busier than its own."""
        served = self.affinity.of(session_id)
        if served is None:
            return route
        decodes = sorted(route.decodes, key=lambda worker: worker.incarnation != served.decode)  # stable
        best = route.decodes[0]
        if decodes[0] is not best and self._decode_load(decodes[0]) > _AFFINITY_SLACK * self._decode_load(best):
            decodes = list(route.decodes)
        prefill = route.prefill and self._prefill_of_session(route.prefill, served.prefill, avoid)
        return replace(route, prefill=prefill, decodes=tuple(decodes))

    def is_busy(self, decodes: Collection[Worker]) -> bool:
        """Whether a request would have to wait at each of these decode workers."""
        return all(
            worker.load.num_waiting > 0 or worker.load.kv.num_free_blocks + worker.load.kv.num_cached_blocks == 0
            for worker in decodes
        )

    def _prefill_of_session(self, best: Worker, incarnation: str, avoid: Collection[str]) -> Worker:
        workers = self._usable(best.info.card.model_id, pb.WORKER_ROLE_PREFILL, avoid)
        for worker in self._reachable(workers):
            is_near = self._prefill_ms(worker, 1) <= _AFFINITY_SLACK * self._prefill_ms(best, 1)
            if worker.incarnation == incarnation and is_near:
                return worker
        return best

    def _usable(self, model_id: str, role: pb.WorkerRole.ValueType, avoid: Collection[str]) -> list[Worker]:
        workers = self._registry.workers(role)
        return [worker for worker in workers if worker.serves(model_id) and worker.incarnation not in avoid]

    def _large_enough(self, workers: list[Worker], num_prompt_tokens: int, max_tokens: int) -> list[Worker]:
        """Return the workers that could hold the request if nothing else ran there; raises if none could."""
        fitting = [worker for worker in workers if _could_hold(worker, num_prompt_tokens + max_tokens)]
        if workers and not fitting:
            raise ContextTooLong(
                f"{num_prompt_tokens:,} prompt tokens and up to {max_tokens:,} answer tokens fit no decode worker's KV "
                f"pool, the largest has {max(map(_pool_tokens, workers)):,}; lower max_tokens, shorten the prompt or "
                "give the workers more KV memory",
                field="max_tokens",
            )
        return fitting

    def _rank_decodes(self, workers: list[Worker], num_prompt_tokens: int, max_tokens: int) -> list[Worker]:
        """Order by whether the prompt's blocks seem to fit, then by tokens in flight per block of the pool."""

        def cost(worker: Worker) -> tuple[bool, float, str]:
            pool = worker.load.kv
            num_free_tokens = (pool.num_free_blocks + pool.num_cached_blocks) * max(1, pool.tokens_per_block)
            num_mine = self.in_flight.decode_tokens[worker.incarnation]
            is_tight = num_free_tokens < num_prompt_tokens + num_mine - worker.load.num_tokens_in_flight
            return is_tight, self._decode_load(worker, num_prompt_tokens + max_tokens), worker.worker_id

        return sorted(workers, key=cost)

    def _decode_load(self, worker: Worker, num_tokens: int = 1) -> float:
        """Return what share of its pool's tokens a decode worker would have in flight with `num_tokens` more."""
        num_mine = self.in_flight.decode_tokens[worker.incarnation]
        num_in_flight = max(num_mine, worker.load.num_tokens_in_flight) + num_tokens
        return num_in_flight / max(1, _pool_tokens(worker))

    def _best_prefill(self, workers: list[Worker], num_prompt_tokens: int) -> Worker | None:
        reachable = self._reachable(workers)
        return min(
            reachable, key=lambda worker: (self._prefill_ms(worker, num_prompt_tokens), worker.worker_id), default=None
        )

    def _reachable(self, workers: list[Worker]) -> list[Worker]:
        """Return those whose KV cache others can get: they are connected to a KV service that is here."""
        addresses = {service.address for service in self._registry.kv_services()}
        return [worker for worker in workers if worker.info.kv_address in addresses]

    def _prefill_ms(self, worker: Worker, num_prompt_tokens: int) -> float:
        """Return the milliseconds until this prompt would be computed: what is before it, and itself."""
        num_before = max(self.in_flight.prefill_tokens[worker.incarnation], worker.load.num_tokens_in_flight)
        return 1000.0 * (num_before + num_prompt_tokens) / _prefill_rate(worker)

    def _nobody(self, model_id: str, avoid: Collection[str]) -> TandemError:
        served = sorted({worker.info.card.model_id for worker in self._registry.workers() if worker.info.card.model_id})
        if avoid and model_id in served:
            return Overloaded("every worker refused the request; try again", retry_after_seconds=1.0)
        if model_id in served:
            return Unavailable(
                f"no decode worker for {model_id!r} is ready; see GET /v1/workers", retry_after_seconds=2.0
            )
        return ModelNotFound(f"no worker serves {model_id!r}; served here: {', '.join(served) or 'nothing yet'}")


def _pool_tokens(worker: Worker) -> int:
    return worker.load.kv.num_total_blocks * worker.load.kv.tokens_per_block


def _could_hold(worker: Worker, num_tokens: int) -> bool:
    """The last token's KV is never needed; a worker that has not told its pool yet decides itself."""
    num_needed = min(num_tokens, worker.info.card.context_length + 1) - 1
    return not _pool_tokens(worker) or num_needed <= _pool_tokens(worker)


def _prefill_rate(worker: Worker) -> float:
    """Return prompt tokens per second as measured over the worker's life."""
    counters = worker.load.counters
    seconds = counters.get("step_seconds", 0.0)
    num_tokens = counters.get("prompt_tokens_computed", 0.0)
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else _ASSUMED_PREFILL_TOKENS_PER_SECOND


def _step_ms(worker: Worker) -> float:
    counters = worker.load.counters
    num_steps = counters.get("steps", 0.0)
    return 1000.0 * (counters.get("step_seconds", 0.0) / num_steps if num_steps > 0 else _ASSUMED_STEP_SECONDS)
