"""Runs the steps of an encoder, and carries out commands between them.

This module does not import torch; `Encoder` computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tandem_engine.encoder.batch import Encoder, Values
from tandem_engine.encoder.checks import InvalidText, checked_inputs
from tandem_engine.encoder.messages import (
    CancelTexts,
    EncoderEvent,
    EncoderStats,
    EncodeTexts,
    TextsEncoded,
    TextsRefused,
)
from tandem_engine.encoder.queue import Call, Taken, TextQueue
from tandem_engine.messages import Ping, Pong

Event = EncoderEvent | Pong
COUNTERS = (
    "steps",
    "step_seconds",
    "encoded_inputs",
    "encoded_tokens",
    "finished_calls",
    "cancelled_calls",
    "refused_calls",
    "failed_calls",
)


class EncoderCore:
    """Joins queue and encoder. For one thread: `handle` any number of commands, then `step` while `has_work`."""

    def __init__(
        self,
        encoder: Encoder,
        max_tokens: int,
        max_calls: int,
        clock: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`max_tokens` per step; `max_calls` at a time.

        The clocks return nanoseconds: `clock` since 1970, for reports; `monotonic` for durations, since nobody sets it.
        """
        self.queue = TextQueue(max_calls)
        self._encoder = encoder
        self._max_tokens = max_tokens
        self._clock = clock
        self._monotonic = monotonic
        self._counters = dict.fromkeys(COUNTERS, 0.0)
        self._num_tokens_received = 0

    def begin_turn(self) -> None:
        """Do nothing: commands take no time that a step would lack."""

    def has_work(self) -> bool:
        """Whether `step` would do anything before the next command."""
        return self.queue.has_work

    def is_held(self) -> bool:
        """Return False: nothing but a command brings work."""
        return False

    def handle_some(self, command: object, *fds: int) -> Sequence[Event]:
        """Carry out a command between two steps and return its immediate events; no command brings a descriptor."""
        match command:
            case EncodeTexts():
                return self._add(command)
            case CancelTexts():
                self._counters["cancelled_calls"] += self.queue.drop(command.key)
                return []
            case Ping():
                return [Pong()]
            case _:
                raise TypeError(f"an encoder's engine has no command {type(command).__name__}")

    def run_step(self, emit: Callable[[Event], None]) -> None:
        """Encode the next inputs; emit the answers of complete calls, and EncoderStats."""
        started_ns = self._monotonic()
        taken = self.queue.take(self._max_tokens, self._clock())
        values = self._encoder.encode([one.text for one in taken])
        finished_ns = self._clock()
        self._count_step(taken, (self._monotonic() - started_ns) / 1e9)
        for refusal in self._drop_failed(taken, values):
            emit(refusal)
        for call in self.queue.finish(taken, values):
            self._counters["finished_calls"] += 1
            emit(TextsEncoded(call.key, call.all_values(), call.num_tokens, call.scheduled_ns, finished_ns))
        emit(self.stats())

    def wake_fd(self) -> None:
        """Return None: no step runs beside commands."""

    def close(self) -> None:
        """Do nothing: this core has no thread."""

    def stats(self) -> EncoderStats:
        queue = self.queue
        amounts = queue.num_running, queue.num_waiting, queue.num_tokens
        return EncoderStats(*amounts, dict(self._counters), self._num_tokens_received)

    def _add(self, command: EncodeTexts) -> list[Event]:
        self._num_tokens_received += command.num_tokens
        if self.queue.is_full:
            return self._refuse(
                command.key,
                f"{len(self.queue)} calls are here, the limit is {self.queue.max_calls}; try again later, or raise "
                "--max-num-waiting",
                is_full=True,
            )
        try:
            inputs = checked_inputs(command, self._encoder)
        except InvalidText as error:
            return self._refuse(command.key, str(error), is_full=False)
        self.queue.add(Call(command.key, command.fairness_key, inputs))
        return []

    def _refuse(self, key: int, message: str, *, is_full: bool) -> list[Event]:
        self._counters["refused_calls"] += 1
        return [TextsRefused(key, message, "full" if is_full else "invalid")]

    def _drop_failed(self, taken: Sequence[Taken], values: Values) -> list[TextsRefused]:
        """Drop the calls of values that are not finite; such a model's weights or kernels are broken."""
        refusals = []
        for one, row in zip(taken, values, strict=True):
            if not np.isfinite(row).all() and self.queue.drop(one.call.key):
                self._counters["failed_calls"] += 1
                message = f"the model returned values that are not finite for input {one.place}; check its weights"
                refusals.append(TextsRefused(one.call.key, message, "failed"))
        return refusals

    def _count_step(self, taken: Sequence[Taken], seconds: float) -> None:
        self._counters["steps"] += 1
        self._counters["step_seconds"] += seconds
        self._counters["encoded_inputs"] += len(taken)
        self._counters["encoded_tokens"] += sum(one.text.num_tokens for one in taken)
