"""Joins the outputs of a step with those of earlier steps that have not left yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tandem.v1 import types_pb2 as pb

_MAX_TOKENS = 2_048
"""Of several steps in a StepBatch; those of a single step are never divided. With 20 logprobs each they are a MiB."""


class WaitingStep:
    """A StepBatch that nobody has taken yet, and nothing was sent after."""

    def __init__(self, step: int, outputs: Sequence[pb.TokenOutput]) -> None:
        self.event = pb.Event(step=pb.StepBatch(step=step, outputs=outputs))
        self._num_tokens = 0
        self._latest: dict[tuple[str, int, int], pb.TokenOutput] = {}
        """The latest output of each choice. Both are empty until a second step comes, which is seldom."""

    def add(self, step: int, outputs: Sequence[pb.TokenOutput]) -> bool:
        """Add the outputs of a later step; False: they would be too many, and nothing is changed.

        A choice's tokens that follow on are added to its output, so a batch is no longer for more steps.
        """
        batch = self.event.step
        if not self._latest:
            self._num_tokens = _num_tokens(batch.outputs)
            self._latest = {_choice(each): each for each in batch.outputs}
        num_tokens = _num_tokens(outputs)
        if self._num_tokens + num_tokens > _MAX_TOKENS:
            return False
        self._num_tokens += num_tokens
        batch.step = step
        for output in outputs:
            earlier = self._latest.get(_choice(output))
            if earlier is not None and earlier.position + len(earlier.token_ids) == output.position:
                earlier.token_ids.extend(output.token_ids)
                earlier.logprobs.extend(output.logprobs)
                earlier.finish_reason = output.finish_reason
                if output.HasField("ledger"):
                    earlier.ledger.CopyFrom(output.ledger)
            else:
                batch.outputs.append(output)
                self._latest[_choice(output)] = batch.outputs[-1]
        return True


def _choice(output: pb.TokenOutput) -> tuple[str, int, int]:
    return output.request_id, output.attempt, output.choice_index


def _num_tokens(outputs: Iterable[pb.TokenOutput]) -> int:
    return sum(len(output.token_ids) for output in outputs)
