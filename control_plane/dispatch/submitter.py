"""How is a leg of a request sent to a worker, and the worker's first word awaited?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from control_plane.dispatch.request_state import Plan
from control_plane.dispatch.request_stream import GRACE_SECONDS, Choice, ChoiceSink, PrefillSink
from control_plane.dispatch.submission import decode_submit, prefill_submit
from control_plane.dispatch.worker_call import Leg, counted
from control_plane.fleet.registry import Worker
from control_plane.fleet.worker_links import LinkPool
from control_plane.routing.estimates import InFlight
from control_plane.routing.router import Route
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import DeadlineExceeded, TandemError, Unavailable

_GiveBack = Callable[[], None]
_Count = Callable[[pb.Submit, str, int], tuple[_GiveBack, _GiveBack]]


class Failures(Protocol):
    """Hears of workers that are lost after they had accepted."""

    def prefill_failed(self, plan: Plan, leg: Leg, error: TandemError) -> None: ...

    def choice_failed(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> None: ...


class Sender:
    """Submits to workers over their links, and counts what is in flight."""

    def __init__(self, links: LinkPool, in_flight: InFlight, accept_seconds: float, failures: Failures) -> None:
        self._links = links
        self._in_flight = in_flight
        self._accept_seconds = accept_seconds
        self._failures = failures

    def send_prefill(self, plan: Plan, worker: Worker, handle: pb.KvHandle, route: Route) -> Leg:
        leg = self._leg(worker, prefill_submit(plan.base(), plan.request, handle), route, self._count_prefill)
        plan.flight.expect_prefill(leg)
        on_failure = partial(self._failures.prefill_failed, plan, leg)
        leg.link.submit(leg.submit, PrefillSink(plan.flight, leg, on_failure))
        return leg

    def send_choice(self, plan: Plan, choice: Choice, worker: Worker, route: Route) -> Leg:
        """Submit a choice to a decode worker; with tokens so far it goes on from them."""
        handle = None if choice.tokens else plan.handle
        so_far = choice.tokens
        submit = decode_submit(plan.base(), plan.request, choice.index, handle, so_far, plan.hashes_of(so_far))
        leg = choice.leg = self._leg(worker, submit, route, self._count_decode)
        leg.link.submit(submit, ChoiceSink(plan.flight, choice, leg, partial(self._failures.choice_failed, plan)))
        return leg

    async def answer(self, plan: Plan, leg: Leg) -> None:
        """Wait for a worker's first word; one that refuses or stays silent is not asked again for this request.

        Raises DeadlineExceeded once the request's own deadline has passed.
        """
        worker = leg.link.worker
        seconds_left = plan.request.deadline + GRACE_SECONDS - time.time()
        try:
            async with asyncio.timeout(max(0.0, min(self._accept_seconds, seconds_left))):
                await leg.answered
        except TimeoutError as error:
            leg.close(cancel=True)
            plan.avoid.add(worker.incarnation)
            if seconds_left < self._accept_seconds:
                raise DeadlineExceeded("the request's deadline passed before a worker had taken it") from error
            raise Unavailable(
                f"worker {worker.worker_id} did not answer within {self._accept_seconds:g} s", retry_after_seconds=1.0
            ) from error
        except TandemError:
            plan.avoid.add(worker.incarnation)
            raise

    def _leg(self, worker: Worker, submit: pb.Submit, route: Route, count: _Count) -> Leg:
        """Return a leg over a worker's link, counted as in flight; raises Unavailable if the worker has gone."""
        link = self._links.get(worker)
        is_reader = worker.role == pb.WORKER_ROLE_PREFILL or not submit.HasField("handle")
        reading = route.reading(worker) if is_reader else None
        if reading is not None:
            submit.prefix_source = reading.source
        num_to_read = reading.num_computed_tokens if reading is not None else len(submit.token_ids)
        give_back, prompt_read = count(submit, worker.incarnation, num_to_read if is_reader else 0)
        return Leg(link, submit, give_back, prompt_read, reading)

    def _count_prefill(self, submit: pb.Submit, incarnation: str, num_to_read: int) -> tuple[_GiveBack, _GiveBack]:
        give_back = counted(self._in_flight.prefill_tokens, incarnation, num_to_read)
        return give_back, lambda: None

    def _count_decode(self, submit: pb.Submit, incarnation: str, num_to_read: int) -> tuple[_GiveBack, _GiveBack]:
        num_tokens = len(submit.token_ids) + submit.sampling.max_tokens
        give_back_tokens = counted(self._in_flight.decode_tokens, incarnation, num_tokens)
        give_back_answer = counted(self._in_flight.answers, incarnation, 1)

        def give_back() -> None:
            give_back_tokens()
            give_back_answer()

        return give_back, counted(self._in_flight.prefill_tokens, incarnation, num_to_read)
