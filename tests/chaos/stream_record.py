"""Records what one client received, and compares it with the expected answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from control_plane.generation import Usage
from tandem_runtime.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.chaos.questions import Answer, Question

Stage = Literal["queued", "prefilling", "between", "decoding"]
STAGES: tuple[Stage, ...] = ("queued", "prefilling", "between", "decoding")

SLACK_SECONDS = 2.0
"""The gateway waits one second beyond a deadline for the worker's answer; the rest is for a busy machine."""
_LOGPROB_TOLERANCE = 1e-3


@dataclass(eq=False)
class StreamRecord:
    """One stream as its client received it. Times are time.monotonic()."""

    request_id: str
    question: Question
    deadline: float
    is_impatient: bool = False
    """The deadline is so short that exceeding it is an accepted outcome."""
    is_cacheable: bool = True
    leave_at: Stage | None = None
    left_at: Stage | None = None
    """The stage at which the client left; None if the stream had ended."""
    left_admission_queue: bool = False
    """The client left while the request was in the gateway's admission queue, not in a worker's queue."""
    num_refused: int = 0
    """The queue was full in a burst; the client came back."""
    started: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)
    finish_reasons: list[str | None] = field(default_factory=list)
    usage: Usage | None = None
    route: Mapping[str, Any] = field(default_factory=dict)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.question.seeds]
        self.logprobs = [[] for _ in self.question.seeds]
        self.finish_reasons = [None for _ in self.question.seeds]

    @property
    def is_whole(self) -> bool:
        return self.left_at is None and self.error is None

    @property
    def has_failed(self) -> bool:
        """Return whether the stream failed. With a deadline meant to pass, the errors of a deadline are no failure.

        Nor is a refusal before: the gateway has predicted that the request would wait for longer.
        """
        if self.error is None:
            return False
        is_expected = isinstance(self.error, DeadlineExceeded | Unavailable) and self.ended >= self.deadline - 0.1
        return not (self.is_impatient and (is_expected or isinstance(self.error, Overloaded)))

    def wrong_tokens(self) -> Iterator[str]:
        """Yield the choices that differ from the undisturbed run; a stream that was left must be a prefix of it."""
        for index, (answer, tokens) in enumerate(zip(self.question.answers, self.tokens, strict=True)):
            expected = answer.tokens if self.is_whole else answer.tokens[: len(tokens)]
            if tuple(tokens) != expected:
                yield f"choice {index}: {_difference(tokens, expected)}"
            if self.is_whole and self.finish_reasons[index] != answer.finish_reason:
                yield f"choice {index} ended with {self.finish_reasons[index]}, undisturbed with {answer.finish_reason}"
            yield from self._wrong_logprobs(index, answer)

    def wrong_usage(self) -> Iterator[str]:
        """Yield what is wrong with the usage."""
        if self.usage is None or not self.is_whole:
            return
        usage, num_prompt = self.usage, len(self.question.prompt)
        if usage.num_prompt_tokens != num_prompt or usage.num_computed_tokens + usage.num_cached_tokens != num_prompt:
            yield f"{usage} for a prompt of {num_prompt} tokens"
        if usage.num_computed_tokens < 1:
            yield f"{usage}: no token of the prompt was computed, one always is"
        if usage.num_completion_tokens != self.question.num_answer_tokens:
            yield f"{usage} for an answer of {self.question.num_answer_tokens} tokens"
        if not self.is_cacheable and usage.num_cached_tokens:
            yield f"{usage} for a request that must not use the cache"

    @property
    def was_late(self) -> bool:
        """Return whether the stream ended after its deadline."""
        return self.ended > self.deadline + SLACK_SECONDS

    def _wrong_logprobs(self, index: int, answer: Answer) -> Iterator[str]:
        record = self.logprobs[index]
        wanted = answer.logprobs if self.is_whole else answer.logprobs[: len(record)]
        if len(record) != len(wanted):
            yield f"choice {index} has {len(record)} log probabilities, not {len(wanted)}"
        elif any(abs(one - other) > _LOGPROB_TOLERANCE for one, other in zip(record, wanted, strict=True)):
            yield f"choice {index} has other log probabilities"


def _difference(tokens: Sequence[int], expected: Sequence[int]) -> str:
    pairs = enumerate(zip(tokens, expected, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(tokens), len(expected)))
    shown = list(tokens[first : first + 5]), list(expected[first : first + 5])
    return (
        f"{len(tokens)} tokens, {len(expected)} expected; they differ from position {first} on: {shown[0]}, {shown[1]}"
    )
