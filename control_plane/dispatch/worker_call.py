"""Holds one Submit at one worker, from sending it to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from control_plane.fleet.worker_links import WorkerLink
from control_plane.routing.cost_model import InFlightEntry, PrefillEstimate
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled, TandemError


def _new_answer() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class WorkerCall:
    """One Submit at one worker. Gives its in-flight tokens back exactly once."""

    link: WorkerLink
    submit: pb.Submit
    entry: InFlightEntry
    choice_index: int | None = None
    """The choice that the call generates. None: the call computes the prompt at a prefill worker."""
    estimate: PrefillEstimate | None = None
    """What the router expected of the caches, if this worker computes the prompt."""
    answered: asyncio.Future[None] = field(default_factory=_new_answer)
    """Done once the worker has accepted the request; an error if the worker refused."""
    is_open: bool = True
    has_output: bool = False

    @property
    def incarnation(self) -> str:
        return self.link.worker.incarnation

    @property
    def is_fresh(self) -> bool:
        """Whether the call began with the prompt alone, and not in the middle of an answer."""
        return len(self.submit.token_ids) == self.submit.num_prompt_tokens

    def answer(self, error: TandemError | None) -> bool:
        """Complete `answered`; return False if it was completed before."""
        if self.answered.done():
            return False
        if error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)
            self.answered.exception()  # marks it as retrieved: the waiting task may have left
        return True

    def output_began(self) -> None:
        """Note the first output: a decode worker has the prompt's KV cache now."""
        self.has_output = True
        if self.choice_index is not None:
            self.entry.prompt_read()

    def close(self, *, cancel: bool) -> None:
        """Stop listening to the worker, and cancel the request there; idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        self.entry.remove()
        if cancel:
            self.answer(Cancelled("the request ended before its worker had answered"))
            self.link.cancel(self.submit.request_id, self.submit.attempt)
        else:
            self.link.forget(self.submit.request_id, self.submit.attempt)
