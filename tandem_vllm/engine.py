"""Drives vLLM's `EngineCore` in this process: its scheduler, its model runner, and our draw.

    vLLM's EngineCore.step    schedule -> execute_model -> sample_tokens -> update_from_output     (0.32)

The step here is the same four calls. It reads which tokens were scheduled, and tells the draw which requests sample.
"""

from __future__ import annotations

import time
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
from tandem_vllm.keys import pool_key
from tandem_vllm.ranks import RankDraw, draw_of
from tandem_vllm.sampling import TandemDraw

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
        self._adapters = _loaded(core, adapters)

    def prepare(self, request: Request) -> bool:
        return self._draw.masks.prepare(request)

    def add(self, request: Request) -> None:
        def new_keys(asked: Any) -> list[Any]:
            indices = range(len(asked.block_hashes), asked.num_tokens // self._block_size)
            return [pool_key(request, index, self._block_size, asked.all_token_ids) for index in indices]

        if request.mode == "prefill":
            self._prefills.add(request.request_id)
        asked = _vllm_request(request, self._adapters.get(request.adapter))
        self._core.add_request(VllmRequest.from_engine_core_request(asked, new_keys))

    def abort(self, request_id: str) -> None:
        self._prefills.discard(request_id)
        self._core.abort_requests([request_id])

    @property
    def has_work(self) -> bool:
        """Also true while the model runner does not know yet that a request is over."""
        return bool(self._scheduler.has_requests())

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
        output = self._scheduler.schedule()
        runs = [self._run(request_id, number) for request_id, number in output.num_scheduled_tokens.items()]
        self._draw.begin({run.request_id for run in runs if self._samples(run)})
        result = self._executor.execute_model(output, non_block=True).result()
        if result is None:
            result = self._executor.sample_tokens(None)
        updated = self._scheduler.update_from_output(output, result)
        drawn = self._draw.take()
        emitted = [each for outputs in updated.values() for each in outputs.outputs]
        for each in emitted:
            if (expected := drawn.sampled.get(each.request_id)) is not None:
                assert each.new_token_ids == [expected.token_id], f"vLLM took {each.new_token_ids}, drawn: {expected}"
        return EngineStep(
            runs,
            drawn.sampled,
            drawn.failures,
            frozenset(each.request_id for each in emitted if each.finish_reason is not None),
            drawn.choices,
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


def _draw_of(core: EngineCore) -> TandemDraw | RankDraw:
    """Return the draw of this process, or of all ranks."""
    executor: Any = core.model_executor
    if core.vllm_config.parallel_config.world_size > 1:
        return RankDraw(executor)
    return draw_of(executor.driver_worker.worker)
