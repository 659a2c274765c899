"""Keeps what the dispatcher did for one request: its stretches of time, attempts, calls to workers and moves.

The dispatcher writes, and an explanation is made from it when the request ends. Bounded, whatever happens to a request.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from control_plane.explain.class_seams import ClassRuns, Seam
from control_plane.explain.prompt_blocks import PromptBlocks
from control_plane.explain.timeline import Laps

if TYPE_CHECKING:
    from control_plane.explain.explanation import MoveKind, RouteExplanation
    from tandem.v1 import types_pb2 as pb

MAX_ATTEMPTS = 8
_MAX_CALLS = 32
_MAX_MOVES = 16
_MAX_PARTS = 8


class RouteTaken(Protocol):
    """A route, and what it was compared to."""

    @property
    def prefill_id(self) -> str:
        """The id of the worker that computes the prompt apart from decode; "" for none."""

    @property
    def decode_id(self) -> str: ...

    def explained(self) -> RouteExplanation: ...


class GrantLeft(Protocol):
    """What a worker's grant left to its gateway."""

    @property
    def number(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_requests(self) -> int: ...


class Call(Protocol):
    """One call to a worker."""

    sent_at: float
    """By `time.perf_counter`, as the other times."""
    accepted_at: float | None
    output_at: float | None
    """When its first token came."""
    closed_at: float | None
    """When the gateway stopped to listen."""
    ledger: pb.PhaseLedger | None

    @property
    def worker_id(self) -> str: ...

    @property
    def is_prefill(self) -> bool: ...

    @property
    def grant(self) -> GrantLeft | None:
        """What the worker's grant left before this call; None: its room was estimated."""


class Choice(Protocol):
    """One answer of a request."""

    num_delivered: int

    @property
    def tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Standing:
    """How a request stood among those that waited when it came."""

    service_class: str
    """batch, default or priority."""
    predicted_wait_ms: float
    """0: it need not wait behind others, or nothing was known."""
    num_waiting: int
    """For its model, at this gateway."""
    cost_ms: float
    """Predicted device time of prompt and answer."""
    used_ms: float
    """Its account's virtual counter for the model: device time used, and skipped while it was idle."""
    num_waiting_elsewhere: int = 0
    """For its model, at other gateways, as the workers had told."""


@dataclass(slots=True)
class Try:
    """One attempt to start the request."""

    number: int
    route: RouteTaken
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class Moved:
    """One move to another worker."""

    kind: MoveKind
    began_at: float
    ended_at: float
    from_worker: str
    to_worker: str
    why: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PartEncoded:
    """Some texts that an encode worker has answered."""

    worker_id: str
    sent_at: float
    replied_at: float
    num_tokens: int
    ledger: Any


class History:
    """What happened to one request in the dispatcher."""

    __slots__ = (
        "accepted_at",
        "attempts",
        "calls",
        "choices",
        "classes",
        "first_call",
        "laps",
        "moves",
        "parts",
        "prompt_blocks",
        "session",
        "standing",
    )

    def __init__(self) -> None:
        self.laps = Laps()
        """From the admission until the calls that were accepted were sent."""
        self.attempts: deque[Try] = deque(maxlen=MAX_ATTEMPTS)
        self.calls: deque[Call] = deque(maxlen=_MAX_CALLS)
        self.moves: deque[Moved] = deque(maxlen=_MAX_MOVES)
        self.parts: deque[PartEncoded] = deque(maxlen=_MAX_PARTS)
        self.choices: Sequence[Choice] = ()
        self.classes = ClassRuns()
        """Which numerics class produced which tokens."""
        self.first_call: Call | None = None
        """The call that brought the first token."""
        self.prompt_blocks: PromptBlocks | None = None
        """Where the prompt begins like others; None: no cache may hold it."""
        self.session = ""
        """The key of the request's session; "": it has none."""
        self.standing: Standing | None = None
        """None: it has not come so far."""
        self.accepted_at: float | None = None
        """When the workers had accepted the request; None: it waits."""

    def came(self, standing: Standing) -> None:
        """The request comes to those that wait for its model."""
        self.standing = standing

    def waits(self) -> None:
        """The request begins to wait for its turn: what was before went into finding no route."""
        self.laps.end("route")

    def waited(self) -> None:
        self.laps.end("queue")

    def routed(self, number: int, route: RouteTaken) -> None:
        """An attempt begins with this route."""
        self.laps.end("route")
        self.attempts.append(Try(number, route))

    def refused(self, error: BaseException) -> None:
        """The attempt has failed."""
        self.laps.end("submit")
        if self.attempts:
            self.attempts[-1].outcome = type(error).__name__

    def accepted(self) -> None:
        """The workers have accepted the request."""
        self.accepted_at = time.perf_counter()
        if self.attempts:
            self.attempts[-1].outcome = "accepted"

    def restarts(self, lost_worker: str) -> None:
        """The request begins again, since a worker was lost; without a token, the time there was spent for nothing."""
        if self.first_call is None:
            self.laps.end("prefill", lost_worker)
        self.accepted_at = None

    def called(self, call: Call) -> None:
        self.calls.append(call)

    def output_began(self, call: Call) -> None:
        """A call has brought its first token."""
        if self.first_call is None:
            self.first_call = call

    def moved(
        self, kind: MoveKind, began_at: float, workers: tuple[str, str], why: BaseException, num_tokens: int
    ) -> None:
        """Note a move from the first to the second of `workers`; `num_tokens` were computed again."""
        now = time.perf_counter()
        self.moves.append(Moved(kind, began_at, now, *workers, type(why).__name__, num_tokens))

    def encoded(self, worker_id: str, sent_at: float, num_tokens: int, ledger: Any) -> None:
        """An encode worker has answered some texts."""
        self.parts.append(PartEncoded(worker_id, sent_at, time.perf_counter(), num_tokens, ledger))

    @property
    def num_delivered(self) -> int:
        """Tokens that the client has."""
        return sum(choice.num_delivered for choice in self.choices)

    @property
    def seams(self) -> list[Seam]:
        """Places in what the client has where the tokens of another numerics class begin."""
        return self.classes.seams(self.choices)
