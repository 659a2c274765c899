"""Proves that requests can pass every phase, for /readyz: by users' requests, or by probes if there are none."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.fleet.model_catalog import ModelCatalog
from control_plane.fleet.registry import WorkerRegistry
from control_plane.generation import NOTHING, Dispatcher, TokenRequest
from control_plane.model_states import ModelState, ModelStates
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import Draining, ModelNotFound, Overloaded, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_PROBE_PROMPT_TOKENS = 20
_PROBE_ANSWER_TOKENS = 2
_PROBE_SECONDS = 20.0
_RETRY_SECONDS = 0.5
_MAX_PROBES = 8
"""At a time."""
_MAX_OF_FAILED = 6
"""Of them, of models whose last probe failed: each may take 20 s, and must not keep the others from their proof."""
GRACE_SECONDS = 30.0
"""From the first worker that takes requests: then a gateway is ready though nothing has been proven."""


class Prober:
    """Sends small requests through every phase of each model without a recent proof; implements /readyz.

    Probes neither use nor leave cached blocks. They do not wait: a model whose workers are full is full, not broken.

    A gateway becomes ready with the first model that is proven or full, or after the grace. From then on it is ready
    while any worker answers requests, whatever becomes of single models: else one full model would take the gateway,
    and then the next one, out of its load balancer.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        catalog: ModelCatalog,
        dispatcher: Dispatcher,
        proofs: ReadinessProofs,
        interval_seconds: float,
        valid_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._proofs = proofs
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._states = ModelStates(registry, catalog, proofs, valid_seconds, clock)
        self._probing: set[str] = set()
        self._probed_at: dict[str, float] = {}
        self._served_since: float | None = None
        self._has_seen_fleet = False

    async def check(self, model: str = "") -> tuple[bool, dict[str, Any]]:
        """Return whether this gateway, or one model, takes requests, and details for the operator.

        The details have the state of every model, the ages of the proofs in seconds, and the reasons.
        """
        return self._check_model(model) if model else self._check_gateway()

    async def run(self) -> None:
        """Probe models until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._look()
                for model_id in self._due():
                    self._probing.add(model_id)
                    tasks.create_task(self._probe(model_id))
                await asyncio.sleep(_RETRY_SECONDS)

    # ---------------------------------------------------------------------------------------------------- readiness

    def _check_gateway(self) -> tuple[bool, dict[str, Any]]:
        states = self._look()
        served = self._proofs.served()
        ages = {model_id: age for model_id in served if (age := self._proofs.age(model_id)) is not None}
        details: dict[str, Any] = {
            "models": served,
            "proven_seconds_ago": {name: round(ages[name], 1) for name in ages},
            "states": {model_id: state.name for model_id, state in states.items()},
            "reasons": {model_id: state.reason for model_id, state in states.items() if state.reason},
        }
        is_serving = self._served_since is not None
        if is_serving and self._has_seen_fleet:
            return True, {"ready": True, **details}
        reasons = [state.reason for state in states.values() if state.reason]
        loading = self._states.loading_worker(pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL, pb.WORKER_ROLE_ENCODE)
        reason = next(iter(reasons), loading or "no worker has loaded a model yet")
        return False, {"ready": False, **details, "reason": reason}

    def _check_model(self, name: str) -> tuple[bool, dict[str, Any]]:
        try:
            model_id = self._catalog.card(name).model_id
        except ModelNotFound as error:
            model_id, unknown = name, ModelState("lost", error.message)
        else:
            unknown = ModelState("lost", f"no worker has loaded {model_id} yet")
        state = self._look().get(model_id, unknown)
        details = {"model": model_id, "state": state.name, **({"reason": state.reason} if state.reason else {})}
        return state.is_ready, {"ready": state.is_ready, **details}

    def _look(self) -> dict[str, ModelState]:
        """Return the models' states, and note whether this gateway has seen its fleet."""
        states, now = self._states.all(), self._clock()
        if not self._is_serving():
            self._served_since = None
            return states
        if self._served_since is None:
            self._served_since = now
        is_over = now - self._served_since >= GRACE_SECONDS
        self._has_seen_fleet = self._has_seen_fleet or is_over or any(state.is_ready for state in states.values())
        return states

    def _is_serving(self) -> bool:
        """Return whether any worker answers requests."""
        roles = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_ENCODE)
        return any(worker.is_usable for role in roles for worker in self._registry.workers(role))

    # ------------------------------------------------------------------------------------------------------- probes

    def _due(self) -> list[str]:
        """Return the models to probe now: those that were probed longest ago first."""
        served = self._proofs.served()
        self._probed_at = {model_id: at for model_id, at in self._probed_at.items() if model_id in served}
        waiting = [model_id for model_id in served if model_id not in self._probing and self._is_due(model_id)]
        waiting.sort(key=lambda model_id: self._probed_at.get(model_id, 0.0))
        num_failed = sum(self._states.has_failed(model_id) for model_id in self._probing)
        found: list[str] = []
        for model_id in waiting:
            if len(self._probing) + len(found) >= _MAX_PROBES:
                break
            if self._states.has_failed(model_id):
                if num_failed >= _MAX_OF_FAILED:
                    continue
                num_failed += 1
            found.append(model_id)
        return found

    def _is_due(self, model_id: str) -> bool:
        age = self._proofs.age(model_id)
        if age is not None and age <= self._interval_seconds:
            return False
        is_full = self._states.is_full(model_id)  # else a probe twice a second would ask full workers for nothing
        return not is_full or self._clock() - self._probed_at.get(model_id, 0.0) > self._interval_seconds

    async def _probe(self, model_id: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._generate(model_id)
            if refusal := self._proofs.refusal(model_id):  # decode computed the prompt: prefill is full, not broken
                self._states.probe_met_full_workers(model_id, refusal)
        except Draining as error:
            self._failed(model_id, error.message)
        except Overloaded as error:
            self._states.probe_met_full_workers(model_id, error.message)
        except TandemError as error:
            self._failed(model_id, error.message)
        except TimeoutError:
            self._failed(model_id, f"a probe of {model_id} did not come back within {_PROBE_SECONDS:g} s")
        except Exception as error:  # our own error in one probe must not end all later ones
            log.exception("unhandled_exception", task="probe", model=model_id)
            self._failed(model_id, message_of(error))
        finally:
            self._probing.discard(model_id)
            self._probed_at[model_id] = self._clock()

    def _failed(self, model_id: str, reason: str) -> None:
        self._states.probe_failed(model_id, reason)
        log.warning("probe_failed", model=model_id, error=reason)

    async def _generate(self, model_id: str) -> None:
        card = self._catalog.card(model_id)
        num_tokens = min(_PROBE_PROMPT_TOKENS, card.context_length - _PROBE_ANSWER_TOKENS)
        request = TokenRequest(
            request_id=f"probe-{uuid.uuid4().hex[:12]}",
            account="",
            model_id=model_id,
            token_ids=tuple(token_id % card.vocab_size for token_id in range(num_tokens)),
            sampling=SamplingParams(max_tokens=_PROBE_ANSWER_TOKENS, temperature=0.0),
            choice_seeds=(0,),
            deadline=time.monotonic() + _PROBE_SECONDS,
            cache=NOTHING,
            reject_if_busy=True,
            is_probe=True,
        )
        stream = await self._dispatcher.submit(request)
        async for _ in stream:
            pass
