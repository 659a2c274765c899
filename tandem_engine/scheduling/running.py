"""Orders the running requests, and chooses which one is preempted when blocks run out."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tandem_engine.scheduling.request import Request


class RunningRequests:
    """Requests that have blocks and are computed. Decode requests may outnumber the seats of a step."""

    def __init__(self, max_num_seqs: int, served: Callable[[Request], float]) -> None:
        """`served` returns how many tokens a request's fairness key has been served."""
        self._max_num_seqs = max_num_seqs
        self._served = served
        self._requests: list[Request] = []
        self._seated: Collection[Request] = ()

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def has_free_seat(self) -> bool:
        return len(self._requests) < self._max_num_seqs

    @property
    def num_growing(self) -> int:
        """Requests that may need one more block in any step."""
        return sum(request.mode != "prefill" for request in self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)

    def seat(self, requests: Collection[Request]) -> None:
        """Remember the requests of the step that was just built."""
        self._seated = requests

    def in_order(self) -> list[Request]:
        """Return answers, then prompts that have begun, by rank.

        If seats are short, requests of one effective priority keep their seats, and a free seat goes to the key that
        was served least.
        """
        if len(self._requests) <= self._max_num_seqs:
            return sorted(self._requests, key=lambda request: (not request.is_decoding, request.rank))

        def key(request: Request) -> tuple[bool, int, bool, float, int]:
            is_new = request not in self._seated
            priority = request.effective_priority
            return (not request.is_decoding, -priority, is_new, self._served(request), request.arrival)

        ordered = sorted(self._requests, key=key)
        first_prompt = next((index for index, each in enumerate(ordered) if not each.is_decoding), 0)
        if first_prompt >= self._max_num_seqs:  # a begun prompt gets the last seat, or it would wait for ever
            ordered.insert(self._max_num_seqs - 1, ordered.pop(first_prompt))
        return ordered

    def victim(self) -> Request:
        """Return the request to preempt: the lowest rank, but never a prefill, because others pull from its blocks.

        So the earliest request of the highest class always continues, and each request becomes that one in time.
        """
        return max((request for request in self._requests if request.mode != "prefill"), key=lambda other: other.rank)
