"""What runs at one worker for one request, and what is it counted as?"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.fleet.worker_links import WorkerLink
from control_plane.routing.estimates import Reading
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled, TandemError


def _new_answer() -> asyncio.Future[None]:
    return asyncio.get_running_loop().create_future()


@dataclass(eq=False)
class Leg:
    """One Submit at one worker, from sending it to its end; gives its tokens in flight back exactly once."""

    link: WorkerLink
    submit: pb.Submit
    give_back: Callable[[], None]
    prompt_read: Callable[[], None] = lambda: None
    """Called, perhaps more than once, when the worker has read the prompt or never will."""
    reading: Reading | None = None
    """What the router expected of it, if it reads the prompt."""
    answered: asyncio.Future[None] = field(default_factory=_new_answer)
    """The worker's first word: it took the request, or why not."""
    is_open: bool = True
    has_output: bool = False

    @property
    def is_fresh(self) -> bool:
        """Whether it began with the prompt alone, and not in the middle of an answer."""
        return len(self.submit.token_ids) == self.submit.num_prompt_tokens

    def settle(self, error: TandemError | None) -> bool:
        """Answer the dispatcher, who waits for the first word; return False if it has been answered before."""
        if self.answered.done():
            return False
        if error is None:
            self.answered.set_result(None)
        else:
            self.answered.set_exception(error)
            self.answered.exception()  # whoever waited may have left: nobody need read it
        return True

    def close(self, *, cancel: bool) -> None:
        if not self.is_open:
            return
        self.is_open = False
        self.prompt_read()
        self.give_back()
        if cancel:
            self.settle(Cancelled("the request ended before its worker had answered"))
            self.link.cancel(self.submit.request_id, self.submit.attempt)
        else:
            self.link.forget(self.submit.request_id, self.submit.attempt)


def counted(counter: Counter[str], incarnation: str, number: int) -> Callable[[], None]:
    """Count a number as sent to a worker; the function returned takes it back, once."""
    counter[incarnation] += number
    is_counted = True

    def give_back() -> None:
        nonlocal is_counted
        if is_counted:
            is_counted = False
            counter[incarnation] -= number
            if counter[incarnation] <= 0:
                del counter[incarnation]

    return give_back
