"""Drives vLLM's `EngineCore` in this process: its scheduler, its model runner, and our draw.

    vLLM's EngineCore.step    schedule -> execute_model -> sample_tokens -> update_from_output     (0.32)

The step here is the same four calls. It reads which tokens were scheduled, and tells the draw which requests sample.
With a pipeline of stages several batches are in flight, up to one per stage (vLLM's `step_with_batch_queue`): a step
schedules until no more can be, and returns the batch that was scheduled first.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request as VllmRequest
from vllm.v1.request import RequestStatus

from tandem_engine.adapters import AdapterFiles
from tandem_engine.errors import ModelUnusable
from tandem_engine.scheduling.request import Request
from tandem_vllm.core import EngineStep, Pool, Run
from tandem_vllm.drawing import EXTRA_ARGS_KEY, RowRequest, encode_row_request
from tandem_vllm.flights import Flight, only_of
from tandem_vllm.keys import pool_key
from tandem_vllm.ranks import OwnDraw, RankDraw, draw_of

_BEFORE_ALL = 1 << 40
"""Requests that have their blocks go before those that wait for blocks: else both could wait for ever."""


class VllmEngine:
    """Implements `tandem_vllm.core.Engine`."""

    def __init__(self, core: EngineCore, adapters: Sequence[AdapterFiles] = ()) -> None:
        """Load the adapters; raises ModelUnusable naming one that does not fit the model."""
        self._core = core
        self._scheduler: Any = core.scheduler
        self._executor = core.model_executor
        self._draw = _draw_of(core)
        self._pool = self._scheduler.kv_cache_manager.block_pool
        self._block_size = int(self._scheduler.block_size)
        self._prefills: set[str] = set()
        self._flights: deque[Flight] = deque()
        """Batches that the ranks compute, the oldest first."""
        self._max_flights = max(1, core.vllm_config.max_concurrent_batches)
        self._adapters = _loaded(core, adapters)

    def prepare(self, request: Request) -> bool:
        return self._draw.masks.prepare(request)

    def add(self, request: Request) -> None:
        def new_keys(asked: Any) -> list[Any]:
            indices = range(len(asked.block_hashes), asked.num_tokens // self._block_size)
            return [pool_key(request, index, self._block_size, asked.all_token_ids) for index in indices]

        if request.mode == "prefill":
            self._prefills.add(request.request_id)
        assert not any(request.request_id in flight.requests for flight in self._flights), "names are used once"
        asked = _vllm_request(request, self._adapters.get(request.adapter))
        self._core.add_request(VllmRequest.from_engine_core_request(asked, new_keys))

    def abort(self, request_id: str) -> None:
        self._prefills.discard(request_id)
        self._core.abort_requests([request_id])

    @property
    def has_work(self) -> bool:
        """Also true while the model runner does not know yet that a request is over."""
        return bool(self._flights or self._scheduler.has_requests())

    @property
    def num_running(self) -> int:
        return len(self._scheduler.running)

    @property
    def num_preempted(self) -> int:
        return sum(each.status == RequestStatus.PREEMPTED for each in self._scheduler.waiting)

    @property
    def pool(self) -> Pool:
        num_total = self._pool.num_gpu_blocks - 1  # block 0 stands for "no block"
        num_unused = self._pool.get_num_free_blocks()
        num_used = num_total - num_unused
        num_findable = len(self._pool.cached_block_hash_to_block)
        num_cached = min(num_unused, max(0, num_findable - num_used))
        return Pool(num_total, num_unused - num_cached, num_cached, num_used)

    def step(self) -> EngineStep:
        while True:
            while len(self._flights) < self._max_flights and self._may_schedule():
                self._flights.append(self._scheduled())
                if not self._flights[-1].runs:
                    break  # vLLM has no blocks for what waits, or only tells the ranks which requests are over
            step = self._landed(self._flights.popleft())
            if step.runs or not self._flights:
                return step

    def _may_schedule(self) -> bool:
        """Whether vLLM's scheduler may find something beside the batches in flight.

        A preempted request in flight will get a token, which its next schedule must know.
        """
        if not self._flights:
            return True
        in_flight = [request for flight in self._flights for request in flight.requests.values()]
        if any(request.status == RequestStatus.PREEMPTED for request in in_flight):
            return False
        running = self._scheduler.running
        return bool(self._scheduler.waiting) or any(each.num_computed_tokens < each.num_tokens for each in running)

    def _scheduled(self) -> Flight:
        """Schedule a batch, and let the ranks begin with it; with one rank, it is computed when this returns."""
        output = self._scheduler.schedule()
        runs = [self._run(request_id, number) for request_id, number in output.num_scheduled_tokens.items()]
        requests = {run.request_id: self._scheduler.requests[run.request_id] for run in runs}
        self._draw.begin({run.request_id for run in runs if self._samples(run)})
        executed = self._executor.execute_model(output, non_block=True)
        sampled = self._executor.sample_tokens(None, non_block=True) if runs else executed
        return Flight(output, runs, requests, executed, sampled, self._draw.drawn())

    def _landed(self, flight: Flight) -> EngineStep:
        """Wait for a batch, and tell vLLM's scheduler its tokens. Requests that were aborted in flight are left out."""
        flight.executed.result()  # raises what the model raised
        result = flight.sampled.result()
        assert result is not None, "vLLM sampled nothing"
        drawn, alive = flight.drawn(), frozenset(flight.alive(self._scheduler.requests))
        updated = self._scheduler.update_from_output(flight.output, result)
        emitted = [each for outputs in updated.values() for each in outputs.outputs]
        for each in emitted:
            if (expected := drawn.sampled.get(each.request_id)) is not None:
                assert each.new_token_ids == [expected.token_id], f"vLLM took {each.new_token_ids}, drawn: {expected}"
        return EngineStep(
            [run for run in flight.runs if run.request_id in alive],
            only_of(alive, drawn.sampled),
            [failure for failure in drawn.failures if failure.request_id in alive],
            frozenset(each.request_id for each in emitted if each.finish_reason is not None),
            only_of(alive, drawn.choices),
        )

    def _run(self, request_id: str, num_tokens: int) -> Run:
        """Return what was scheduled; vLLM has counted these tokens as computed already."""
        end = self._scheduler.requests[request_id].num_computed_tokens
        first = end - num_tokens
        if request_id not in self._prefills and first // self._block_size == end // self._block_size:
            return Run(request_id, first, num_tokens)
        (table,) = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        return Run(request_id, first, num_tokens, table)

    def _samples(self, run: Run) -> bool:
        return bool(run.first_position + run.num_tokens == self._scheduler.requests[run.request_id].num_tokens)


def _vllm_request(request: Request, adapter: LoRARequest | None = None) -> EngineCoreRequest:
    """Return a request as vLLM takes it: greedy, and with nothing that our draw does."""
    sampling, num_answer_tokens = request.sampling, request.num_tokens - request.num_prompt_tokens
    has_blocks = request.mode == "decode"
    return EngineCoreRequest(
        request_id=request.request_id,
        prompt_token_ids=list(request.token_ids),
        mm_features=None,
        sampling_params=SamplingParams(
            temperature=0.0,
            max_tokens=1 if request.mode == "prefill" else sampling.max_tokens - num_answer_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
            extra_args={EXTRA_ARGS_KEY: encode_row_request(_row_request(request))},
        ),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=adapter,
        cache_salt=None,  # the blocks have keys of ours
        data_parallel_rank=None,
        priority=-request.priority - (_BEFORE_ALL if has_blocks else 0),
    )


def _row_request(request: Request) -> RowRequest:
    seeds = request.choice_seeds if request.mode == "prefill" else ()
    return RowRequest(request.request_id, request.num_prompt_tokens, request.sampling, seeds)


def _loaded(core: EngineCore, adapters: Sequence[AdapterFiles]) -> Mapping[str, LoRARequest]:
    """Load the adapters into memory, where vLLM keeps them all: their files are not read again."""
    asked = {each.name: LoRARequest(each.name, index, str(each.folder)) for index, each in enumerate(adapters, 1)}
    for name, adapter in asked.items():
        try:
            is_loaded = core.add_lora(adapter)
        except (ValueError, RuntimeError, LookupError) as error:
            raise ModelUnusable(f"vLLM refuses adapter {name}: {error}") from error
        if not is_loaded:
            raise ModelUnusable(f"vLLM has not loaded adapter {name}; its log names the reason")
    return asked


def _draw_of(core: EngineCore) -> OwnDraw | RankDraw:
    """Return the draw of this process, or of all ranks."""
    executor: Any = core.model_executor
    if core.vllm_config.parallel_config.world_size > 1:
        return RankDraw(executor)
    return OwnDraw(draw_of(executor.driver_worker.worker))
