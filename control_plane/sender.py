"""How is a leg of a request sent to a worker, and the worker's first word awaited?"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Protocol

from control_plane.flight import Choice, ChoiceSink, Leg, PrefillSink, tokens_in_flight
from control_plane.links import LinkPool
from control_plane.plan import Plan
from control_plane.registry import Worker
from control_plane.router import InFlight
from control_plane.submission import decode_submit, prefill_submit
from runtime.errors import TandemError, Unavailable
from tandem.v1 import types_pb2 as pb


class Failures(Protocol):
    """Hears of workers that are lost after they had accepted."""

    def prefill_failed(self, plan: Plan, error: TandemError) -> None: ...

    def choice_failed(self, plan: Plan, choice: Choice, leg: Leg, error: TandemError) -> None: ...


class Sender:
    """Submits to workers over their links, and counts what is in flight."""

    def __init__(self, links: LinkPool, in_flight: InFlight, accept_seconds: float, failures: Failures) -> None:
        self._links = links
        self._in_flight = in_flight
        self._accept_seconds = accept_seconds
        self._failures = failures

    def send_prefill(self, plan: Plan, worker: Worker, handle: pb.KvHandle) -> Leg:
        submit = prefill_submit(plan.base(), plan.request, handle)
        leg = self._leg(worker, submit, is_prefill=True)
        plan.flight.expect_prefill(leg)
        leg.link.submit(submit, PrefillSink(plan.flight, leg, lambda error: self._failures.prefill_failed(plan, error)))
        return leg

    def send_choice(self, plan: Plan, choice: Choice, worker: Worker) -> Leg:
        """Submit a choice to a decode worker; with tokens so far it goes on from them, and computes their cache."""
        handle = None if choice.tokens else plan.handle
        submit = decode_submit(plan.base(), plan.request, choice.index, handle, choice.tokens)
        leg = choice.leg = self._leg(worker, submit, is_prefill=False)
        leg.link.submit(submit, ChoiceSink(plan.flight, choice, leg, partial(self._failures.choice_failed, plan)))
        return leg

    async def answer(self, plan: Plan, leg: Leg) -> None:
        """Wait for a worker's first word; one that refuses or stays silent is not asked again for this request."""
        worker = leg.link.worker
        try:
            async with asyncio.timeout(self._accept_seconds):
                await leg.answered
        except TimeoutError as error:
            leg.close(cancel=True)
            plan.avoid.add(worker.incarnation)
            raise Unavailable(
                f"worker {worker.worker_id} did not answer within {self._accept_seconds:g} s", retry_after_seconds=1.0
            ) from error
        except TandemError:
            plan.avoid.add(worker.incarnation)
            raise

    def _leg(self, worker: Worker, submit: pb.Submit, *, is_prefill: bool) -> Leg:
        num_tokens = len(submit.token_ids) + (0 if is_prefill else submit.sampling.max_tokens)
        give_back = tokens_in_flight(self._in_flight, worker.incarnation, num_tokens, is_prefill=is_prefill)
        try:
            link = self._links.get(worker)
        except TandemError:
            give_back()
            raise
        return Leg(link, submit, give_back)
