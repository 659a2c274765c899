"""Gives the requests of a run: a part of a trace, or sessions that are made up, at the wanted load."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from control_plane.simulator.load import load_of, worker_seconds
from control_plane.simulator.profiles import FleetProfile
from control_plane.simulator.synthetic import Agents, agentic_trace
from control_plane.simulator.traces import TraceRequest, jittered, part_of, sped_up


class Source(Protocol):
    """A source gives the same requests for the same seed."""

    def arrivals(self, fleet: FleetProfile, load: float | None, seed: int) -> list[TraceRequest]:
        """Return the requests of a run. `load`: as in `load_of`; None: as they come."""


@dataclass(frozen=True)
class TracePart:
    """Requests of a trace, from a random place on; their arrivals and gaps are divided by what the load wants."""

    trace: Sequence[TraceRequest]
    num_requests: int | None = None
    """None: the whole trace."""
    jitter_seconds: float = 0.0
    """Of the trace's own time: each arrival is moved by up to that much."""

    def arrivals(self, fleet: FleetProfile, load: float | None, seed: int) -> list[TraceRequest]:
        rng, chosen = random.Random(seed), list(self.trace)
        if self.num_requests is not None and self.num_requests < len(chosen):
            first = rng.randrange(len(chosen) - self.num_requests + 1)
            chosen = part_of(chosen, first, self.num_requests)
        if self.jitter_seconds:
            chosen = jittered(chosen, self.jitter_seconds, rng)
        return chosen if load is None else sped_up(chosen, load / load_of(chosen, fleet))


@dataclass(frozen=True)
class MadeUpAgents:
    """Sessions of agents; more load is more sessions, whose pauses stay as they are.

    The load is that of the second half: prompts are shorter at the beginning.
    """

    num_requests: int
    agents: Agents = field(default_factory=Agents)

    def arrivals(self, fleet: FleetProfile, load: float | None, seed: int) -> list[TraceRequest]:
        if load is None:
            return agentic_trace(self.num_requests, seed, self.agents)
        turns_per_second = self.agents.sessions_per_second * self.agents.mean_turns
        trace = agentic_trace(self.num_requests, seed, self.agents)
        half = len(trace) // 2  # at first prompts are short, and system prompts are new
        seconds_per_turn = (worker_seconds(trace, fleet) - worker_seconds(trace[:half], fleet)) / (len(trace) - half)
        load_now = seconds_per_turn * turns_per_second
        rate = self.agents.sessions_per_second * load / load_now
        return agentic_trace(self.num_requests, seed, replace(self.agents, sessions_per_second=rate))
