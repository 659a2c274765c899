"""The requests of simulated clients, and their submissions to workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.fleet.worker_links import WorkerLink
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled, TandemError, Unavailable

_ACCEPT_SECONDS = 5.0


@dataclass(eq=False)
class Choice:
    index: int
    expected: list[int]
    tokens: list[int] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return len(self.tokens) == len(self.expected)


@dataclass(eq=False)
class SimulatedRequest:
    """One request of a client."""

    name: str
    prompt: list[int]
    max_tokens: int
    deadline: float
    """On the virtual wall clock."""
    choices: list[Choice]
    handle: pb.KvHandle | None = None
    attempt: int = 0
    open_submissions: dict[Submission, None] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    outcome: str = ""


Take = Callable[[SimulatedRequest, pb.TokenOutput], None]


class Submission:
    """One Submit at one worker; implements control_plane.fleet.worker_links.Sink."""

    def __init__(self, take: Take, request: SimulatedRequest, link: WorkerLink, submit: pb.Submit) -> None:
        self._take = take
        self._request = request
        self._link = link
        self._submit = submit
        loop = asyncio.get_running_loop()
        self._answered: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[TandemError | None] = loop.create_future()
        request.open_submissions[self] = None
        link.submit(submit, self)

    async def run(self) -> TandemError | None:
        """Return how the submission ended; a worker without any reply counts as lost."""
        try:
            await asyncio.wait([self._answered], timeout=_ACCEPT_SECONDS)
            if not self._answered.done():
                return Unavailable("the worker did not answer")
            return await self.over
        finally:
            self.close()

    def accepted(self) -> None:
        if not self._answered.done():
            self._answered.set_result(None)

    def output(self, output: pb.TokenOutput) -> None:
        self._take(self._request, output)
        is_last_choice = output.choice_index == len(self._submit.choice_seeds) - 1
        if output.HasField("ledger") and (is_last_choice or not self._submit.choice_seeds):
            self._end(None)

    def worked(self, ledger: pb.PhaseLedger) -> None: ...

    def ended(self, error: TandemError) -> None:
        self._end(error)

    def close(self) -> None:
        """Cancel the submission unless it has ended."""
        if not self.over.done():
            self._link.cancel(self._submit.request_id, self._submit.attempt)
            self._end(Cancelled("the gateway cancelled"))

    def _end(self, error: TandemError | None) -> None:
        self._request.open_submissions.pop(self, None)
        self.accepted()
        if not self.over.done():
            self._link.forget(self._submit.request_id, self._submit.attempt)
            self.over.set_result(error)
