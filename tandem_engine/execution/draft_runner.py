"""Runs a draft model, which proposes the next tokens of requests.

The draft model has its own KV cache, with the same block ids as the target's. So its block table is the request's (of
group 0, if there are several), and a block that requests share is shared here too.

    held         the leading tokens whose keys and values are in this cache, then those of the last proposals, which
                 count as far as the target accepted them
    filled       per block: its generation when the draft model computed all of it. A block from the prefix cache is
                 usable here only if this is still its generation
"""

from __future__ import annotations

from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field

import torch

from tandem_engine.execution.input_batch import BatchBuilder, Stretch
from tandem_engine.execution.kv_cache import PagedKVCache
from tandem_engine.execution.model import Model
from tandem_engine.ops.base import Ops
from tandem_engine.scheduling.request import Request
from tandem_engine.scheduling.speculation.draft_model import MAX_CATCH_UP_TOKENS


@dataclass
class _Held:
    """The tokens of one request in this cache."""

    table: list[int]
    """The request's list object: a preempted request gets another one."""
    num_tokens: int
    proposed: list[int] = field(default_factory=list)
    """Draft tokens behind these that were computed."""


class DraftRunner:
    """Implements `DraftModel` with a model and its cache; `generations` are those of the target's pool."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        cache: PagedKVCache,
        generations: MutableSequence[int],
        context_length: int,
    ) -> None:
        self._model = model
        self._ops = ops
        self._cache = cache
        self._generations = generations
        self._context_length = context_length
        self._block_size = cache.geometry.block_size
        self._batches = BatchBuilder(self._block_size, cache.device)
        self._held: dict[Request, _Held] = {}
        self._filled = [0] * cache.num_blocks  # generations begin with 1

    def num_missing(self, request: Request) -> int | None:
        """Return how many tokens must be computed before the first proposal, at least one.

        Returns None beyond the model's context, and if blocks of its table were freed behind a window.
        """
        is_dropped = request.num_dropped_blocks > 0 and not request.window_tables
        if request.num_tokens > self._context_length or is_dropped:
            return None
        held = self._held.get(request)
        if held is None or held.table is not request.block_table:
            held = self._held[request] = _Held(request.block_table, self._num_found_tokens(request))
        self._confirm(request, held)
        return request.num_tokens - held.num_tokens

    @torch.inference_mode()
    def propose(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Return up to the wanted number of the model's likeliest tokens for each request; see `DraftModel`."""
        drafts = self._catch_up(wanted)
        active = [request for request in drafts if self._continues(request, drafts, wanted)]
        while active:
            stretches = [
                Stretch(request.num_tokens + len(drafts[request]) - 1, drafts[request][-1:], [request.block_table], 1)
                for request in active
            ]
            for request, token_id in zip(active, self._forward(stretches), strict=True):
                self._held[request].proposed.append(drafts[request][-1])
                drafts[request].append(token_id)
            active = [request for request in active if self._continues(request, drafts, wanted)]
        return drafts

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that is over; its full blocks stay usable for requests that find them."""
        self._held.pop(request, None)

    def _catch_up(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Compute known tokens, fewest missing first; return the first proposal of requests that lack none now."""
        missing = {request: number for request in wanted if (number := self.num_missing(request)) is not None}
        num_left = MAX_CATCH_UP_TOKENS
        stretches: list[Stretch] = []
        ready = []
        for request in sorted(missing, key=missing.__getitem__):
            num_tokens = min(missing[request], num_left)
            if not num_tokens:
                break
            num_left -= num_tokens
            first = self._held[request].num_tokens
            is_ready = num_tokens == missing[request]
            token_ids = request.token_ids[first : first + num_tokens]
            stretches.append(Stretch(first, token_ids, [request.block_table], int(is_ready)))
            self._fill(request, self._held[request], first + num_tokens)
            if is_ready:
                ready.append(request)
        if not stretches:
            return {}
        return {request: [each] for request, each in zip(ready, self._forward(stretches), strict=True)}

    def _continues(
        self, request: Request, drafts: Mapping[Request, Sequence[int]], wanted: Mapping[Request, int]
    ) -> bool:
        """Whether a request has a next round; nothing follows a stop token."""
        tokens = drafts[request]
        is_within = request.num_tokens + len(tokens) <= self._context_length
        return len(tokens) < wanted[request] and is_within and tokens[-1] not in request.sampling.stop_token_ids

    def _forward(self, stretches: Sequence[Stretch]) -> list[int]:
        """Compute tokens and write their KV; return the likeliest token behind each stretch that samples."""
        step = self._ops.step(self._batches.build(stretches))
        logits = self._model.forward(step.token_ids, step, self._cache.pool, step.sample_rows)
        likeliest: list[int] = logits.argmax(dim=-1).tolist() if len(step.sample_rows) else []
        return likeliest

    def _num_found_tokens(self, request: Request) -> int:
        """Count the tokens in leading full blocks that were filled here; at least one token is left to compute."""
        full = request.block_table[: (request.num_tokens - 1) // self._block_size]
        missing = (i for i, block in enumerate(full) if self._filled[block] != self._generations[block])
        return next(missing, len(full)) * self._block_size

    def _confirm(self, request: Request, held: _Held) -> None:
        """Count the last proposals that were accepted."""
        token_ids = request.token_ids[held.num_tokens : request.num_tokens - 1]
        num_right = 0
        for proposed, token_id in zip(held.proposed, token_ids, strict=False):
            if proposed != token_id:
                break
            num_right += 1
        held.proposed = []
        self._fill(request, held, held.num_tokens + num_right)

    def _fill(self, request: Request, held: _Held, end: int) -> None:
        """Note that the KV of the tokens before `end` is here, or will be with the next forward."""
        for block in request.block_table[held.num_tokens // self._block_size : end // self._block_size]:
            self._filled[block] = self._generations[block]
        held.num_tokens = end
