"""What is known of a request over all attempts to run it?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from control_plane.dispatch.block_hashes import Hashes
from control_plane.dispatch.request_stream import Choice, Flight
from control_plane.dispatch.submission import base_submit
from control_plane.generation import TokenRequest
from control_plane.routing.estimates import Ask
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import Cancelled, DeadlineExceeded, Draining, InvalidRequest, Overloaded, TandemError

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
    num_resends: int = 0
    """How often the whole was sent again because a worker was lost, rather than full."""
    needs_permit: bool = False
    """The next attempt is such a one."""
    handle: pb.KvHandle | None = None
    refusal: Overloaded | None = None
    """What the first full worker of this round said."""
    has_started: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once both halves were taken: until then, what fails is tried again as a whole."""
    has_started_anew: bool = False
    """Another prefill worker was asked once the first was lost; after that one, decode computes the prompt."""
    migrations: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def is_last_attempt(self) -> bool:
        return self.attempt - self.first_attempt + 1 >= MAX_ATTEMPTS

    def start_over(self) -> None:
        """Begin another round: those who refused may have room now."""
        self.has_started.clear()
        self.avoid.clear()
        self.refusal = None
        self.attempt += 1
        self.first_attempt = self.attempt

    def base(self) -> pb.Submit:
        return base_submit(self.request, self.attempt, self.card, self.hashes, self.traceparent)

    def ask(self) -> Ask:
        """Return what the router has to know of the request as a whole."""
        request = self.request
        return Ask(
            request.model_id,
            len(request.token_ids),
            request.sampling.max_tokens,
            self._findable(self.hashes.blocks if self.hashes else ()),
            self.card.block_size or 1,
            request.session_affinity,
            hand_over="always" if request.is_probe else "if_cheaper",
        )

    def ask_for(self, choice: Choice) -> Ask:
        """Return the same for a choice that has to move: with tokens so far its decode worker reads everything."""
        if not choice.tokens:
            return replace(self.ask(), hand_over="always" if self.handle is not None else "never")
        num_tokens = len(choice.tokens)
        whole = self.ask()
        return replace(
            whole,
            num_prompt_tokens=whole.num_prompt_tokens + num_tokens,
            max_tokens=max(1, whole.max_tokens - num_tokens),
            block_hashes=self._findable(self.hashes_of(choice.tokens)),
            hand_over="never",
        )

    def hashes_of(self, so_far: Sequence[int]) -> Sequence[bytes]:
        """Return the block hashes of the prompt and an answer that has begun."""
        if self.hashes is None or not so_far:
            return ()
        return self.hashes.with_answer([*self.request.token_ids, *so_far], self.card.block_size)

    def _findable(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        return block_hashes[: self.hashes.max_found_blocks] if self.hashes else ()

    def learn(self, refusal: TandemError) -> None:
        """Remember what a full worker said: if all are, the client is told that."""
        if isinstance(refusal, Overloaded) and not isinstance(refusal, Draining):
            self.refusal = self.refusal or refusal

    def started(self) -> None:
        """Both halves were taken. Who refused may take a choice that has to move later."""
        self.avoid.clear()
        self.has_started.set()
