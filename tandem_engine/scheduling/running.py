"""Holds the requests that have a seat: those that may be in a step."""

from __future__ import annotations

from collections.abc import Iterator

from tandem_engine.scheduling.request import Request


class RunningRequests:
    """Requests that have blocks and a seat, and are computed."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_free_seats(self) -> int:
        return self._max_num_seqs - len(self._requests)

    @property
    def num_growing(self) -> int:
        """Requests that may need one more block in any step."""
        return sum(request.mode != "prefill" for request in self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def in_order(self) -> list[Request]:
        """Return answers, then prompts that have begun, by rank."""
        return sorted(self._requests, key=lambda request: (not request.is_decoding, request.rank))

    def last_answer(self) -> Request | None:
        """Return the answer of the lowest rank. A prompt that has begun keeps its seat however many answers wait."""
        answers = (request for request in self._requests if request.is_decoding and request.mode != "prefill")
        return max(answers, key=lambda request: request.rank, default=None)
