"""Delivers the tokens of one request to its reader, the text side of the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from control_plane.dispatch.request_state import GRACE_SECONDS, RequestState
from control_plane.generation import TokenDelta, Usage
from tandem_runtime.errors import DeadlineExceeded, TandemError
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_LEDGER_SECONDS = 2.0


class RequestStream:
    """Implements control_plane.generation.TokenStream; made by the dispatcher, on one event loop.

    The tokens of prefill, decode and any worker that continues a choice are merged in `RequestState.receive`; here they
    leave in order, once each.
    """

    def __init__(self, state: RequestState) -> None:
        self.state = state

    @property
    def route(self) -> Mapping[str, Any]:
        return self.state.route

    @property
    def usage(self) -> Usage:
        return self.state.usage

    async def __aiter__(self) -> AsyncIterator[TokenDelta]:
        async for batch in self.batches():
            for delta in batch:
                yield delta

    async def batches(self) -> AsyncIterator[Iterator[TokenDelta]]:
        """Yield the unread tokens again and again until every choice is over. Raises the request's error."""
        state, unread = self.state, self.state.unread
        seconds_left = state.seconds_left + GRACE_SECONDS
        timer = asyncio.get_running_loop().call_later(max(0.0, seconds_left), self._deadline_passed)
        try:
            while unread or not all(choice.is_over for choice in state.choices):
                if not unread:
                    await unread.wait()
                if unread and isinstance(unread[0], TandemError):
                    if all(choice.is_end_delivered for choice in state.choices):
                        break
                    raise unread[0]
                yield self._take_unread()
            await self._wait_for_ledger()
            state.finish()
        finally:
            timer.cancel()
            await self.aclose()

    async def num_unfinished_tokens(self) -> int:
        return await self.state.num_unfinished_tokens()

    def stop_choice(self, choice_index: int) -> None:
        self.state.stop_choice(choice_index)

    async def aclose(self) -> None:
        """Cancel what still runs; idempotent."""
        self.state.close()

    def _take_unread(self) -> Iterator[TokenDelta]:
        """Yield the unread tokens before the first error, and count each as delivered."""
        unread, delivered = self.state.unread, self.state.delivered
        while unread and not isinstance(unread[0], TandemError):
            delta = unread.popleft()
            assert isinstance(delta, TokenDelta), "checked above"
            if delivered(delta):
                yield delta

    def _deadline_passed(self) -> None:
        self.state.fail(DeadlineExceeded("the request's deadline passed before it was finished; ask for less"))

    async def _wait_for_ledger(self) -> None:
        """Prefill's ledger comes with the first token; only a very short answer of decode's overtakes it."""
        if self.state.prefill is None or self.state.prefill_ledger is not None:
            return
        try:
            await asyncio.wait_for(self.state.wait_prefill_ended(), _LEDGER_SECONDS)
        except TimeoutError:
            log.warning("prefill_ledger_missing", request_id=self.state.request.request_id)
