"""Defines what the speculator needs of a draft model: a second, smaller model that proposes tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandem_engine.scheduling.request import Request

MAX_CATCH_UP_TOKENS = 256
"""Known tokens that a draft model computes before its first round of a step, of all requests together."""
NUM_DRAFT_TOKENS = 4
"""Tokens per request and step; each one is a round of the draft model."""


class DraftModel(Protocol):
    """Proposes tokens between the steps of the target model."""

    def num_missing(self, request: Request) -> int | None:
        """Return how many tokens it must compute before its first proposal; None: it cannot propose any now."""
        ...

    def propose(self, wanted: Mapping[Request, int]) -> Mapping[Request, Sequence[int]]:
        """Return up to the wanted number of tokens that may follow each request's.

        The request's block table must have slots for them. Computes at most MAX_CATCH_UP_TOKENS known tokens before;
        requests that lack more have no entry in the result.
        """
        ...

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that is over."""
        ...
