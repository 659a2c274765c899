"""Which prefill and which decode worker should a request go to, and why?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from control_plane.fleet.registry import Worker, WorkerRegistry
from control_plane.routing.cost_model import ASSUMED_STEP_MS, Speeds, step_ms
from control_plane.routing.estimates import Ask, Estimator, HandOver, InFlight, Reading
from control_plane.routing.prefix_index import PrefixIndex
from control_plane.routing.session_affinity import Served, SessionAffinity
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import ContextTooLong, ModelNotFound, Overloaded, TandemError, Unavailable

_AFFINITY_SLACK = 1.25
"""A session stays where it was while that is at most so many times as loaded as the best."""
_EXPECTED_ANSWER_TOKENS = 256
"""Of an answer that may be longer: for how many steps a request is reckoned to feel how full its decode worker is."""


@dataclass(frozen=True, eq=False)
class Route:
    """Where a request is to go. Decode workers come in order of preference: their answer decides, not this guess."""

    prefill: Worker | None
    """None: the decode worker computes the prompt itself."""
    decodes: tuple[Worker, ...]
    reason: str
    predicted_ms: dict[str, float]
    readings: Mapping[str, Reading] = field(default_factory=dict)
    """By incarnation, for those that would read the prompt: the prefill worker, or each of the decode workers."""

    def reading(self, worker: Worker) -> Reading | None:
        return self.readings.get(worker.incarnation)

    def describe(self) -> dict[str, Any]:
        reading = self.reading(self.prefill or self.decodes[0])
        return {
            "prefill": self.prefill.worker_id if self.prefill else "",
            "decode": self.decodes[0].worker_id,
            "reason": self.reason,
            **{f"predicted_{name}_ms": round(value, 3) for name, value in self.predicted_ms.items()},
            **(_cached(reading) if reading else {}),
        }


class Router:
    """Chooses by tokens in flight per worker, free KV blocks, measured speeds and where the prompt's blocks are."""

    def __init__(
        self,
        registry: WorkerRegistry,
        local_prefill: Literal["auto", "never"] = "auto",
        prefixes: PrefixIndex | None = None,
    ) -> None:
        self._registry = registry
        self._local_prefill = local_prefill
        self.in_flight = InFlight()
        self.affinity = SessionAffinity()
        self.prefixes = prefixes or PrefixIndex()
        self.speeds = Speeds(registry)
        self._estimator = Estimator(registry, self.in_flight, self.prefixes, self.speeds)

    def choose(self, ask: Ask, avoid: Collection[str] = ()) -> Route:
        """Return a route; `avoid` holds incarnations that refused or failed.

        Raises ModelNotFound if nobody serves the model, Unavailable if nobody can right now, Overloaded if all that
        could are in `avoid`, ContextTooLong if no pool could ever hold the request.
        """
        fitting = self._large_enough(self._usable(ask.model_id, pb.WORKER_ROLE_DECODE, ()), ask)
        decodes = [worker for worker in fitting if worker.incarnation not in avoid]
        if not decodes:
            raise self._nobody(ask.model_id, avoid)
        prefills = self._usable(ask.model_id, pb.WORKER_ROLE_PREFILL, avoid)
        served = self.affinity.of(ask.session_id) or Served("", "")
        runs = self._estimator.runs(ask)
        readings = [self._estimator.reading(worker, ask, runs) for worker in self._reachable(prefills)]
        prefill = _best_prefill(readings, served) if ask.hand_over != "never" else None
        local = {worker.incarnation: self._estimator.reading(worker, ask, runs) for worker in decodes}
        hand_over = self._hand_over(ask, prefill)
        decodes = self._with_affinity(self._rank_decodes(local, ask, prefill, hand_over), served)
        first = local[decodes[0].incarnation]
        if prefill is not None and self._is_handed_over(first, prefill, hand_over):
            return self._handed_over(prefill, first, decodes, len(prefills))
        return self._local(prefill, first, decodes, local, has_prefills=bool(prefills) and ask.hand_over != "never")

    def is_busy(self, decodes: Collection[Worker]) -> bool:
        """Whether a request would have to wait at each of these decode workers."""
        return all(
            worker.load.num_waiting > 0 or worker.load.kv.num_free_blocks + worker.load.kv.num_cached_blocks == 0
            for worker in decodes
        )

    # ------------------------------------------------------------------------------------------- who could at all

    def _usable(self, model_id: str, role: pb.WorkerRole.ValueType, avoid: Collection[str]) -> list[Worker]:
        workers = self._registry.workers(role)
        return [worker for worker in workers if worker.serves(model_id) and worker.incarnation not in avoid]

    def _large_enough(self, workers: list[Worker], ask: Ask) -> list[Worker]:
        """Return the workers that could hold the request if nothing else ran there; raises if none could."""
        fitting = [worker for worker in workers if _could_hold(worker, ask.num_prompt_tokens + ask.max_tokens)]
        if workers and not fitting:
            raise ContextTooLong(
                f"{ask.num_prompt_tokens:,} prompt tokens and up to {ask.max_tokens:,} answer tokens fit no decode "
                f"worker's KV pool, the largest has {max(map(_pool_tokens, workers)):,}; lower max_tokens, shorten the "
                "prompt or give the workers more KV memory",
                field="max_tokens",
            )
        return fitting

    def _reachable(self, workers: list[Worker]) -> list[Worker]:
        """Return those whose KV cache others can get: they are connected to a KV service that is here."""
        addresses = {service.address for service in self._registry.kv_services()}
        return [worker for worker in workers if worker.info.kv_address in addresses]

    def _nobody(self, model_id: str, avoid: Collection[str]) -> TandemError:
        served = sorted({worker.info.card.model_id for worker in self._registry.workers() if worker.info.card.model_id})
        if avoid and model_id in served:
            return Overloaded("every worker refused the request; try again", retry_after_seconds=1.0)
        if model_id in served:
            return Unavailable(
                f"no decode worker for {model_id!r} is ready; see GET /v1/workers", retry_after_seconds=2.0
            )
        return ModelNotFound(f"no worker serves {model_id!r}; served here: {', '.join(served) or 'nothing yet'}")

    # --------------------------------------------------------------------------------------------- who is sooner

    def _hand_over(self, ask: Ask, prefill: Reading | None) -> HandOver:
        if prefill is None:
            return "never"
        return "always" if self._local_prefill == "never" else ask.hand_over

    def _is_handed_over(self, local: Reading, prefill: Reading, hand_over: HandOver) -> bool:
        if not local.worker.info.kv_address or hand_over == "never":
            return False
        return hand_over == "always" or self._estimator.hand_over_ms(prefill) < self._estimator.local_ms(local)

    def _rank_decodes(
        self, local: Mapping[str, Reading], ask: Ask, prefill: Reading | None, hand_over: HandOver
    ) -> list[Worker]:
        """Order by whether the prompt's blocks seem to fit, then by what prompt and answer would take there.

        The answer's steps are the longer the fuller the pool is: a full one's take about twice as long.
        """
        workers = [reading.worker for reading in local.values()]
        measured = [ms for worker in workers if (ms := step_ms(worker)) is not None]
        answer_ms = min(ask.max_tokens, _EXPECTED_ANSWER_TOKENS) * (fmean(measured) if measured else ASSUMED_STEP_MS)

        def cost(worker: Worker) -> tuple[bool, float, str]:
            reading = local[worker.incarnation]
            if prefill is not None and self._is_handed_over(reading, prefill, hand_over):
                prompt_ms = self._estimator.hand_over_ms(prefill)
            else:
                prompt_ms = self._estimator.local_ms(reading)
            share = self._decode_load(worker, ask.num_prompt_tokens + ask.max_tokens)
            return self._is_tight(worker, ask), prompt_ms + answer_ms * share, worker.worker_id

        return sorted(workers, key=cost)

    def _with_affinity(self, decodes: list[Worker], served: Served) -> list[Worker]:
        """Put the worker that served the session last first, unless it is much busier than the best."""
        preferred = sorted(decodes, key=lambda worker: worker.incarnation != served.decode)  # stable
        if self._decode_load(preferred[0]) > _AFFINITY_SLACK * self._decode_load(decodes[0]):
            return decodes
        return preferred

    def _is_tight(self, worker: Worker, ask: Ask) -> bool:
        pool = worker.load.kv
        num_free_tokens = (pool.num_free_blocks + pool.num_cached_blocks) * max(1, pool.tokens_per_block)
        num_mine = self.in_flight.decode_tokens[worker.incarnation]
        return num_free_tokens < ask.num_prompt_tokens + num_mine - worker.load.num_tokens_in_flight

    def _decode_load(self, worker: Worker, num_tokens: int = 1) -> float:
        """Return what share of its pool's tokens a decode worker would have in flight with `num_tokens` more."""
        num_mine = self.in_flight.decode_tokens[worker.incarnation]
        num_in_flight = max(num_mine, worker.load.num_tokens_in_flight) + num_tokens
        return num_in_flight / max(1, _pool_tokens(worker))

    # --------------------------------------------------------------------------------------------- and says why

    def _handed_over(self, prefill: Reading, local: Reading, decodes: list[Worker], num_prefills: int) -> Route:
        predicted = {
            "decode_step": step_ms(decodes[0]) or ASSUMED_STEP_MS,
            **_parts("prefill", prefill),
            "hand_over": self._estimator.hand_over_ms(prefill),
            "local": self._estimator.local_ms(local),
        }
        reason = f"{prefill}, the soonest of {num_prefills} prefill workers; {len(decodes)} decode workers"
        readings = {prefill.worker.incarnation: prefill}
        return Route(prefill.worker, tuple(decodes), reason, predicted, readings)

    def _local(
        self,
        prefill: Reading | None,
        first: Reading,
        decodes: list[Worker],
        readings: Mapping[str, Reading],
        *,
        has_prefills: bool,
    ) -> Route:
        predicted = {"decode_step": step_ms(decodes[0]) or ASSUMED_STEP_MS, **_parts("local", first)}
        predicted["local"] = self._estimator.local_ms(first)
        if prefill is None or not first.worker.info.kv_address:
            why = "no KV service" if has_prefills else "no prefill worker"
            return Route(None, tuple(decodes), f"{why}: decode computes the prompt", predicted, readings)
        predicted["hand_over"] = self._estimator.hand_over_ms(prefill)
        reason = f"decode computes the prompt: {first}; handing over would take {predicted['hand_over']:.1f} ms"
        return Route(None, tuple(decodes), reason, predicted, readings)


def _best_prefill(readings: list[Reading], served: Served) -> Reading | None:
    """Return the soonest, or the one that served the session last if it is about as soon."""
    best = min(readings, key=lambda reading: (reading.total_ms, reading.worker.worker_id), default=None)
    for reading in readings:
        is_served = reading.worker.incarnation == served.prefill
        if best is not None and is_served and reading.total_ms <= _AFFINITY_SLACK * best.total_ms:
            return reading
    return best


def _parts(name: str, reading: Reading) -> dict[str, float]:
    return {
        name: reading.total_ms,
        "queue": reading.queue_ms,
        "load": reading.load_ms,
        "compute": reading.compute_ms,
    }


def _cached(reading: Reading) -> dict[str, Any]:
    return {
        "cached_own_tokens": reading.cached.own,
        "cached_host_tokens": reading.cached.host,
        "cached_remote_tokens": reading.cached.remote,
        "prefix_source": reading.source,
    }


def _pool_tokens(worker: Worker) -> int:
    return worker.load.kv.num_total_blocks * worker.load.kv.tokens_per_block


def _could_hold(worker: Worker, num_tokens: int) -> bool:
    """The last token's KV is never needed; a worker that has not told its pool yet decides itself."""
    num_needed = min(num_tokens, worker.info.card.context_length + 1) - 1
    return not _pool_tokens(worker) or num_needed <= _pool_tokens(worker)
