"""Reaches the draw in the processes of vLLM's ranks, for tensor and pipeline parallelism.

Every rank of the last stage has the whole logits (vLLM gathers them on all), draws the same tokens and keeps them. The
core takes those of the rank whose tokens vLLM takes; ranks of other stages have no logits. `RankCalls` is vLLM's
`worker_extension_cls`: its methods are methods of each rank's worker. vLLM carries calls out in the order in which they
are made, so calls for one batch need not wait for the batches before it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Collection
from typing import Any

from vllm.distributed import get_pp_group

from tandem_engine.scheduling.request import Request
from tandem_vllm.drawing import Drawn, RowRequest, decode_row_request, encode_row_request
from tandem_vllm.sampling import TandemDraw

_PR_SET_PDEATHSIG = 1


class RankCalls:
    """What the core calls in a rank."""

    def tandem_join(self) -> None:
        """Get ready for the first batch; called once, in all ranks."""
        _end_with_parent()
        _make_stage_inputs(self)

    def tandem_prepare(self, row: bytes, token_ids: list[int]) -> bool:
        if not get_pp_group().is_last_rank:
            return True
        asked = decode_row_request(row)
        request = Request(asked.request_id, token_ids, asked.num_prompt_tokens, asked.sampling)
        return draw_of(self).masks.prepare(request)

    def tandem_begin(self, samples: list[str]) -> None:
        draw_of(self).begin(frozenset(samples))

    def tandem_take(self) -> Drawn:
        return draw_of(self).take()


class OwnDraw:
    """The draw in this process, which is the only rank."""

    def __init__(self, draw: TandemDraw) -> None:
        self._draw = draw
        self.masks = draw.masks

    def begin(self, samples: Collection[str]) -> None:
        self._draw.begin(samples)

    def drawn(self) -> Callable[[], Drawn]:
        """Return what returns the tokens of the batch that has just been computed."""
        taken = self._draw.take()
        return lambda: taken


class RankDraw:
    """The draw of all ranks, as the core calls it."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self.masks = self
        executor.collective_rpc("tandem_join")

    def prepare(self, request: Request) -> bool:
        """Start to compile a request's grammar in every rank; return whether all are ready."""
        if request.sampling.grammar is None:
            return True
        row = encode_row_request(RowRequest(request.request_id, request.num_prompt_tokens, request.sampling))
        return all(self._executor.collective_rpc("tandem_prepare", args=(row, list(request.token_ids))))

    def begin(self, samples: Collection[str]) -> None:
        """Name the requests that sample in the batch that is executed next."""
        self._call("tandem_begin", sorted(samples))

    def drawn(self) -> Callable[[], Drawn]:
        """Return what waits for the tokens of the batch that was executed last."""
        drawn: Callable[[], Drawn] = self._call("tandem_take").result
        return drawn

    def _call(self, method: str, *args: Any) -> Any:
        rank = self._executor.output_rank
        return self._executor.collective_rpc(method, args=args, unique_reply_rank=rank, non_block=True)


def draw_of(worker: Any) -> TandemDraw:
    """Return the draw of a rank's worker."""
    processors = worker.model_runner.input_batch.logitsprocs.all
    (draw,) = [each for each in processors if isinstance(each, TandemDraw)]
    return draw


def _end_with_parent() -> None:
    """End this rank at once when the process that started it ends: one that waits for another host would stay."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank is started by another process"
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if not parent.is_alive():
        os._exit(1)


def _make_stage_inputs(worker: Any) -> None:
    """Make the buffer for what comes from the stage before this one.

    vLLM 0.32 makes it in a warm-up run, which it leaves out on a CPU without a compiler if the pool has a fixed size.
    """
    runner = worker.model_runner
    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )
