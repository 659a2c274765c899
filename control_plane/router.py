"""Which prefill and which decode worker should a request go to, and why?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from control_plane.registry import Worker, WorkerRegistry
from runtime.errors import ModelNotFound, Overloaded, Unavailable
from tandem.v1 import types_pb2 as pb

_ASSUMED_PREFILL_TOKENS_PER_SECOND = 1000.0
_ASSUMED_STEP_SECONDS = 0.05


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

    def forget(self, incarnation: str) -> None:
        self.prefill_tokens.pop(incarnation, None)
        self.decode_tokens.pop(incarnation, None)


class Router:
    """Chooses by tokens in flight per worker, free KV blocks and measured speed."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._registry = registry
        self.in_flight = InFlight()

    def choose(self, model_id: str, num_prompt_tokens: int, max_tokens: int, avoid: Collection[str] = ()) -> Route:
        """Return a route; `avoid` holds incarnations that refused or failed.

        Raises ModelNotFound if nobody serves the model, Unavailable if nobody can right now.
        """
        decodes = self._rank_decodes(
            self._usable(model_id, pb.WORKER_ROLE_DECODE, avoid), num_prompt_tokens, max_tokens
        )
        prefills = self._usable(model_id, pb.WORKER_ROLE_PREFILL, avoid)
        if not decodes:
            raise self._nobody(model_id, avoid)
        prefill = self._best_prefill(prefills, num_prompt_tokens)
        predicted = {"decode_step": _step_ms(decodes[0])}
        if prefill is None:
            why = "no KV service" if prefills else "no prefill worker"
            reason = f"{why}: decode computes the prompt"
        else:
            predicted["prefill"] = self._prefill_ms(prefill, num_prompt_tokens)
            reason = f"fewest tokens in flight of {len(prefills)} prefill and {len(decodes)} decode workers"
        return Route(prefill, tuple(decodes), reason, predicted)

    def _usable(self, model_id: str, role: pb.WorkerRole.ValueType, avoid: Collection[str]) -> list[Worker]:
        workers = self._registry.workers(role)
        return [worker for worker in workers if worker.serves(model_id) and worker.incarnation not in avoid]

    def _rank_decodes(self, workers: list[Worker], num_prompt_tokens: int, max_tokens: int) -> list[Worker]:
        """Order by whether the prompt's blocks seem to fit, then by tokens in flight per block of the pool."""

        def cost(worker: Worker) -> tuple[bool, float, str]:
            pool = worker.load.kv
            num_free_tokens = (pool.num_free_blocks + pool.num_cached_blocks) * max(1, pool.tokens_per_block)
            num_mine = self.in_flight.decode_tokens[worker.incarnation]
            num_in_flight = max(num_mine, worker.load.num_tokens_in_flight) + num_prompt_tokens + max_tokens
            is_tight = num_free_tokens < num_prompt_tokens + num_mine - worker.load.num_tokens_in_flight
            return is_tight, num_in_flight / max(1, pool.num_total_blocks * pool.tokens_per_block), worker.worker_id

        return sorted(workers, key=cost)

    def _best_prefill(self, workers: list[Worker], num_prompt_tokens: int) -> Worker | None:
        hosts = {service.host_id for service in self._registry.kv_services()}
        reachable = [worker for worker in workers if worker.info.host_id in hosts]
        return min(
            reachable, key=lambda worker: (self._prefill_ms(worker, num_prompt_tokens), worker.worker_id), default=None
        )

    def _prefill_ms(self, worker: Worker, num_prompt_tokens: int) -> float:
        """Return the milliseconds until this prompt would be computed: what is before it, and itself."""
        num_before = max(self.in_flight.prefill_tokens[worker.incarnation], worker.load.num_tokens_in_flight)
        return 1000.0 * (num_before + num_prompt_tokens) / _prefill_rate(worker)

    def _nobody(self, model_id: str, avoid: Collection[str]) -> Exception:
        served = sorted({worker.info.card.model_id for worker in self._registry.workers() if worker.info.card.model_id})
        if avoid and model_id in served:
            return Overloaded("every worker refused the request; try again", retry_after_seconds=1.0)
        if model_id in served:
            return Unavailable(
                f"no decode worker for {model_id!r} is ready; see GET /v1/workers", retry_after_seconds=2.0
            )
        return ModelNotFound(f"no worker serves {model_id!r}; served here: {', '.join(served) or 'nothing yet'}")


def _prefill_rate(worker: Worker) -> float:
    """Return prompt tokens per second as measured over the worker's life."""
    counters = worker.load.counters
    seconds = counters.get("step_seconds", 0.0)
    num_tokens = counters.get("prompt_tokens_computed", 0.0)
    return num_tokens / seconds if num_tokens > 0 and seconds > 0 else _ASSUMED_PREFILL_TOKENS_PER_SECOND


def _step_ms(worker: Worker) -> float:
    counters = worker.load.counters
    num_steps = counters.get("steps", 0.0)
    return 1000.0 * (counters["step_seconds"] / num_steps if num_steps > 0 else _ASSUMED_STEP_SECONDS)
