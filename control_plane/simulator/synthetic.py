"""Makes traces of agents: sessions whose prompts grow with every turn, short pauses for tools, long ones for people."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from control_plane.simulator.traces import TraceRequest

_BLOCK_TOKENS = 256
_SESSIONS_BEFORE = 3.0
"""For how many mean durations of a session there have been sessions when the trace begins."""
_ASSUMED_TOKEN_SECONDS = 0.015


@dataclass(frozen=True)
class Agents:
    """What the sessions are like. Lengths are means of exponential distributions, in tokens."""

    sessions_per_second: float = 1.0
    num_kinds: int = 20
    """Agents with a system prompt and tools of their own; the one of rank n is used in proportion to 1 / n."""
    system_tokens: int = 3000
    message_tokens: int = 400
    """Of a person's message."""
    result_tokens: int = 1500
    """Of what a tool returns."""
    answer_tokens: int = 150
    mean_turns: int = 6
    tool_share: float = 0.9
    """Of turns that follow a tool's result; the others wait for a person."""
    tool_seconds: float = 0.5
    person_seconds: float = 3.0
    max_prompt_tokens: int = 100_000

    @property
    def mean_seconds(self) -> float:
        """Of a session."""
        gap = self.tool_share * self.tool_seconds + (1 - self.tool_share) * self.person_seconds
        return self.mean_turns * (gap + self.answer_tokens * _ASSUMED_TOKEN_SECONDS)


class _Turn(NamedTuple):
    earliest: float
    """When it arrives if answers take as long as assumed."""
    session: str
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    gap_seconds: float
    """After the answer before."""


def agentic_trace(num_requests: int, seed: int, agents: Agents | None = None) -> list[TraceRequest]:
    """Return the first turns of sessions. A turn follows the answer of the one before, whenever that comes.

    Sessions have been going on for some time when the trace begins, so its rate is the same from the first second on.
    What they had said before is left out: caches are cold, and a burst of long prompts would be no usual load.
    """
    agents, rng = agents or Agents(), random.Random(seed)
    system = [_length(rng, agents.system_tokens) for _ in range(agents.num_kinds)]
    weights = [1 / (1 + kind) for kind in range(agents.num_kinds)]
    turns: list[_Turn] = []
    start, number = -_SESSIONS_BEFORE * agents.mean_seconds, 0
    enough = num_requests / (agents.sessions_per_second * agents.mean_turns / 2)
    while start < enough or len(turns) < num_requests:
        start += rng.expovariate(agents.sessions_per_second)
        (kind,) = rng.choices(range(agents.num_kinds), weights)
        session = _session(agents, rng, f"s{number}", kind, system[kind], start)
        turns += session
        number += 1
    return _numbered(sorted(turns)[:num_requests])


def _session(
    agents: Agents, rng: random.Random, name: str, kind: int, system_tokens: int, start: float
) -> Iterator[_Turn]:
    num_system = system_tokens // _BLOCK_TOKENS
    own = (1 << 80) + (rng.getrandbits(40) << 20)
    shared = tuple((kind << 64) + place for place in range(num_system))
    prompt, earliest, gap = system_tokens, start, 0.0
    for turn in range(1 + int(rng.expovariate(1 / agents.mean_turns))):
        is_tool = turn > 0 and rng.random() < agents.tool_share
        if turn > 0:
            gap = rng.expovariate(1 / (agents.tool_seconds if is_tool else agents.person_seconds))
            earliest += gap
        asked = _length(rng, agents.result_tokens if is_tool else agents.message_tokens)
        answer = _length(rng, agents.answer_tokens)
        if earliest >= 0:
            prompt += asked
            if prompt > agents.max_prompt_tokens:
                return
            blocks = shared + tuple(own + place for place in range(num_system, prompt // _BLOCK_TOKENS))
            yield _Turn(earliest, name, prompt, answer, blocks, gap)
            prompt += answer
        earliest += answer * _ASSUMED_TOKEN_SECONDS


def _numbered(turns: list[_Turn]) -> list[TraceRequest]:
    latest: dict[str, int] = {}
    trace = []
    for number, turn in enumerate(turns):
        after = latest.get(turn.session)
        trace.append(
            TraceRequest(
                number,
                turn.earliest if after is None else 0.0,
                turn.num_prompt_tokens,
                turn.num_output_tokens,
                turn.hash_ids,
                _BLOCK_TOKENS,
                session=turn.session,
                after=after,
                gap_seconds=turn.gap_seconds,
            )
        )
        latest[turn.session] = number
    return trace


def _length(rng: random.Random, mean_tokens: int) -> int:
    return 1 + int(rng.expovariate(1 / mean_tokens))
