"""Keeps which numerics class produced which tokens of an answer, and finds the seams between two classes.

Within a class a token is a pure function of its request (law 3 in docs/architecture.md). Where the tokens of another
class begin, the answer has a seam: the tokens after it are valid, but may differ from those of the class before it.
One entry per call to a worker, and nothing per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from tandem.v1 import types_pb2 as pb


class Choice(Protocol):
    """One answer of a request."""

    num_delivered: int
    """Tokens that the client has."""


class Run(NamedTuple):
    """Tokens of one worker, up to the next run of the choice."""

    position: int
    """Tokens of the answer before it."""
    worker_id: str
    fingerprint: pb.Fingerprint

    @property
    def numerics_class(self) -> str:
        return self.fingerprint.numerics_class


class Seam(NamedTuple):
    """The place in an answer where the tokens of another class begin."""

    choice: int
    before: Run
    after: Run

    @property
    def position(self) -> int:
        """Completion tokens of the choice before the seam."""
        return self.after.position


class ClassRuns:
    """The runs of all choices of one request. On the event loop."""

    __slots__ = ("_on_other", "_runs", "_usual_class", "has_changed")

    def __init__(self) -> None:
        self._runs: dict[int, list[Run]] = {}
        self._usual_class = ""
        self._on_other: Callable[[], None] | None = None
        self.has_changed = False
        """Whether two runs of a choice have different classes; without that there is no seam."""

    def begin(self, choice: int, position: int, worker_id: str, fingerprint: pb.Fingerprint) -> Seam | None:
        """Note that a worker produces the tokens of a choice from `position` on; return the seam if there is one.

        A run that produced nothing, because the next one begins at the same position, is forgotten.
        """
        run, runs = Run(position, worker_id, fingerprint), self._runs.setdefault(choice, [])
        if runs and runs[-1].position >= position:
            runs.pop()
        seam = None
        if runs and runs[-1].numerics_class != run.numerics_class:
            self.has_changed = True
            seam = Seam(choice, runs[-1], run)
        runs.append(run)
        if self._on_other is not None and run.numerics_class != self._usual_class:
            self._on_other()
        return seam

    def begin_before(self, choice: int, worker_id: str, fingerprint: pb.Fingerprint) -> None:
        """Note that another worker has produced the first token of a choice, which the first run was noted for."""
        runs = self._runs[choice]
        first = Run(0, worker_id, fingerprint)
        runs[:1] = [first, runs[0]._replace(position=1)]
        if runs[1].numerics_class != first.numerics_class:
            self.has_changed = True
        if self._on_other is not None and first.numerics_class != self._usual_class:
            self._on_other()

    def has_begun(self, choice: int) -> bool:
        """Return whether a worker has produced a token of the choice."""
        return choice in self._runs

    def watch(self, usual_class: str, on_other: Callable[[], None]) -> None:
        """Have `on_other` called when a run has another class than the usual one, also if it has begun already."""
        self._usual_class, self._on_other = usual_class, on_other
        if any(run.numerics_class != usual_class for runs in self._runs.values() for run in runs):
            on_other()

    def at(self, choice: int, num_delivered: int) -> Run | None:
        """Return the run that the last of `num_delivered` tokens belongs to; before the first token, the first run."""
        runs = self._runs.get(choice, ())
        return next((run for run in reversed(runs) if run.position < num_delivered), runs[0] if runs else None)

    def seams(self, choices: Sequence[Choice]) -> list[Seam]:
        """Return the seams in what the client has, by choice and position; `choices` are those of the request."""
        return list(self._seams(choices)) if self.has_changed else []

    def _seams(self, choices: Sequence[Choice]) -> Iterator[Seam]:
        for index, runs in sorted(self._runs.items()):
            num_delivered = choices[index].num_delivered
            for before, after in pairwise(runs):
                if after.position < num_delivered and before.numerics_class != after.numerics_class:
                    yield Seam(index, before, after)
