"""What is known of a request over all attempts to run it?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from control_plane.flight import Flight
from control_plane.generation import TokenRequest
from control_plane.submission import Hashes, base_submit
from runtime.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, TandemError
from tandem.v1 import types_pb2 as pb

MAX_ATTEMPTS = 4
FINAL: tuple[type[TandemError], ...] = (InvalidRequest, DeadlineExceeded, Cancelled)
"""What another worker would answer too."""


@dataclass(eq=False)
class Plan:
    """What stays the same over all attempts of one request, and what was learnt from them."""

    request: TokenRequest
    card: pb.ModelCard
    hashes: Hashes | None
    traceparent: str
    flight: Flight
    avoid: set[str]
    attempt: int = 0
    """Counts every try, so that nothing late from one is taken for another's."""
    first_attempt: int = 0
    """Of the present round; a round ends when every worker has refused."""
    handle: pb.KvHandle | None = None
    refusal: Overloaded | None = None
    """What the first full worker of this round said."""
    has_started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once both halves were taken: until then, what fails is tried again as a whole."""
    migrations: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt - self.first_attempt + 1 >= MAX_ATTEMPTS

    def start_over(self) -> None:
        """Begin another round: those who refused may have room now."""
        self.avoid.clear()
        self.refusal = None
        self.attempt += 1
        self.first_attempt = self.attempt

    def base(self) -> pb.Submit:
        return base_submit(self.request, self.attempt, self.card, self.hashes, self.traceparent)

    def learn(self, refusal: TandemError) -> None:
        """Remember what a full worker said: if all are, the client is told that."""
        if isinstance(refusal, Overloaded) and not isinstance(refusal, Draining):
            self.refusal = self.refusal or refusal

    def started(self) -> None:
        """Both halves were taken. Who refused may take a choice that has to move later."""
        self.avoid.clear()
        self.has_started.set()
