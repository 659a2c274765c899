"""The gateway's own admission on virtual time: who waits, who is next and who is refused, by `control_plane/admission`.

What `AdmissionQueue` and the starter of requests do in a gateway with an event loop, this does in the simulation's.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.admission.budgets import NO_BUDGET, Budget
from control_plane.admission.model_admission import (
    Bounds,
    Full,
    ModelAdmission,
    Waiter,
    longest_wait,
    seconds_left,
)
from control_plane.admission.service_classes import class_of
from control_plane.simulator.engine import Job
from control_plane.simulator.hindsight import Hindsight, Shadow
from control_plane.simulator.lines import Attempt, Hall, Reason
from control_plane.simulator.policies.policy import AdmittingPolicy
from control_plane.simulator.traces import TraceRequest
from tandem_runtime.virtual_counters import AnswerMeter

_OFFER_SECONDS = 0.5
"""As in `AdmissionQueue`: how often the first looks although reports show no room."""
_LOOK_AGAIN_SECONDS = 0.05
"""After a worker's refusal."""
_METER_SECONDS = 0.1
"""How old what accounts are charged for running answers may be when a turn is given."""
_PRIORITY_ACCOUNTS = ("*",)


@dataclass(frozen=True)
class AdmissionRules:
    """The settings of a gateway."""

    budget: Budget = NO_BUDGET
    """Of every model."""
    queue_seconds: float = 30.0
    max_waiting: int = 512
    max_per_account: int = 256


@dataclass(eq=False)
class _Metered:
    request: TraceRequest
    meter: AnswerMeter
    num_tokens: float = 0.0


@dataclass
class Use:
    """Tokens of an account's requests for one model."""

    num_computed: float = 0.0
    num_sampled: float = 0.0


class AdmissionLine:
    """One gateway's; requests of several models wait apart."""

    def __init__(self, hall: Hall, policy: AdmittingPolicy, rules: AdmissionRules) -> None:
        self._hall = hall
        self._policy = policy
        self._rules = rules
        self._longest_seconds = longest_wait(rules.budget, rules.queue_seconds)
        self._rooms: dict[str, ModelAdmission] = {}
        self._hindsights: dict[str, Hindsight] = {}
        self._waiting: dict[Waiter, TraceRequest] = {}
        self._running: dict[int, _Metered] = {}
        self._metered_at = 0.0
        self._used: dict[tuple[str, int, str], Use] = {}
        """By model and account, since `take_use`."""
        self.shadows: dict[int, Shadow] = {}
        """Of the requests that were refused as they came, by number."""

    # ------------------------------------------------------------------------------------------------ what happens

    def arrived(self, request: TraceRequest, now: float) -> None:
        room = self._room(request.model)
        self._charge_answers(now)
        service_class = class_of(request.service_tier, request.account, _PRIORITY_ACCOUNTS)
        waiter = Waiter(
            request.model,
            request.account,
            service_class,
            num_tokens=request.num_prompt_tokens,
            cost_ms=self._cost_ms(request),
            num_answer_tokens=min(room.prices.answer_tokens, request.requested_tokens),
        )
        if room.must_wait(waiter):
            self._wait(request, waiter, now)
            return
        room.pass_by(waiter, now)
        if self._look(request, waiter, now):
            self._release(request.model, now)

    def prompt_read(self, request: TraceRequest, now: float) -> None:
        self._hall.at(now, lambda then: self._release(request.model, then))

    def ended(self, request: TraceRequest, computed: Job, now: float) -> None:
        running, room = self._running.pop(request.number), self._room(request.model)
        self._answered(running, request.num_output_tokens)
        running.meter.ended()
        self._use_of(request).num_computed += request.num_prompt_tokens - computed.num_cached
        room.prices.answered(request.num_output_tokens)
        room.cached.finished(request.account, request.session, computed.num_cached, request.num_prompt_tokens)
        self._hall.at(now, lambda then: self._release(request.model, then))

    def reported(self, number: int, now: float) -> None:
        if not self._policy.decodes(number):
            return
        room = self._room(self._policy.model_of(number))
        room.stepped(str(number), *self._policy.work(number), now)
        waiter = room.first()
        if waiter is None:
            return
        is_due = now - waiter.tried_at >= _OFFER_SECONDS
        if is_due or self._policy.has_room(number, waiter.num_tokens):
            self._release(waiter.model_id, now)

    # ------------------------------------------------------------------------------------------------------- turns

    def _release(self, model: str, now: float) -> None:
        """Let requests look for room in their order, until one finds none."""
        room = self._room(model)
        self._charge_answers(now)
        while (waiter := room.first()) is not None:
            if not self._give_turn(waiter, now):
                return

    def _give_turn(self, waiter: Waiter, now: float) -> bool:
        request = self._waiting.pop(waiter)
        self._room(waiter.model_id).look(waiter, now)
        return self._look(request, waiter, now)

    def _look(self, request: TraceRequest, waiter: Waiter, now: float) -> bool:
        """Try to place a request; it waits, perhaps again, if there is no room."""
        attempt = self._hall.place(request, now)
        for number in attempt.refused_by:
            self._policy.refused(number, request)
        if attempt.placement is None:
            if self._wait(request, waiter, now) and attempt.refused_by:
                self._hall.at(now + _LOOK_AGAIN_SECONDS, lambda then: self._look_again(waiter, then))
            return False
        self._let_in(request, waiter, attempt, now)
        return True

    def _let_in(self, request: TraceRequest, waiter: Waiter, attempt: Attempt, now: float) -> None:
        assert attempt.placement is not None, "it was placed"
        room, price = self._room(request.model), self._policy.price(attempt.placement)
        self._hindsights[request.model].let_in(waiter, request.number, room, now)
        room.let_in(waiter, price.device_ms, now)
        room.gone(waiter)
        meter = room.started(waiter, price.num_computed_tokens, price.device_ms)
        self._running[request.number] = _Metered(request, meter)

    def _look_again(self, waiter: Waiter, now: float) -> None:
        if waiter in self._waiting and self._give_turn(waiter, now):
            self._release(waiter.model_id, now)

    def _wait(self, request: TraceRequest, waiter: Waiter, now: float) -> bool:
        """Let a request wait, or refuse it; return whether it waits."""
        room, is_new = self._room(request.model), waiter.order is None
        rules = self._rules
        if room.too_late_seconds(waiter, rules.budget, rules.queue_seconds, now) is not None:
            self._refuse(request, waiter, "late", now)
            return False
        try:
            room.enter(waiter, now)
        except Full:
            self._refuse(request, waiter, "full", now)
            return False
        self._waiting[waiter] = request
        if is_new:
            seconds = min(rules.queue_seconds, seconds_left(waiter, rules.budget, now))
            self._hall.at(now + seconds, lambda then: self._give_up(waiter, then))
        return True

    def _refuse(self, request: TraceRequest, waiter: Waiter, reason: Reason, now: float) -> None:
        room = self._room(request.model)
        self.shadows[request.number] = self._hindsights[request.model].refused(waiter, room, now)
        self._hall.refuse(request, reason, now)

    def _give_up(self, waiter: Waiter, now: float) -> None:
        request = self._waiting.pop(waiter, None)
        if request is not None:
            self._room(waiter.model_id).leave(waiter, now)
            self._hall.refuse(request, "waited", now)

    # ------------------------------------------------------------------------------------------------ what it costs

    def _cost_ms(self, request: TraceRequest) -> float:
        room = self._room(request.model)
        share = room.cached.of(request.account, request.session)
        return room.prices.request_ms((1 - share) * request.num_prompt_tokens, request.requested_tokens)

    def _charge_answers(self, now: float) -> None:
        """Charge accounts for the tokens that running answers have got since."""
        if now - self._metered_at < _METER_SECONDS:
            return
        self._metered_at = now
        for number, running in self._running.items():
            self._answered(running, self._hall.generated(number, now))

    def _answered(self, running: _Metered, num_tokens: float) -> None:
        """Take in how long an answer is now."""
        running.meter.answered(num_tokens - running.num_tokens)
        self._use_of(running.request).num_sampled += num_tokens - running.num_tokens
        running.num_tokens = num_tokens

    # ----------------------------------------------------------------------------------------- what other gateways use

    def _use_of(self, request: TraceRequest) -> Use:
        service_class = class_of(request.service_tier, request.account, _PRIORITY_ACCOUNTS)
        return self._used.setdefault((request.model, service_class, request.account), Use())

    def take_use(self) -> dict[tuple[str, int, str], Use]:
        """Return what accounts have used at this gateway since it was asked last."""
        used, self._used = self._used, {}
        return used

    def used_elsewhere(self, used: dict[tuple[str, int, str], Use]) -> None:
        """The workers tell what accounts have used at another gateway."""
        for (model, service_class, account), use in used.items():
            self._room(model).used_elsewhere(service_class, account, use.num_computed, use.num_sampled)

    def _room(self, model: str) -> ModelAdmission:
        room = self._rooms.get(model)
        if room is None:
            room = self._rooms[model] = ModelAdmission(Bounds(self._rules.max_waiting, self._rules.max_per_account))
            self._hindsights[model] = Hindsight(self._longest_seconds)
        return room
