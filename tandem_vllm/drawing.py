"""Draws the next tokens of vLLM's batch as Tandem's engine would: by seed and position, and by the whole answer.

vLLM keeps a batch of rows, one per request, and changes it between steps (`BatchUpdate` of
vllm/v1/sample/logits_processor/interface.py). Penalties, bans and grammars are functions of the tokens after
`num_prompt_tokens`, which vLLM does not know: after a migration vLLM's prompt includes the answer so far. This module
does not import vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec
import torch

from tandem_engine.core import RequestsFailed
from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.sampler import Draw, SampleOp, sample
from tandem_engine.messages import RequestFailed
from tandem_engine.ops import plain_sampling
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.batch import ScheduledRun
from tandem_engine.scheduling.request import Request, Sampled

EXTRA_ARGS_KEY = "tandem"
"""In `extra_args` of vLLM's SamplingParams: a `RowRequest` in MessagePack."""


class RowRequest(msgspec.Struct, frozen=True):
    """What the draw needs to know of a request besides its tokens."""

    request_id: str
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_seeds: tuple[int, ...] = ()
    """A prefill's: one first token is drawn per seed; empty: one, with `sampling.seed`."""


class RowUpdate(msgspec.Struct, frozen=True):
    """Changes of vLLM's batch between two steps. Apply `added`, then `removed`, then `moved`, as vLLM's own processors
    do: a removed index that was given to another request is not in `removed`."""

    added: Sequence[tuple[int, RowRequest, Sequence[int], Sequence[int]]] = ()
    """Index, request, vLLM's prompt, and vLLM's list of output tokens, which grows later."""
    removed: Sequence[int] = ()
    moved: Sequence[tuple[int, int, bool]] = ()
    """From, to, and whether the two are swapped."""


@dataclass
class Drawn:
    """The tokens of one step."""

    sampled: dict[str, Sampled] = field(default_factory=dict)
    choices: dict[str, Sequence[Sampled]] = field(default_factory=dict)
    """All tokens of the requests that have several; `sampled` has the first of them."""
    failures: list[RequestFailed] = field(default_factory=list)
    """Requests without a token: their logits are not numbers, or their grammar has no continuation."""


class Drawer:
    """Owns the rows of the batch, and the positions of their answers in their grammars."""

    def __init__(self, masks: GrammarMasks, sample_op: SampleOp = plain_sampling.sample) -> None:
        self._masks = masks
        self._sample_op = sample_op
        self._rows: dict[int, _Row] = {}
        self._ordered: list[tuple[int, _Row]] = []

    def update(self, changes: RowUpdate) -> None:
        """Follow vLLM's batch."""
        rows = self._rows
        for index, request, prompt, output in changes.added:
            rows[index] = _Row(request, prompt, output)
        for index in changes.removed:
            rows.pop(index, None)
        for source, target, is_swap in changes.moved:
            moved, replaced = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if replaced is not None and is_swap:
                rows[source] = replaced
        self._ordered = sorted(rows.items(), key=itemgetter(0))

    @torch.inference_mode()
    def draw(self, logits: torch.Tensor, samples: Collection[str]) -> Drawn:
        """Draw a token for each request of `samples` from its row of `logits` [num_rows, vocab_size], float32.

        Makes the drawn token the largest of its row, so that vLLM's greedy choice is this token. Rows of other
        requests are prompts that are not complete: vLLM drops their tokens.
        """
        rows = self._rows_of(samples)
        drawn = Drawn()
        while rows:
            try:
                masks = self._masks_of(rows)
                draws = [_draw(row.request, masks) for _, row in rows]
                found = sample(_selected(logits, [index for index, _ in rows]), draws, self._sample_op)
            except RequestsFailed as error:  # try again with the others, which have lost nothing
                drawn.failures += [_failure(error, request_id) for request_id in error.request_ids]
                rows = [each for each in rows if each[1].request.request_id not in error.request_ids]
                continue
            drawn.sampled |= {request_id: tokens[0] for request_id, tokens in found.items()}
            drawn.choices |= {request_id: tokens for request_id, tokens in found.items() if len(tokens) > 1}
            token_ids = [drawn.sampled[row.request.request_id].token_id for _, row in rows]
            logits[[index for index, _ in rows], token_ids] = torch.inf
            break
        return drawn

    def _rows_of(self, samples: Collection[str]) -> list[tuple[int, _Row]]:
        rows = [each for each in self._ordered if each[1].request.request_id in samples]
        assert len(rows) == len(samples), f"{len(samples)} requests sample, {len(rows)} have rows in vLLM's batch"
        for _, row in rows:
            row.read_output()
        return rows

    def _masks_of(self, rows: Sequence[tuple[int, _Row]]) -> Mapping[str, Sequence[Any]]:
        self._masks.begin([_run(row.request) for _, row in rows if row.may_be_constrained])
        return self._masks.take()


class _Row:
    """One request of the batch; `request` has all of its tokens after `read_output`."""

    def __init__(self, request: RowRequest, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.request = Request(
            request.request_id,
            list(prompt),
            request.num_prompt_tokens,
            request.sampling,
            choice_seeds=request.choice_seeds,
        )
        self._output = output
        self.may_be_constrained = request.sampling.grammar is not None or request.sampling.thinking is not None

    def read_output(self) -> None:
        request = self.request
        request.token_ids += self._output[request.num_tokens - request.num_initial_tokens :]


def _run(request: Request) -> ScheduledRun:
    return ScheduledRun(request, request.num_tokens - 1, 1, samples=True)


def _draw(request: Request, masks: Mapping[str, Sequence[Any]]) -> Draw:
    return Draw(
        request.request_id,
        request.sampling,
        request.choice_seeds,
        request.token_ids,
        request.num_prompt_tokens,
        allowed=masks.get(request.request_id, ()),
    )


def _selected(logits: torch.Tensor, indices: list[int]) -> torch.Tensor:
    """Return these rows of the logits, without a copy if they follow one another."""
    first, num = indices[0], len(indices)
    return logits[first : first + num] if indices[-1] == first + num - 1 else logits[indices]


def _failure(error: RequestsFailed, request_id: str) -> RequestFailed:
    return RequestFailed(request_id, error.message_of(request_id), error.is_callers_fault)


Decode = Callable[[bytes], RowRequest]
encode_row_request = msgspec.msgpack.Encoder().encode
decode_row_request: Decode = msgspec.msgpack.Decoder(RowRequest).decode
