"""Records sampled tokens and hashes of the logits that they were sampled from.

The model keeps a hash of each row of logits that it returns. The runner around it knows from the step which request a
row belongs to. A row's key is (request id, absolute position of the token sampled from it). Rows behind a wrong draft
have no key: nothing is sampled from them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import torch

from tandem_engine.core import Runner, Ticket
from tandem_engine.execution.model import Model, ignore
from tandem_engine.extents import BlockPart
from tandem_engine.layout import SourceLayout
from tandem_engine.messages import ExtentRef, FinishReason, MapRegion, PositionLogprobs, RequestOutput
from tandem_engine.ops.base import KVPool, Step
from tandem_engine.scheduling.batch import SchedulerOutput
from tandem_engine.scheduling.request import Request, Sampled

Place = tuple[str, int]

_COMPILE_STEPS = (0, 0, 1, 3, 10)
"""Steps that the compilation of a grammar seems to take."""


@dataclass(frozen=True)
class RecordedToken:
    """One token as the client sees it."""

    token_id: int
    logprobs: PositionLogprobs | None
    finish_reason: FinishReason | None


@dataclass
class Journal:
    """All answers of some engines to some requests, whichever engine computed which part."""

    names: frozenset[str]
    """Requests that are compared; the others only run beside them."""
    tokens: dict[Place, RecordedToken] = field(default_factory=dict)
    rows: dict[Place, bytes] = field(default_factory=dict)
    """Hashes of logits."""
    conflicts: list[str] = field(default_factory=list)
    """Places that were written twice with different values."""
    counters: Counter[str] = field(default_factory=Counter)
    """The engines' totals, and how often a way's special event happened."""

    def add_output(self, output: RequestOutput) -> None:
        """Keep an output's tokens; the last one has the finish reason."""
        if output.request_id not in self.names:
            return
        self.counters["requests_preempted"] += output.is_last and output.num_preemptions > 0
        for index, token_id in enumerate(output.token_ids):
            place = (output.request_id, output.position + index)
            logprobs = output.logprobs[index] if output.logprobs else None
            reason = output.finish_reason if index == len(output.token_ids) - 1 else None
            self._keep("token", self.tokens, place, RecordedToken(token_id, logprobs, reason))

    def add_row(self, request_id: str, position: int, digest: bytes) -> None:
        if request_id in self.names:
            self._keep("logits", self.rows, (request_id, position), digest)

    def answer(self, request_id: str, first_position: int) -> list[int]:
        """Return the tokens of an answer so far."""
        tokens: list[int] = []
        while (token := self.tokens.get((request_id, first_position + len(tokens)))) is not None:
            tokens.append(token.token_id)
        return tokens

    def _keep(self, what: str, kept: dict[Place, Any], place: Place, value: RecordedToken | bytes) -> None:
        if kept.setdefault(place, value) != value:
            self.conflicts.append(f"{place[0]} at {place[1]}: {what} differ between two engines of one way")


class RecordingModel:
    """A model that keeps a hash of each row of logits of its last step."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.digests: list[bytes] = []

    @property
    def is_batch_invariant(self) -> bool:
        return self._model.is_batch_invariant

    def forward(
        self,
        token_ids: torch.Tensor,
        step: Step,
        pool: KVPool,
        sample_rows: torch.Tensor,
        kv_written: Callable[[], None] = ignore,
    ) -> torch.Tensor:
        logits = self._model.forward(token_ids, step, pool, sample_rows, kv_written)
        self.digests = [blake2b(row.tobytes(), digest_size=8).digest() for row in logits.contiguous().numpy()]
        return logits


class RecordingRunner:
    """Implements `Runner` by delegation; writes each sampled row into the journal."""

    def __init__(self, runner: Runner, model: RecordingModel, journal: Journal, rng: random.Random) -> None:
        self._runner = runner
        self._model = model
        self._journal = journal
        self._rng = rng
        self._num_steps = 0
        self._output = SchedulerOutput(0, ())
        self._ready_at: dict[str, int] = {}
        """By request id: the step from which its grammar counts as compiled."""

    @property
    def generations(self) -> MutableSequence[int]:
        return self._runner.generations

    def prepare(self, request: Request) -> bool:
        """Start to compile a grammar; whether it is ready depends on a random number of steps, not on this machine.

        A compiler's thread that gets no core would keep requests from sampling, and so from needing blocks.
        """
        is_ready = self._runner.prepare(request)
        if request.sampling.grammar is None or request.num_generated_tokens > 0:
            return is_ready
        if request.request_id not in self._ready_at:
            self._ready_at[request.request_id] = self._num_steps + self._rng.choice(_COMPILE_STEPS)
        return self._num_steps >= self._ready_at[request.request_id]

    @property
    def wake_fd(self) -> int | None:
        return self._runner.wake_fd

    def launch(self, output: SchedulerOutput, kv_written: Callable[[], None] = lambda: None) -> Ticket:
        self._num_steps += 1
        self._output = output
        return self._runner.launch(output, kv_written)

    def collect(self, ticket: Ticket) -> Mapping[str, Sequence[Sampled]]:
        sampled, output = self._runner.collect(ticket), self._output
        runs = [run for run in output.runs if run.samples]
        digests = iter(self._model.digests)
        for run in runs:
            request_id = run.request.request_id
            num_used = len(sampled[request_id]) if run.draft_tokens else 1
            for index in range(1 + len(run.draft_tokens)):
                digest = next(digests)
                if index < num_used:
                    self._journal.add_row(request_id, run.end + index, digest)
        assert next(digests, None) is None, "a row of logits without a request"
        self._journal.counters["shared_steps"] += len(output.runs) > 1
        self._journal.counters["chunks"] += len(output.runs) - len(runs)
        return sampled

    def close(self) -> None:
        self._runner.close()

    def import_blocks(self, blocks: Sequence[int], extents: Sequence[ExtentRef]) -> int:
        return self._runner.import_blocks(blocks, extents)

    def convert_blocks(
        self, parts: Sequence[Sequence[BlockPart]], extents: Sequence[ExtentRef], layout: SourceLayout
    ) -> int:
        return self._runner.convert_blocks(parts, extents, layout)

    def checksums(self, slots: Sequence[int]) -> list[int]:
        return self._runner.checksums(slots)

    def map_region(self, command: MapRegion, *fds: int) -> None:
        self._runner.map_region(command, *fds)

    def unmap_region(self, region_id: str) -> None:
        self._runner.unmap_region(region_id)
