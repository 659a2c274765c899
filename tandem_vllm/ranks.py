"""Reaches the draw in the processes of vLLM's ranks, for tensor and pipeline parallelism.

Every rank of the last stage has the whole logits (vLLM gathers them on all), draws the same tokens and keeps them. The
core takes those of the rank whose tokens vLLM takes. `RankCalls` is vLLM's `worker_extension_cls`: its methods are
methods of each rank's worker.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tandem_engine.scheduling.request import Request
from tandem_vllm.drawing import Drawn, RowRequest, decode_row_request, encode_row_request
from tandem_vllm.sampling import TandemDraw


class RankCalls:
    """What the core calls in a rank."""

    def tandem_prepare(self, row: bytes, token_ids: list[int]) -> bool:
        asked = decode_row_request(row)
        request = Request(asked.request_id, token_ids, asked.num_prompt_tokens, asked.sampling)
        return draw_of(self).masks.prepare(request)

    def tandem_begin(self, samples: list[str]) -> None:
        draw_of(self).begin(frozenset(samples))

    def tandem_take(self) -> Drawn:
        return draw_of(self).take()


class RankDraw:
    """The draw of all ranks, as the core calls it."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.masks = self

    def prepare(self, request: Request) -> bool:
        """Start to compile a request's grammar in every rank; return whether all are ready."""
        if request.sampling.grammar is None:
            return True
        row = encode_row_request(RowRequest(request.request_id, request.num_prompt_tokens, request.sampling))
        return all(self._executor.collective_rpc("tandem_prepare", args=(row, list(request.token_ids))))

    def begin(self, samples: Collection[str]) -> None:
        self._executor.collective_rpc("tandem_begin", args=(sorted(samples),))

    def take(self) -> Drawn:
        drawn: Drawn = self._executor.collective_rpc("tandem_take", unique_reply_rank=self._executor.output_rank)
        return drawn


def draw_of(worker: Any) -> TandemDraw:
    """Return the draw of a rank's worker."""
    processors = worker.model_runner.input_batch.logitsprocs.all
    (draw,) = [each for each in processors if isinstance(each, TandemDraw)]
    return draw
