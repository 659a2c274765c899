"""Can a request really go the whole way here, and when was that last proven?"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Any

from control_plane.catalog import ModelCatalog
from control_plane.dispatcher import Dispatcher
from control_plane.generation import TokenRequest
from control_plane.registry import WorkerRegistry
from engine.scheduling.sampling_params import SamplingParams
from runtime.errors import TandemError
from runtime.log import get_logger
from tandem.v1 import types_pb2 as pb

log = get_logger(__name__)

_PROBE_PROMPT_TOKENS = 20
_PROBE_ANSWER_TOKENS = 2
_PROBE_SECONDS = 20.0
_RETRY_SECONDS = 0.5


class Prober:
    """Sends a small request through every phase when no user's request has proven the way lately.

    Implements what /readyz asks. Probes neither use nor leave cached blocks.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        catalog: ModelCatalog,
        dispatcher: Dispatcher,
        interval_seconds: float,
        valid_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._interval_seconds = interval_seconds
        self._valid_seconds = valid_seconds
        self._clock = clock
        self._proven_at: dict[str, float] = {}
        self._last_error = "no request has gone the whole way yet"

    def proven(self, model_id: str) -> None:
        """A request has gone the whole way."""
        self._proven_at[model_id] = self._clock()

    async def check(self) -> tuple[bool, dict[str, Any]]:
        """Return whether every served model was proven lately, and the ages of the proofs in seconds."""
        now = self._clock()
        served = self._served()
        ages = {
            model_id: round(now - self._proven_at[model_id], 1) for model_id in served if model_id in self._proven_at
        }
        is_ready = bool(served) and all(
            ages.get(model_id, self._valid_seconds) < self._valid_seconds for model_id in served
        )
        details: dict[str, Any] = {"ready": is_ready, "models": served, "proven_seconds_ago": ages}
        if not is_ready:
            details["reason"] = self._last_error if served else "no worker has loaded a model yet"
        return is_ready, details

    async def run(self) -> None:
        """Probe for as long as the process lives."""
        while True:
            await self._catalog.prefetch()
            for model_id in self._served():
                if self._is_due(model_id):
                    await self._probe(model_id)
            await asyncio.sleep(_RETRY_SECONDS)

    def _is_due(self, model_id: str) -> bool:
        proven_at = self._proven_at.get(model_id)
        return proven_at is None or self._clock() - proven_at > self._interval_seconds

    def _served(self) -> list[str]:
        decodes = self._registry.workers(pb.WORKER_ROLE_DECODE)
        return sorted(
            {worker.info.card.model_id for worker in decodes if worker.is_usable and worker.info.card.model_id}
        )

    async def _probe(self, model_id: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._generate(model_id)
        except TandemError as error:
            self._failed(model_id, error.message)
        except TimeoutError:
            self._failed(model_id, f"a probe of {model_id} did not come back within {_PROBE_SECONDS:g} s")
        except Exception as error:  # a bug in one probe must not end all that follow
            log.exception("probe_broke", model=model_id)
            self._failed(model_id, repr(error))
        else:
            self.proven(model_id)

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
            deadline=time.time() + _PROBE_SECONDS,
            cacheable=False,
        )
        stream = await self._dispatcher.submit(request)
        async for _ in stream:
            pass
