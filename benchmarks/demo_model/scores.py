"""Computes scores from graded answers. Pure: graded answers in, shares out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.demo_model.eval import Evaluated

RIGHT_AT_LEAST = 0.90
STOPPED_AT_LEAST = 0.99
ON_TOPIC_AT_LEAST = 0.90

Shares = dict[str, float]
"""By family; 0.0 to 1.0."""


@dataclass(frozen=True)
class Scores:
    """Shares of the answers of each family, greedy ones and those at temperature 0.6."""

    num_questions: int
    right: Shares
    stopped: Shares
    sampled_right: Shares
    sampled_on_topic: Shares
    all_stopped: float

    def by_family(self) -> dict[str, tuple[float | None, ...]]:
        """Return one row per family, in the order of the columns; None where nothing is graded."""
        columns = (self.right, self.stopped, self.sampled_right, self.sampled_on_topic)
        families = dict.fromkeys(family for column in columns for family in column)
        return {family: tuple(column.get(family) for column in columns) for family in families}

    def flat(self) -> dict[str, float]:
        """Return flat `name: number` figures."""
        named = {
            "right": self.right,
            "stopped": self.stopped,
            "right_at_0_6": self.sampled_right,
            "on_topic_at_0_6": self.sampled_on_topic,
        }
        figures = {f"{name}.{family}": share for name, column in named.items() for family, share in column.items()}
        return {"num_questions": float(self.num_questions), "stopped": self.all_stopped, **figures}


def scores_of(greedy: Sequence[Evaluated], sampled: Sequence[Evaluated]) -> Scores:
    """Mark all answers. Sampled ones without one right answer (stories) are only marked for their topic."""
    graded = [one for one in sampled if one.question.expected is not None]
    return Scores(
        num_questions=len(greedy),
        right=_shares(greedy, lambda one: one.is_right),
        stopped=_shares(greedy, _stopped),
        sampled_right=_shares(graded, lambda one: one.is_right),
        sampled_on_topic=_shares(sampled, lambda one: one.is_on_topic),
        all_stopped=sum(map(_stopped, greedy)) / len(greedy),
    )


def missed_targets(scores: Scores) -> list[str]:
    """Name every family that falls short, and the share of answers that ended by themselves if it does."""
    missed = [
        f"{family}: {share:.1%} exactly right, wanted {RIGHT_AT_LEAST:.0%}"
        for family, share in scores.right.items()
        if share < RIGHT_AT_LEAST
    ]
    missed += [
        f"{family}: {share:.1%} on topic at temperature 0.6, wanted {ON_TOPIC_AT_LEAST:.0%}"
        for family, share in scores.sampled_on_topic.items()
        if share < ON_TOPIC_AT_LEAST
    ]
    if scores.all_stopped < STOPPED_AT_LEAST:
        missed.append(f"{scores.all_stopped:.1%} of all answers ended by themselves, wanted {STOPPED_AT_LEAST:.0%}")
    return missed


def _stopped(one: Evaluated) -> bool:
    return one.finish_reason == "stop"


def _shares(evaluated: Sequence[Evaluated], holds: Callable[[Evaluated], bool]) -> Shares:
    families = dict.fromkeys(one.question.family for one in evaluated)
    return {
        family: sum(map(holds, members)) / len(members)
        for family in families
        for members in [[one for one in evaluated if one.question.family == family]]
    }
