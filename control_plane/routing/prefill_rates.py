"""Keeps how fast each prefill worker computes prompts, by its own reports and those of its peers."""

from __future__ import annotations

from typing import NamedTuple

from control_plane.fleet.registry import Worker, WorkerRegistry
from tandem.v1 import types_pb2 as pb

_SECONDS_OF_PEERS = 10.0
"""What a worker has computed counts beside so many seconds at its peers' speed.

A prompt takes a while however few its tokens are, and long ones take more for each, so equal workers look different by
the prompts that they happened to get. By its own few hundred prompts alone, the one that looks fastest would get more
than it can do.
"""

_Peers = tuple[str, str]
"""A model, and a numerics class."""


class _Reported(NamedTuple):
    peers: _Peers
    num_tokens: int
    num_us: int
    """Microseconds: sums of whole numbers are exact, whatever is added and taken away again."""


class PrefillRates:
    """Listens to the registry; on one event loop."""

    def __init__(self, registry: WorkerRegistry) -> None:
        self._reported: dict[str, _Reported] = {}
        self.rates: dict[str, float] = {}
        """Prompt tokens per second by incarnation, as of the last report; of workers that have computed something."""
        self._of_peers: dict[_Peers, tuple[int, int]] = {}
        """Tokens and microseconds of all of them, over their lives."""
        registry.listen(self._changed)
        registry.listen_to_loads(self._heard)

    def of(self, incarnation: str) -> float | None:
        """Return prompt tokens per second as of the last report; None: the worker has computed nothing."""
        return self.rates.get(incarnation)

    def _changed(self, worker: Worker, is_here: bool) -> None:
        if is_here:
            self._heard(worker)
        else:
            self._forget(worker.incarnation)

    def _heard(self, worker: Worker) -> None:
        figures = worker.figures
        num_tokens, num_us = int(figures.num_prompt_tokens), int(1e6 * figures.step_seconds)
        if worker.role != pb.WORKER_ROLE_PREFILL or num_tokens <= 0 or num_us <= 0:
            return
        self._forget(worker.incarnation)
        peers = figures.model_id, figures.numerics_class
        tokens_of_all, us_of_all = self._of_peers.get(peers, (0, 0))
        tokens_of_all, us_of_all = tokens_of_all + num_tokens, us_of_all + num_us
        self._of_peers[peers] = tokens_of_all, us_of_all
        usual = _SECONDS_OF_PEERS * 1e6 * tokens_of_all / us_of_all
        rate = (num_tokens + usual) / (num_us / 1e6 + _SECONDS_OF_PEERS)
        self._reported[worker.incarnation] = _Reported(peers, num_tokens, num_us)
        self.rates[worker.incarnation] = rate

    def _forget(self, incarnation: str) -> None:
        reported = self._reported.pop(incarnation, None)
        if reported is None:
            return
        del self.rates[incarnation]
        num_tokens, num_us = self._of_peers[reported.peers]
        num_tokens, num_us = num_tokens - reported.num_tokens, num_us - reported.num_us
        if num_tokens:
            self._of_peers[reported.peers] = num_tokens, num_us
        else:
            del self._of_peers[reported.peers]
