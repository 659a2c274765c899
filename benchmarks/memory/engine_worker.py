"""Starts a real engine process, as a worker's front does, and gives it work."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

from tandem_engine.channel import Received, close_all
from tandem_engine.client import EngineClient
from tandem_engine.messages import AddRequest, EngineFailed, Ready, Refused, RequestFailed, StepDone
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

_SECONDS = 600.0
_FIRST_TOKEN_ID = 10


class EngineWorker:
    """One engine process, loaded. `await EngineWorker.started(config)`, then work, then `end`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._events = client.events()
        self._num_requests = 0
        self._ready: Ready | None = None

    @classmethod
    async def started(cls, config: EngineConfig) -> EngineWorker:
        """Start the process and wait until it serves; raises RuntimeError if it cannot."""
        worker = cls(await EngineClient.start(config))
        try:
            async for received in worker._watched():
                if isinstance(received.message, Ready):
                    worker._ready = received.message
                    break
        except BaseException:
            await worker.end()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._client.pid

    @property
    def ready(self) -> Ready:
        assert self._ready is not None, "`started` waits for it"
        return self._ready

    async def answer(self, num_prompts: int, num_prompt_tokens: int, num_answer_tokens: int) -> None:
        """Answer so many prompts of random tokens side by side."""
        chance = random.Random(num_prompts)
        vocab_size = self.ready.model.vocab_size
        open_ids: set[str] = set()
        for _ in range(num_prompts):
            prompt = [chance.randrange(_FIRST_TOKEN_ID, vocab_size) for _ in range(num_prompt_tokens)]
            self._num_requests += 1
            request_id = str(self._num_requests)
            sampling = SamplingParams(num_answer_tokens, temperature=0.0)
            self._client.send(AddRequest(request_id, prompt, len(prompt), sampling))
            open_ids.add(request_id)
        async for received in self._watched():
            if isinstance(received.message, StepDone):
                open_ids -= {output.request_id for output in received.message.outputs if output.is_last}
            if not open_ids:
                return

    async def end(self) -> None:
        await self._client.stop()

    async def _watched(self) -> AsyncIterator[Received]:
        """Yield what the engine says; raises RuntimeError for a failure and TimeoutError after ten minutes."""
        async with asyncio.timeout(_SECONDS):
            async for received in self._events:
                close_all(received.fds)
                if isinstance(received.message, EngineFailed | RequestFailed | Refused):
                    raise RuntimeError(received.message.message)
                yield received
        raise RuntimeError("the engine has ended")
