"""Keeps the requests that run and the latest that have ended, and tells others of each end.

Everything here is on one event loop, but for `num_by_model`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from control_plane.explain.assembly import explanation_of, summary_of
from control_plane.explain.explanation import Explanation, Summary
from control_plane.explain.journal import Journal
from control_plane.explain.timeline import Timeline
from tandem_runtime.log import get_logger

log = get_logger(__name__)

_MAX_LATEST = 256

Ended = Callable[[Explanation], None]
FirstTokenLeft = Callable[[Journal], None]


class Keeper(Protocol):
    """Keeps explanations for later."""

    def add(self, explanation: Explanation) -> None:
        """Keep an explanation, soon; never waits."""

    async def drain(self) -> None:
        """Wait until all are kept."""


class Requests:
    """The journals of one gateway. Makes an explanation of each when it ends, and hands it to who wants it."""

    def __init__(
        self,
        gateway: str = "",
        *,
        with_texts: bool = False,
    ) -> None:
        """`gateway`: its incarnation. `with_texts`: explanations have the prompt and the answer."""
        self._gateway = gateway
        self._keeper: Keeper | None = None
        self._on_ended: list[Ended] = []
        self._on_first_token: list[FirstTokenLeft] = []
        self._running: dict[Journal, None] = {}
        """As an ordered set: two requests may have the same id, if a caller of this package gives none."""
        self._latest: OrderedDict[str, Explanation] = OrderedDict()
        self._num_ended = 0
        self._with_texts = with_texts

    def keep_in(self, keeper: Keeper) -> None:
        """Have all explanations kept from now on."""
        self._keeper = keeper

    def listen(self, ended: Ended) -> None:
        """Have `ended` called with the explanation of each request that ends. It must be fast."""
        self._on_ended.append(ended)

    def listen_to_first_tokens(self, first_token_left: FirstTokenLeft) -> None:
        """Have `first_token_left` called when the first token of a stream has left. It must be fast."""
        self._on_first_token.append(first_token_left)

    def open(self, timeline: Timeline | None, request_id: str, account: str, operation: str) -> Journal:
        """Begin to follow one prompt of an HTTP request; without `timeline`, from now on."""
        journal = Journal(self, timeline or Timeline(), request_id, account, operation)
        self._running[journal] = None
        return journal

    def first_token_left(self, journal: Journal) -> None:
        """Tell who wants to know that the first token of a stream has left."""
        for listener in self._on_first_token:
            try:
                listener(journal)
            except Exception:  # what only watches a request must not fail it
                log.exception("explanation_listener_failed", request_id=journal.request_id)

    def ended(self, journal: Journal) -> Explanation:
        """Take a journal that has ended; return its explanation."""
        self._running.pop(journal, None)
        explanation = explanation_of(journal, self._gateway, with_texts=self._with_texts)
        self._num_ended += 1
        self._latest[journal.request_id] = explanation
        if len(self._latest) > _MAX_LATEST:
            self._latest.popitem(last=False)
        if self._keeper is not None:
            self._keeper.add(explanation)
        for ended in self._on_ended:
            try:
                ended(explanation)
            except Exception:  # what only watches a request must not fail it
                log.exception("explanation_listener_failed", request_id=journal.request_id)
        return explanation

    # ------------------------------------------------------------------------------------------------------ reading

    def find(self, request_id: str) -> Explanation | None:
        """Return the explanation of a request that runs or has ended lately; of a running one so far."""
        if (known := self._latest.get(request_id)) is not None:
            return known
        for journal in self._running:
            if journal.request_id == request_id:
                return explanation_of(journal, self._gateway, with_texts=self._with_texts)
        return None

    def matching(self, limit: int, wanted: Mapping[str, str]) -> list[Summary]:
        """Return up to `limit` of the requests that run, then of those that ended lately, the newest first.

        `wanted`: values that the summary's fields account, model and state must have.
        """
        return list(islice(self._matching(list(wanted.items())), limit))

    def _matching(self, wanted: Sequence[tuple[str, str]]) -> Iterator[Summary]:
        for journal in reversed(self._running):
            if all(getattr(journal, name) == value for name, value in wanted):
                yield summary_of(journal)
        for explanation in reversed(self._latest.values()):
            if all(getattr(explanation.summary, name) == value for name, value in wanted):
                yield explanation.summary

    def newest(self, limit: int) -> list[dict[str, Any]]:
        """Return up to `limit` rows of the list, running ones first, then the newest."""
        return [summary.to_json() for summary in self.matching(limit, {})]

    def num_ended(self) -> int:
        """Return how many requests have ended since this process started."""
        return self._num_ended

    @property
    def running(self) -> Collection[Journal]:
        return self._running.keys()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def drain(self) -> None:
        """Wait until the explanations of all that have ended are kept."""
        if self._keeper is not None:
            await self._keeper.drain()

    def num_by_model(self) -> Mapping[tuple[str, str], int]:
        """Return how many requests there are by state (queued, running) and model. May be called in any thread."""
        return Counter((journal.state, journal.model) for journal in list(self._running))
