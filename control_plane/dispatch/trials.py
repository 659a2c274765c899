"""Tries workers that are on probation, with copies of requests whose answers nobody waits for.

The request itself runs at well workers, so no client pays for a trial. A trial asks for one token. A worker has one
trial at a time; while it goes well, the next one follows at once, with the same prompt.
"""

from __future__ import annotations

import asyncio

from control_plane.dispatch.request_starter import routing_request
from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.submitter import Submitter
from control_plane.dispatch.worker_call import WorkerCall
from control_plane.fleet.call_watch import Record
from control_plane.fleet.kv_clients import KvClients
from control_plane.routing.groups import index_space
from control_plane.routing.router import Router
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Overloaded, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

_RELEASE_SECONDS = 5.0


class Trials:
    """Starts a trial when a request has started; on one event loop."""

    def __init__(self, router: Router, submitter: Submitter, kv_clients: KvClients, tasks: TaskSet) -> None:
        self._health = router.health
        self._costs = router.costs
        self._submitter = submitter
        self._kv_clients = kv_clients
        self._tasks = tasks

    def started(self, state: RequestState) -> None:
        """A request was accepted elsewhere: a copy may try a worker of its model. Probes are not copied."""
        if state.request.is_probe:
            return
        record = self._health.to_try(state.request.model_id)
        if record is not None:
            record.has_trial = True
            self._tasks.spawn(self._try(state, record))

    async def _try(self, state: RequestState, record: Record) -> None:
        try:
            while self._health.is_due(record) and await self._went_well(state, record):
                pass
        except TandemError as error:  # the worker has gone meanwhile
            log.debug("trial_not_sent", worker=record.worker.worker_id, error=error.log_text)
        finally:
            record.has_trial = False

    async def _went_well(self, state: RequestState, record: Record) -> bool:
        """Send one copy, and return whether its first token came in time; the call's watch counts it."""
        request = routing_request(state)
        match = self._costs.match(request, index_space(record.worker))
        estimate = self._costs.estimate(record.worker, request, match)
        await state.forms.prepare([record.worker.info.card])
        call = self._submitter.new_trial(state, record.worker, estimate)
        assert call.watch is not None, "a trial is there for its watch"
        sink, longest_seconds = _TrialSink(call), self._health.trial_seconds(call.watch)
        call.link.submit(call.submit, sink, state.forms.of(record.worker.info.card).wire)
        try:
            async with asyncio.timeout(longest_seconds):
                return await sink.outcome
        except TimeoutError:
            call.watch.failed(f"it brought no token for {longest_seconds:.2f} s", "slow")
            return False
        finally:
            call.close(cancel=True)
            if call.submit.HasField("handle"):
                self._tasks.spawn(self._kv_clients.release_all(call.submit.handle, _RELEASE_SECONDS))


class _TrialSink:
    """Takes in the events of a trial. Implements worker_links.Sink."""

    def __init__(self, call: WorkerCall) -> None:
        self._call = call
        self.outcome: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    def accepted(self) -> None:
        self._call.answer(None)

    def output(self, output: pb.TokenOutput) -> None:
        if output.token_ids and not self._call.has_output:
            self._call.output_began()
        if output.finish_reason or output.HasField("ledger"):
            self._end(went_well=self._call.has_output)

    def worked(self, ledger: pb.PhaseLedger) -> None:
        """Nobody is billed for a trial."""

    def ended(self, error: TandemError) -> None:
        self._call.answer(error)
        if self._call.watch is not None and not isinstance(error, Overloaded):
            self._call.watch.failed(f"it answered {type(error).__name__}")
        self._call.close(cancel=False)
        self._end(went_well=False)

    def _end(self, *, went_well: bool) -> None:
        if not self.outcome.done():
            self.outcome.set_result(went_well)
