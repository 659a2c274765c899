"""Describes a batch that vLLM's ranks compute while others are scheduled. This module does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from tandem_vllm.drawing import Drawn
from tandem_vllm.steps import Run

_Value = TypeVar("_Value")


class Flight(NamedTuple):
    """A batch between its schedule and its tokens."""

    output: Any
    """vLLM's SchedulerOutput."""
    runs: Sequence[Run]
    requests: Mapping[str, Any]
    """vLLM's requests in this batch."""
    executed: Any
    """A future, whose result is None; it raises what the model raised."""
    sampled: Any
    """A future of vLLM's ModelRunnerOutput."""
    drawn: Callable[[], Drawn]
    """Waits for the tokens of our draw."""

    def alive(self, requests: Mapping[str, Any]) -> Iterator[str]:
        """Yield the requests of the batch that vLLM's scheduler still has among `requests`."""
        return (name for name, request in self.requests.items() if requests.get(name) is request)


def only_of(names: Collection[str], values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the values of these names."""
    return {name: value for name, value in values.items() if name in names}
