"""Meters requests: limits at admission, the ledger row, and the price at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.accounts.errors import LimitReached
from control_plane.accounts.identity import Caller
from control_plane.accounts.ledger import NOTHING_USED, Closing, Ledger, Opening, Status
from control_plane.accounts.limiter import Admission, Limiter
from control_plane.accounts.limits import NO_LIMITS, Limits, RateLimitStatus
from control_plane.accounts.prices import Price, PriceTable
from control_plane.generation import EncodingRequest, TokenRequest, Usage
from tandem_runtime.errors import InvalidRequest
from tandem_runtime.tasks import TaskSet

_MAX_ESTIMATED_ANSWER_TOKENS = 4096
"""Many clients send no max_tokens, and few answers fill a context. Tokens beyond this are counted at the end."""


@dataclass(frozen=True)
class BilledRequest:
    """A request as limits and ledger see it: an answer, or the scores of a prompt's tokens."""

    request_id: str
    model_id: str
    num_choices: int
    num_prompt_tokens: int
    num_answer_tokens: int
    """The estimated maximum, over all choices."""
    subject: str = "the prompt has"
    """The start of an error message about the number of prompt tokens."""

    @classmethod
    def for_answer(cls, request: TokenRequest) -> BilledRequest:
        num_choices = len(request.choice_seeds)
        num_answer = min(request.sampling.max_tokens, _MAX_ESTIMATED_ANSWER_TOKENS) * num_choices
        return cls(request.request_id, request.model_id, num_choices, len(request.token_ids), num_answer)

    @classmethod
    def for_texts(cls, request: EncodingRequest) -> BilledRequest:
        num_tokens = sum(each.num_tokens for each in request.inputs)
        return cls(request.request_id, request.model.model_id, 1, num_tokens, 0, "the texts have")

    @classmethod
    def for_prompt_scores(cls, request: TokenRequest) -> BilledRequest:
        """Return the request for the scores of a prompt: it reads the prompt up to each of its tokens."""
        num_positions = len(request.token_ids) - 1
        num_prompt = num_positions * (num_positions + 1) // 2
        request_id, subject = f"{request.request_id}-prompt", "echo with logprobs reads of this prompt"
        return cls(request_id, request.model_id, 1, num_prompt, num_positions, subject)


OnClosed = Callable[[Closing], None]


class LedgerEntry(Protocol):
    """The ledger entry of one request."""

    async def opened(self) -> None:
        """Wait until the row is written. Raise Unavailable if it cannot be."""

    async def expected(self) -> None:
        """Return at once if the row will be written as far as is known; else wait and raise as `opened` does."""

    def when_refused(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is known that the row cannot be written."""

    def priced(self, usage: Usage) -> Usage:
        """Return the usage with its price."""

    def close(self, status: Status, usage: Usage | None, finish_reasons: str = "", error: str = "") -> None:
        """Close the row; only the first call counts. `usage` is None if no worker has done any work."""

    def close_unfinished(self, status: Status, num_computed: Callable[[], Awaitable[int]], error: str = "") -> None:
        """Close the row of a request that its client ended before the first token; only the first close counts.

        `num_computed` returns how many tokens of the prompt workers had computed. The row is closed when it returns;
        until then the estimate counts.
        """


class Meter(Protocol):
    async def admit(self, caller: Caller, request: BilledRequest, on_closed: OnClosed | None = None) -> LedgerEntry:
        """Admit a request. Raise LimitReached, InvalidRequest if it exceeds a whole minute's limit, or Unavailable.

        `on_closed` is called once, with what the ledger's row ends with.
        """


class Metering:
    """Combines limits, ledger and prices; one per gateway."""

    def __init__(self, limiter: Limiter, ledger: Ledger, prices: PriceTable) -> None:
        self._limiter = limiter
        self._ledger = ledger
        self._prices = prices
        self._unfinished = TaskSet()
        self.is_ending = False

    def price_of(self, model_id: str) -> Price:
        return self._prices.of(model_id)

    async def admit(self, caller: Caller, request: BilledRequest, on_closed: OnClosed | None = None) -> LedgerEntry:
        self._ledger.check()
        limits = caller.identity.limits if caller.identity else NO_LIMITS
        admission = None
        if limits != NO_LIMITS:
            num_tokens = _estimated_tokens(request, caller.account, limits)
            try:
                admission = await self._limiter.admit(caller.account, limits, num_tokens)
            except LimitReached as error:
                caller.answer_headers.update(rate_limit_headers(*error.statuses))
                raise
            caller.answer_headers.update(rate_limit_headers(admission.requests, admission.tokens))
        token = caller.identity.token if caller.identity else None
        opening = Opening(
            request.request_id,
            caller.account,
            token.id if token else None,
            request.model_id,
            request.num_choices,
            request.num_prompt_tokens,
        )
        is_doubtful = self._ledger.is_failing
        written = self._ledger.open(opening)
        price = self.price_of(request.model_id)
        return _MeteredEntry(self, caller, opening, written, price, admission, on_closed, is_doubtful=is_doubtful)

    def gateway_ends(self) -> None:
        """From now on the gateway cuts what is left: a request that is cancelled was not left by its client."""
        self.is_ending = True

    def closed(self, admission: Admission | None, closing: Closing) -> None:
        if admission is not None:
            used = closing.usage
            self._limiter.settle(admission, used.num_prompt_tokens + used.num_completion_tokens)
        self._ledger.close(closing)

    def close_when_known(self, num_computed: Callable[[], Awaitable[int]], close: Callable[[Usage], None]) -> None:
        """Call `close` with what workers computed for a request without an answer, once they have said so."""

        async def wait() -> None:
            usage = NOTHING_USED
            try:
                num_tokens = await num_computed()
                usage = Usage(num_tokens, num_tokens, 0, 0)
            finally:
                close(usage)

        self._unfinished.spawn(wait(), name="unfinished-request")

    async def drain(self) -> None:
        """Wait until all changes are in the database."""
        await self._unfinished.join()
        await asyncio.gather(self._limiter.drain(), self._ledger.drain())


class _MeteredEntry:
    def __init__(
        self,
        metering: Metering,
        caller: Caller,
        opening: Opening,
        written: asyncio.Future[None],
        price: Price,
        admission: Admission | None,
        on_closed: OnClosed | None,
        *,
        is_doubtful: bool,
    ) -> None:
        """`is_doubtful`: the rows before this one could not be written."""
        self._metering = metering
        self._headers = caller.answer_headers
        self._opening = opening
        self._written = written
        self._price = price
        self._admission = admission
        self._on_closed = on_closed
        self._is_closed = False
        self._is_doubtful = is_doubtful

    async def opened(self) -> None:
        await asyncio.shield(self._written)

    async def expected(self) -> None:
        if self._is_doubtful or self._written.done():
            await self.opened()

    def when_refused(self, callback: Callable[[], None]) -> None:
        def written(row: asyncio.Future[None]) -> None:
            if not row.cancelled() and row.exception() is not None:
                callback()

        self._written.add_done_callback(written)

    def priced(self, usage: Usage) -> Usage:
        return replace(usage, microneurons=self._price.microneurons(usage))

    def close(self, status: Status, usage: Usage | None, finish_reasons: str = "", error: str = "") -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if status == "cancelled" and self._metering.is_ending:
            status, error = "aborted", "GatewayDraining"
        used = NOTHING_USED if usage is None else self.priced(usage)
        if status == "finished":
            self._add_price_header(used)
        self._closed(Closing(self._opening.request_id, status, used, finish_reasons, error))

    def close_unfinished(self, status: Status, num_computed: Callable[[], Awaitable[int]], error: str = "") -> None:
        if self._is_closed:
            return
        if status == "cancelled" and self._metering.is_ending:
            self.close(status, None)
            return
        self._is_closed = True

        def close(usage: Usage) -> None:
            self._closed(Closing(self._opening.request_id, status, self.priced(usage), error=error))

        self._metering.close_when_known(num_computed, close)

    def _closed(self, closing: Closing) -> None:
        self._metering.closed(self._admission, closing)
        if self._on_closed is not None:
            self._on_closed(closing)

    def _add_price_header(self, used: Usage) -> None:
        so_far = float(self._headers.get("cf-ai-neurons", 0))  # from other prompts of the same HTTP request
        self._headers["cf-ai-neurons"] = _neurons(so_far + (used.microneurons or 0) / 1e6)


class Unmetered:
    """A meter without limits and ledger, for a gateway without accounts."""

    async def admit(self, caller: Caller, request: BilledRequest, on_closed: OnClosed | None = None) -> LedgerEntry:
        return _UnmeteredEntry(request.request_id, on_closed)


class _UnmeteredEntry:
    def __init__(self, request_id: str, on_closed: OnClosed | None) -> None:
        self._request_id = request_id
        self._on_closed = on_closed

    async def opened(self) -> None:
        return

    async def expected(self) -> None:
        return

    def when_refused(self, callback: Callable[[], None]) -> None:
        """There is no row."""

    def priced(self, usage: Usage) -> Usage:
        return usage

    def close(self, status: Status, usage: Usage | None, finish_reasons: str = "", error: str = "") -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(Closing(self._request_id, status, usage or NOTHING_USED, finish_reasons, error))

    def close_unfinished(self, status: Status, num_computed: Callable[[], Awaitable[int]], error: str = "") -> None:
        self.close(status, None, error=error)


def rate_limit_headers(requests: RateLimitStatus | None, tokens: RateLimitStatus | None) -> dict[str, str]:
    """Return OpenAI's rate-limit headers for the limits that the account has."""
    headers = {}
    for what, status in (("requests", requests), ("tokens", tokens)):
        if status is not None:
            headers[f"x-ratelimit-limit-{what}"] = str(status.limit)
            headers[f"x-ratelimit-remaining-{what}"] = str(status.remaining)
            headers[f"x-ratelimit-reset-{what}"] = f"{status.reset_seconds:.3f}".rstrip("0").rstrip(".") + "s"
    return headers


def _estimated_tokens(request: BilledRequest, account: str, limits: Limits) -> int:
    """Return the tokens counted for a request until it ends, at most a whole minute's limit."""
    num_prompt, most = request.num_prompt_tokens, limits.max_tokens_per_minute
    num_tokens = num_prompt + request.num_answer_tokens
    if most is None:
        return num_tokens
    if num_prompt >= most:
        raise InvalidRequest(
            f"{request.subject} {num_prompt:,} tokens, account {account} may use {most:,} a minute for prompts and "
            "answers; shorten it, or have the limit raised",
            field="prompt",
        )
    return min(num_tokens, most)


def _neurons(number: float) -> str:
    return f"{number:.6f}".rstrip("0").rstrip(".")
