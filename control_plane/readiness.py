"""Proves that requests can pass every phase, for /readyz: by users' requests, or by probes if there are none."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from control_plane.dispatch.route_feedback import ReadinessProofs
from control_plane.fleet.model_catalog import ModelCatalog
from control_plane.fleet.registry import WorkerRegistry
from control_plane.generation import NOTHING, Dispatcher, TokenRequest
from tandem.v1 import types_pb2 as pb
from tandem_engine.sampling_params import SamplingParams
from tandem_runtime.errors import TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

_PROBE_PROMPT_TOKENS = 20
_PROBE_ANSWER_TOKENS = 2
_PROBE_SECONDS = 20.0
_RETRY_SECONDS = 0.5


class Prober:
    """Sends a small request through every phase if no user's request was a proof lately; implements /readyz.

    Probes neither use nor leave cached blocks.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        catalog: ModelCatalog,
        dispatcher: Dispatcher,
        proofs: ReadinessProofs,
        interval_seconds: float,
        valid_seconds: float,
    ) -> None:
        self._registry = registry
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._proofs = proofs
        self._interval_seconds = interval_seconds
        self._valid_seconds = valid_seconds
        self._last_error = "no request has gone the whole way yet"

    async def check(self) -> tuple[bool, dict[str, Any]]:
        """Return whether every served model was proven lately, and the ages of the proofs in seconds.

        While the only prefill worker is loading, the answer is False. A fleet of encode workers alone is ready while
        one of them is.
        """
        served = self._proofs.served()
        ages = {model_id: age for model_id in served if (age := self._proofs.age(model_id)) is not None}
        details: dict[str, Any] = {
            "models": served,
            "proven_seconds_ago": {name: round(ages[name], 1) for name in ages},
        }
        is_proven = bool(served) and all(ages.get(name, self._valid_seconds) < self._valid_seconds for name in served)
        if self._is_encoding_only():
            return True, {"ready": True, **details}
        loading = self._loading_prefill()
        if is_proven and loading is None:
            return True, {"ready": True, **details}
        reason = loading or (self._last_error if served else self._nothing_served())
        return False, {"ready": False, **details, "reason": reason}

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            await self._catalog.prefetch()
            for model_id in self._proofs.served():
                age = self._proofs.age(model_id)
                if age is None or age > self._interval_seconds:
                    await self._probe(model_id)
            await asyncio.sleep(_RETRY_SECONDS)

    def _is_encoding_only(self) -> bool:
        """Return whether an encode worker is ready, and no worker that writes text is registered."""
        roles = (pb.WORKER_ROLE_DECODE, pb.WORKER_ROLE_PREFILL)
        if any(self._registry.workers(role) for role in roles):
            return False
        return any(worker.is_usable for worker in self._registry.workers(pb.WORKER_ROLE_ENCODE))

    def _nothing_served(self) -> str:
        names = sorted({worker.info.card.model_id for worker in self._registry.workers() if worker.info.card.model_id})
        return f"no decode worker is ready for {', '.join(names)}" if names else "no worker has loaded a model yet"

    def _loading_prefill(self) -> str | None:
        """Return which prefill worker is loading, if none is ready yet."""
        prefills = self._registry.workers(pb.WORKER_ROLE_PREFILL)
        if any(worker.is_usable for worker in prefills):
            return None
        loading = [worker for worker in prefills if worker.load.state == pb.WORKER_STATE_LOADING]
        return f"{loading[0].worker_id} is loading: {loading[0].load.load_stage}" if loading else None

    async def _probe(self, model_id: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._generate(model_id)
        except TandemError as error:
            self._failed(model_id, error.message)
        except TimeoutError:
            self._failed(model_id, f"a probe of {model_id} did not come back within {_PROBE_SECONDS:g} s")
        except Exception as error:  # our own error in one probe must not end all later ones
            log.exception("unhandled_exception", task="probe", model=model_id)
            self._failed(model_id, message_of(error))

    def _failed(self, model_id: str, reason: str) -> None:
        self._last_error = reason
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
            is_probe=True,
        )
        stream = await self._dispatcher.submit(request)
        async for _ in stream:
            pass
