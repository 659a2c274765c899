"""Defines what the core knows of vLLM: a queue of requests, steps that it runs, and a pool of blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from tandem_engine.messages import RequestFailed
from tandem_engine.scheduling.request import Request, Sampled


class Run(NamedTuple):
    """Tokens [first_position, first_position + num_tokens) of one request, computed in one step."""

    request_id: str
    first_position: int
    num_tokens: int
    table: Sequence[int] = ()
    """The request's blocks, if the run completes one, or is a part of a prefill."""


class EngineStep(NamedTuple):
    """What vLLM did in one step."""

    runs: Sequence[Run] = ()
    sampled: Mapping[str, Sampled] = {}
    """The next token of each request whose run ended with its last known token, but for those that failed."""
    failures: Sequence[RequestFailed] = ()
    finished: frozenset[str] = frozenset()
    """Requests that vLLM has finished by itself, and forgotten."""
    choices: Mapping[str, Sequence[Sampled]] = {}
    """The first tokens of prefills with more than one choice."""


class Pool(NamedTuple):
    """Blocks of vLLM's pool: total = free + cached + used."""

    num_total: int
    num_free: int
    num_cached: int
    """At least so many have content that can be found, and no user."""
    num_used: int


class Engine(Protocol):
    """vLLM."""

    def prepare(self, request: Request) -> bool:
        """Start to compile a request's grammar; return whether it is ready."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request that is prepared."""
        ...

    def abort(self, request_id: str) -> None:
        """Forget a request, in whatever state."""
        ...

    @property
    def has_work(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_preempted(self) -> int:
        """Requests that vLLM has preempted, and that wait for blocks."""
        ...

    @property
    def pool(self) -> Pool: ...

    def step(self) -> EngineStep: ...
