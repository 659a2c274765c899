"""A dispatcher that replaces workers: it keeps the whole contract and plays a test's script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from control_plane.generation import FinishReason, Logprob, PositionLogprobs, TokenDelta, TokenRequest, Usage


@dataclass
class Script:
    """What happens to one request; every choice says the same unless `choices` differ."""

    token_ids: Sequence[int] = ()
    choices: Mapping[int, Sequence[int]] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    tokens_per_delta: int = 1
    num_cached_tokens: int = 0
    num_unfinished_tokens: int = 0
    """What workers report as computed if the request is closed before its first token."""
    refuse: Exception | None = None
    fail_after: int | None = None
    """Raise `failure` after that many deltas."""
    failure: Exception | None = None
    pause_after: int | None = None
    """Wait for `resume` after that many deltas."""
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    accept: asyncio.Event | None = None
    """`submit` waits for it."""


class ScriptedStream:
    def __init__(self, request: TokenRequest, script: Script) -> None:
        self.request = request
        self.script = script
        self.route: Mapping[str, Any] = {"reason": "scripted"}
        self.closed = asyncio.Event()
        self.pauses = asyncio.Event()
        self.ended = False
        self.stopped_choices: set[int] = set()
        self.num_generated = 0
        self._num_deltas = 0

    async def batches(self) -> AsyncIterator[Iterator[TokenDelta]]:
        async for delta in self:
            yield iter([delta])

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        for delta in self._deltas():
            if self._num_deltas == self.script.pause_after:
                self.pauses.set()
                await self.script.resume.wait()
            if self._num_deltas == self.script.fail_after and self.script.failure is not None:
                raise self.script.failure
            if self.closed.is_set():
                return
            if delta.choice_index not in self.stopped_choices:
                self._num_deltas += 1
                self.num_generated += len(delta.token_ids)
                yield delta
                await asyncio.sleep(0)
        self.ended = True

    def stop_choice(self, choice_index: int) -> None:
        self.stopped_choices.add(choice_index)

    async def aclose(self) -> None:
        self.closed.set()

    async def num_unfinished_tokens(self) -> int:
        await self.closed.wait()
        return self.script.num_unfinished_tokens

    @property
    def usage(self) -> Usage:
        num_prompt, num_cached = len(self.request.token_ids), self.script.num_cached_tokens
        return Usage(num_prompt, num_prompt - num_cached, num_cached, self.num_generated)

    def _deltas(self) -> list[TokenDelta]:
        """Return all deltas, the choices taking turns."""
        num_choices = len(self.request.choice_seeds)
        lists = [self._choice_deltas(i, self.script.choices.get(i, self.script.token_ids)) for i in range(num_choices)]
        longest = max(map(len, lists), default=0)
        return [deltas[turn] for turn in range(longest) for deltas in lists if turn < len(deltas)]

    def _choice_deltas(self, index: int, token_ids: Sequence[int]) -> list[TokenDelta]:
        limit = self.request.sampling.max_tokens
        finish: FinishReason = self.script.finish_reason if len(token_ids) <= limit else "length"
        ids, size = tuple(token_ids[:limit]), self.script.tokens_per_delta
        chunks = [ids[start : start + size] for start in range(0, len(ids), size)]
        return [
            TokenDelta(index, chunk, self._logprobs(chunk), finish if last == len(chunks) - 1 else None)
            for last, chunk in enumerate(chunks)
        ]

    def _logprobs(self, token_ids: Sequence[int]) -> tuple[PositionLogprobs, ...]:
        wanted = self.request.sampling.num_logprobs
        if wanted is None:
            return ()
        return tuple(
            PositionLogprobs(
                Logprob(token_id, -0.5, 1),
                tuple(Logprob((token_id + rank) % 300, -0.5 - rank, rank + 1) for rank in range(wanted)),
            )
            for token_id in token_ids
        )


class ScriptedDispatcher:
    """Plays `script` for every request, or what `choose` gives for it."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.choose: Callable[[TokenRequest], Script] = lambda request: self.script
        self.requests: list[TokenRequest] = []
        self.streams: list[ScriptedStream] = []
        self.submit_cancelled = asyncio.Event()
        self.submitted = asyncio.Event()
        self.waits_for_resume = asyncio.Event()
        """Set once a stream waits at its `pause_after`."""

    async def submit(self, request: TokenRequest) -> ScriptedStream:
        self.requests.append(request)
        self.submitted.set()
        script = self.choose(request)
        if script.accept is not None:
            try:
                await script.accept.wait()
            except asyncio.CancelledError:
                self.submit_cancelled.set()
                raise
        if script.refuse is not None:
            raise script.refuse
        self.streams.append(ScriptedStream(request, script))
        self.streams[-1].pauses = self.waits_for_resume
        return self.streams[-1]

    @property
    def last(self) -> ScriptedStream:
        return self.streams[-1]


def workers() -> list[dict[str, Any]]:
    return [{"worker_id": "prefill-0", "role": "prefill", "state": "ready"}]
