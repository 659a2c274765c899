"""Orders the inputs of calls into steps.

    add -> waiting, FIFO inside a fairness key -> take: keys take turns, input by input -> finish

A call is here from `add` until its last input is finished, or until it is dropped. Nothing of it is kept after that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tandem_engine.encoder.batch import EncoderInput, Values


@dataclass(eq=False)
class Call:
    """The inputs of one EncodeTexts; only the queue writes it."""

    key: int
    fairness_key: str
    inputs: Sequence[EncoderInput]
    values: list[Values | None] = field(init=False)
    """[num_values] of each input, None until it is encoded."""
    num_taken: int = 0
    num_finished: int = 0
    scheduled_ns: int = 0
    """The step of the first input began; Unix nanoseconds."""

    def __post_init__(self) -> None:
        self.values = [None] * len(self.inputs)

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self.inputs)

    @property
    def num_tokens_left(self) -> int:
        """Tokens of inputs that are not encoded yet."""
        return sum(each.num_tokens for each in self.inputs[self.num_finished :])

    def all_values(self) -> bytes:
        """Return the values of all inputs, float32, little-endian; every input is finished."""
        return np.stack([each for each in self.values if each is not None]).astype("<f4").tobytes()


class Taken(NamedTuple):
    """One input of a step."""

    call: Call
    place: int
    """The index of the input in its call."""

    @property
    def text(self) -> EncoderInput:
        return self.call.inputs[self.place]


class TextQueue:
    """Calls that are not finished; at most `max_calls`."""

    def __init__(self, max_calls: int) -> None:
        self.max_calls = max_calls
        self.num_running = 0
        """Calls with an input in the last step."""
        self._calls: dict[int, Call] = {}
        self._turns: OrderedDict[str, deque[Call]] = OrderedDict()
        """By fairness key, calls with inputs that were not taken; the first key is next."""
        self.num_tokens = 0
        """Tokens of inputs that are not finished."""

    @property
    def is_full(self) -> bool:
        return len(self._calls) >= self.max_calls

    @property
    def has_work(self) -> bool:
        return bool(self._turns)

    @property
    def num_waiting(self) -> int:
        """Calls of which no input was taken so far."""
        return sum(call.num_taken == 0 for call in self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        """Queue a call with at least one input; there is room for it."""
        assert not self.is_full and call.inputs, "the caller refuses calls beyond the limit, and empty ones"
        assert call.key not in self._calls, "the front gives every call a key of its own"
        self._calls[call.key] = call
        self._turns.setdefault(call.fairness_key, deque()).append(call)
        self.num_tokens += call.num_tokens

    def take(self, max_tokens: int, now_ns: int) -> list[Taken]:
        """Return the inputs of the next step: `max_tokens` at most, or one longer input alone."""
        taken: list[Taken] = []
        room = max_tokens
        while self._turns:
            key, calls = next(iter(self._turns.items()))
            one = Taken(calls[0], calls[0].num_taken)
            if taken and one.text.num_tokens > room:
                break
            taken.append(one)
            room -= one.text.num_tokens
            self._mark(one.call, now_ns)
            self._end_turn(key, calls)
        self.num_running = len({one.call.key for one in taken})
        return taken

    def finish(self, taken: Sequence[Taken], values: Values) -> list[Call]:
        """Keep the values, [len(taken), num_values]; return the calls that are complete, which are gone then."""
        complete = []
        for one, row in zip(taken, values, strict=True):
            call = one.call
            if call.key not in self._calls:
                continue  # dropped for an input before this one
            call.values[one.place] = row
            call.num_finished += 1
            self.num_tokens -= one.text.num_tokens
            if call.num_finished == len(call.inputs):
                del self._calls[call.key]
                complete.append(call)
        return complete

    def drop(self, key: int) -> bool:
        """Forget a call and all its inputs; return whether the call was here."""
        call = self._calls.pop(key, None)
        if call is None:
            return False
        self.num_tokens -= call.num_tokens_left
        calls = self._turns.get(call.fairness_key, deque())
        if call in calls:
            calls.remove(call)
            if not calls:
                del self._turns[call.fairness_key]
        return True

    def _mark(self, call: Call, now_ns: int) -> None:
        call.scheduled_ns = call.scheduled_ns or now_ns
        call.num_taken += 1

    def _end_turn(self, key: str, calls: deque[Call]) -> None:
        """Let the next key go first; forget a key without inputs."""
        if calls[0].num_taken == len(calls[0].inputs):
            calls.popleft()
        if calls:
            self._turns.move_to_end(key)
        else:
            del self._turns[key]
