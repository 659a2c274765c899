"""What the simulation asks of a policy, and what it tells it.

A policy is one gateway's knowledge. Several gateways are several policies that see the same reports.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from control_plane.simulator.engine import Job, Report
from control_plane.simulator.traces import TraceRequest


@dataclass(frozen=True)
class Placement:
    """Where a request goes. Numbers are those of the fleet's workers."""

    prefill: int | None
    """None: the decode worker computes the prompt."""
    decodes: tuple[int, ...]
    """In order of preference; the first that accepts is used."""
    source_host: int | None = None
    """The host whose store has more of the prompt than the worker's own."""
    predicted_cached: int = 0
    """Tokens of the prompt that the policy expects in caches."""
    handle: object = None
    """The policy's own."""


class Policy(Protocol):
    """Decides on virtual time; `now` is in seconds."""

    report_seconds: float | None
    """How often the policy reads load reports; None: as often as the fleet's workers send them."""

    def place(self, request: TraceRequest, now: float) -> Placement | None:
        """Return a placement; None: every worker would refuse, so the request waits."""

    def accepted(self, request: TraceRequest, placement: Placement, decode: int) -> None:
        """Workers have accepted the request: what `placement` says, with this decode worker."""

    def prompt_read(self, request: TraceRequest, worker: int, job: Job, *, was_pulled: bool) -> None:
        """A worker has the prompt's KV cache: it computed the cache, or pulled it (`was_pulled`)."""

    def ended(self, request: TraceRequest, decode: int, hand_over_seconds: float | None) -> None:
        """The answer is complete. `hand_over_seconds`: from prefill's first token until decode had the cache."""

    def report(self, report: Report, now: float) -> None:
        """A worker's load report has come."""


@dataclass(frozen=True)
class PlacementPrice:
    """What a placement is predicted to take."""

    num_computed_tokens: int
    device_ms: float
    """Of the prompt."""


@runtime_checkable
class AdmittingPolicy(Protocol):
    """A policy that knows the room and the speed of workers."""

    def price(self, placement: Placement) -> PlacementPrice: ...

    def refused(self, number: int, request: TraceRequest) -> None:
        """A worker that seemed to have room for a request has none."""

    def decodes(self, number: int) -> bool:
        """Return whether a worker is a decode worker."""

    def work(self, number: int) -> tuple[float, float]:
        """Return what a decode worker has reported since its report before: seconds of steps, tokens sampled."""

    def has_room(self, number: int, num_tokens: int) -> bool:
        """Return whether a decode worker's report shows room for so many tokens."""

    def model_of(self, number: int) -> str: ...
