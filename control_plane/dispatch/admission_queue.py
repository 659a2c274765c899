"""Lets requests wait for a worker: in a room per model, so that a full or lost model delays no other.

`ModelAdmission` decides who is next and who may wait. Nothing is sent again on a timer: the next request looks for room
when another has ended, when a worker reports room, comes or is attached. Once it was sent, the one behind it looks, in
the next turn of the event loop: as many are let in at once as there is room for.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping

from control_plane.admission.budgets import BudgetTable
from control_plane.admission.elsewhere import AccountTurn, LetIn
from control_plane.admission.model_admission import (
    SURE,
    Bounds,
    Full,
    ModelAdmission,
    Waiter,
    longest_wait,
    seconds_left,
)
from control_plane.admission.prices import ASSUMED_MS_PER_ANSWER_TOKEN
from control_plane.admission.service_classes import ServiceClass
from control_plane.admission.waiting_demand import WaitingDemand
from control_plane.dispatch.admission_counts import AdmissionCounts
from control_plane.explain.history import Standing
from control_plane.generation import EncodingRequest, TokenRequest
from tandem_runtime.errors import Overloaded, TandemError
from tandem_runtime.virtual_counters import VirtualCounters

_OFFER_SECONDS = 0.5
"""The next request looks for room at a worker's report that shows none only if it last looked so long ago."""
_STOOD_STILL_SECONDS, _READ_SECONDS = 0.5, 2.0
"""A wait that ends so much too late ended while this process stood still. It goes on for so long: what the workers and
the rest of the fleet have sent meanwhile is not read yet. Not beyond the client's deadline."""
_MAX_MODELS = 1024
"""Models whose counters are kept; beyond that, those of models that nobody waits for are dropped."""
LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 60.0
_JITTER = 0.5
"""Retry-After is the predicted wait, up to so much of it less or more: clients do not come back together."""


class AdmissionQueue:
    """A room per model; on one event loop."""

    def __init__(
        self,
        max_waiting: int,
        queue_seconds: float,
        max_per_account: int = 0,
        *,
        budgets: BudgetTable | None = None,
        answer_token_ms: float = ASSUMED_MS_PER_ANSWER_TOKEN,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_waiting` and `max_per_account` are requests in one room; 0: half of a room, but at least one request.

        `budgets`: how long requests of each model may be predicted to wait. `answer_token_ms`: device milliseconds of a
        token until workers report steps. `rng` draws the jitter of Retry-After.
        """
        self._budgets = budgets or BudgetTable({})
        self._bounds = Bounds(max_waiting, max_per_account or max(1, max_waiting // 2))
        self._queue_seconds = queue_seconds
        self._answer_token_ms = answer_token_ms
        self._has_accounts: Callable[[], bool] = lambda: True
        self._rooms: OrderedDict[str, ModelAdmission] = OrderedDict()
        self._turns: dict[Waiter, asyncio.Future[None]] = {}
        self._closed: TandemError | None = None
        self._on_change: Callable[[str], None] = lambda model_id: None
        self.counts = AdmissionCounts()
        self._rng = rng or random.Random()
        self._clock = clock

    def __len__(self) -> int:
        """Return how many requests wait in all rooms."""
        return sum(map(len, self._rooms.values()))

    def listen(self, on_change: Callable[[str], None]) -> None:
        """Call `on_change` with the model whenever another request waits, or waits no more."""
        self._on_change = on_change

    def demand(self, model_id: str) -> WaitingDemand:
        """Return what waits for a model."""
        room = self._rooms.get(model_id)
        return room.demand() if room is not None else WaitingDemand()

    def prompt_demand(self, model_id: str) -> WaitingDemand:
        """Return what prefill workers would compute of that."""
        room = self._rooms.get(model_id)
        return room.prompt_demand() if room is not None else WaitingDemand()

    def now(self) -> float:
        """Return the time by which requests wait."""
        return self._clock()

    def num_waiting(self, model_id: str) -> int:
        room = self._rooms.get(model_id)
        return len(room) if room is not None else 0

    def num_by_model(self) -> Mapping[str, int]:
        """Return how many requests wait for each model for which any does."""
        return {model_id: len(room) for model_id, room in self._rooms.items() if len(room)}

    def counters(self) -> Iterator[tuple[str, int, VirtualCounters]]:
        """Yield model, class and accounts' counters. May be called in any thread."""
        for model_id, room in list(self._rooms.items()):
            for service_class, counters in list(room.counters.items()):
                yield model_id, service_class, counters

    def deadline(self, request: TokenRequest | EncodingRequest) -> float:
        """Return until when (`time.monotonic`) a request that begins to wait now may wait."""
        return min(request.deadline, time.monotonic() + self._queue_seconds)

    def must_wait(self, waiter: Waiter) -> bool:
        """Whether others go first; else the request may look for room at once."""
        room = self.room(waiter.model_id)
        if room.must_wait(waiter):
            return True
        if waiter.order is None:
            room.pass_by(waiter, self._clock())
        return False

    async def wait(
        self, waiter: Waiter, refusal: TandemError, seconds: float, *, retry_in: float | None = None
    ) -> None:
        """Return when it is this request's turn to look for room. A request that has waited has its place again.

        `retry_in`: it may look again so many seconds later, whatever happens. Raises `refusal` after `seconds`,
        Overloaded at once if too many wait, and the error of `close`.
        """
        if self._closed is not None:
            raise self._closed
        room = self.room(waiter.model_id)
        self._raise_if_late(waiter, seconds)
        try:
            room.enter(waiter, self._clock(), has_accounts=self._has_accounts())
        except Full as full:
            raise self._full(waiter, full) from None
        self._on_change(waiter.model_id)
        seconds = min(seconds, self._seconds_left(waiter, refusal))
        self.counts.entered(waiter.model_id, waiter.service_class, self._predicted_seconds(waiter))
        turn = asyncio.get_running_loop().create_future()
        self._turns[waiter] = turn
        timer = None if retry_in is None else asyncio.get_running_loop().call_later(retry_in, self._give_turn, waiter)
        seconds = max(0.0, seconds)
        end = asyncio.get_running_loop().call_later(seconds, self._end, waiter, turn, self._clock() + seconds)
        try:
            await turn
        except TimeoutError:
            if isinstance(refusal, Overloaded):
                self.counts.refused(waiter.model_id, "waited")
                refusal.retry_after_seconds = self.retry_after_seconds(waiter, refusal)
            raise refusal from None
        except BaseException:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release_next(waiter.model_id)  # it had its turn, and leaves
            raise
        finally:
            end.cancel()
            if timer is not None:
                timer.cancel()
            self.counts.left(waiter.model_id, waiter.service_class)
            if self._turns.pop(waiter, None) is not None:
                room.leave(waiter, self._clock())
            self._on_change(waiter.model_id)

    def _end(self, waiter: Waiter, turn: asyncio.Future[None], until: float) -> None:
        """The time of a wait is over."""
        if turn.done():
            return
        now = self._clock()
        seconds_more = min(_READ_SECONDS, waiter.deadline - now) if now - until > _STOOD_STILL_SECONDS else 0.0
        if seconds_more > 0:
            asyncio.get_running_loop().call_later(seconds_more, self._end, waiter, turn, now + seconds_more)
        else:
            turn.set_exception(TimeoutError())

    def refuse_early(self, waiter: Waiter, seconds: float) -> None:
        """Raise Overloaded for a request that would not be let in within `seconds`, or within its model's budget.

        For requests that are not prepared yet: `waiter` has a guess of their cost. Nothing is kept of them.
        """
        room = self._rooms.get(waiter.model_id)
        if room is None or not room.must_wait(waiter):
            return
        self._raise_if_late(waiter, seconds)
        try:
            room.check_bounds(waiter, has_accounts=self._has_accounts())
        except Full as full:
            raise self._full(waiter, full) from None

    def _raise_if_late(self, waiter: Waiter, seconds: float) -> None:
        """Raise Overloaded if a request that comes now is predicted to wait too long. Batches may wait."""
        model_id = waiter.model_id
        budget = self._budgets.of(model_id)
        predicted = self.room(model_id).too_late_seconds(waiter, budget, seconds, self._clock())
        if predicted is not None:
            longest = longest_wait(budget, seconds)
            self.counts.refused(model_id, "late")
            raise Overloaded(
                f"{self.num_waiting(model_id)} requests wait for {model_id}, and this one would wait for about "
                f"{predicted:.0f} s, more than {SURE * longest:.3g} s, the safe part of its limit of {longest:g} s; "
                "try again later, or add workers of the model",
                retry_after_seconds=self._with_jitter(predicted),
            )

    def _seconds_left(self, waiter: Waiter, refusal: TandemError) -> float:
        """Return how long a request may still wait for room by its model's budget: later it would come too late."""
        if not isinstance(refusal, Overloaded):
            return math.inf
        return seconds_left(waiter, self._budgets.of(waiter.model_id), self._clock())

    def standing(self, waiter: Waiter) -> Standing:
        """Return how a request stands that comes now, for its explanation."""
        room = self.room(waiter.model_id)
        num_elsewhere = room.num_elsewhere(self._clock())
        is_behind = room.must_wait(waiter) or num_elsewhere > 0
        wait_seconds = (self._predicted_seconds(waiter) or 0.0) if is_behind else 0.0
        name = ServiceClass(waiter.service_class).name.lower()
        used_ms = room.counters[waiter.service_class].of(waiter.account)
        return Standing(name, 1000.0 * wait_seconds, len(room), waiter.cost_ms, used_ms, num_elsewhere)

    def _predicted_seconds(self, waiter: Waiter) -> float | None:
        return self.room(waiter.model_id).predicted_wait_seconds(waiter, self._clock())

    def let_in(self, waiter: Waiter, device_ms: float = 0.0, *, is_last: bool = False) -> None:
        """A request was sent to workers, whose devices its prompt takes for `device_ms`: the next one may look.

        `is_last`: it may not; it is expected to find no room.
        """
        self.room(waiter.model_id).let_in(waiter, device_ms, self._clock())
        if not is_last:
            self.release_next(waiter.model_id)

    def gone(self, waiter: Waiter) -> None:
        """A request looks for room no more, whatever it has found: call this once it has started or failed."""
        self.room(waiter.model_id).gone(waiter)

    def take_back(self, waiter: Waiter) -> None:
        """The workers have not taken a request that was let in."""
        self.room(waiter.model_id).take_back(waiter)

    def stepped(self, model_id: str, worker: str, step_seconds: float, num_tokens: float) -> None:
        """A decode worker of the model has reported its steps since its last report."""
        self.room(model_id).stepped(worker, step_seconds, num_tokens, self._clock())

    def granted(self, model_id: str, worker: str, turns: Iterable[AccountTurn], let_in: LetIn) -> None:
        """A worker's grant tells of other gateways: what waits there, and what they have let in."""
        self.room(model_id).granted(worker, turns, let_in, self._clock())

    def worker_gone(self, model_id: str, worker: str) -> None:
        """Forget what a worker has told of a model's requests."""
        room = self._rooms.get(model_id)
        if room is not None:
            room.worker_gone(worker, self._clock())

    def release_next(self, model_id: str) -> None:
        """Let the model's next request look for room. Call when there may be more than before."""
        room = self._rooms.get(model_id)
        waiter = room.first() if room is not None else None
        if waiter is not None:
            self._give_turn(waiter)

    def reported(self, model_id: str, has_room: Callable[[Waiter], bool], *, may_offer: bool = True) -> Waiter | None:
        """A worker of the model has reported its room: let the next request look, and return it, if it has room for it.

        `may_offer`: without room it looks now and then. A worker keeps blocks for a request only if it is offered.
        """
        room = self._rooms.get(model_id)
        waiter = room.first() if room is not None else None
        if waiter is None:
            return None
        if has_room(waiter) or (may_offer and self._clock() - waiter.tried_at >= _OFFER_SECONDS):
            self._give_turn(waiter)
            return waiter
        return None

    def retry_after_seconds(self, waiter: Waiter, refusal: TandemError | None = None) -> float:
        """Return when a refused request should come again: after the predicted wait, up to half of it less or more.

        If nothing is known, it is what the worker has said in `refusal`.
        """
        predicted = self._predicted_seconds(waiter)
        if predicted is None:
            predicted = (refusal.retry_after_seconds if refusal is not None else None) or LEAST_RETRY_SECONDS
        return self._with_jitter(predicted)

    def _with_jitter(self, seconds: float) -> float:
        seconds = min(MOST_RETRY_SECONDS, max(LEAST_RETRY_SECONDS, seconds))
        return seconds * self._rng.uniform(1 - _JITTER, 1 + _JITTER)

    def bound_accounts_while(self, has_accounts: Callable[[], bool]) -> None:
        """Bound what one account has in a room only while this is true: else any caller takes any account's name."""
        self._has_accounts = has_accounts

    def close(self, error: TandemError) -> None:
        """Refuse the requests that wait, and all later ones."""
        self._closed = error
        for turn in self._turns.values():
            if not turn.done():
                turn.set_exception(error)

    def _give_turn(self, waiter: Waiter) -> None:
        """Take a waiter out of its room, and wake it."""
        turn = self._turns.get(waiter)
        if turn is None or turn.done():
            return
        del self._turns[waiter]
        self.room(waiter.model_id).look(waiter, self._clock())
        turn.set_result(None)

    def room(self, model_id: str) -> ModelAdmission:
        """Return what is known of a model's requests."""
        room = self._rooms.get(model_id)
        if room is None:
            room = self._rooms[model_id] = ModelAdmission(self._bounds, self._answer_token_ms)
            if len(self._rooms) > _MAX_MODELS:
                idle = next((name for name, each in self._rooms.items() if not len(each) and name != model_id), None)
                if idle is not None:
                    del self._rooms[idle]
        return room

    def _full(self, waiter: Waiter, full: Full) -> Overloaded:
        model_id = waiter.model_id
        self.counts.refused(model_id, full.setting)
        if full.setting == "max_waiting":
            message = (
                f"{full.num_waiting} requests wait for {model_id} already, the limit is {full.limit}; try again "
                "later, add workers of the model or raise --max-waiting"
            )
        elif full.setting == "max_waiting_per_account":
            message = (
                f"{full.num_waiting} requests of your account wait for {model_id} already, the limit for one account "
                f"is {full.limit}; try again later, or have the operator raise --max-waiting-per-account"
            )
        else:
            message = (
                f"{full.num_waiting} requests of the batch class wait for {model_id} already, the limit is "
                f"{full.limit}, half of --max-waiting; try again later"
            )
        return Overloaded(message, retry_after_seconds=self.retry_after_seconds(waiter))


def waiter_of(
    request: TokenRequest, cost_ms: float, num_answer_tokens: float = 0.0, *, is_moving: bool = False
) -> Waiter:
    """Return a request's place among those that wait, before it has one."""
    return Waiter(
        request.model_id,
        request.account,
        max(ServiceClass.BATCH, min(ServiceClass.PRIORITY, request.priority)),
        num_tokens=len(request.token_ids),
        cost_ms=cost_ms,
        num_answer_tokens=num_answer_tokens,
        deadline=request.deadline,
        is_moving=is_moving,
        num_choices=len(request.choice_seeds),
    )
