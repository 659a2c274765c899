"""Runs OpenVINO GenAI: its ContinuousBatchingPipeline, stepped from here."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Load, serve

_GIB = 1 << 30
_BLOCK_SIZE = 32
_MAX_NUM_BATCHED_TOKENS = 512


def pipeline(model: str, num_threads: int, max_num_seqs: int, cache_bytes: int, num_batched_tokens: int) -> Any:
    """Return a pipeline that computes and keeps keys and values in float32, without a prefix cache."""
    genai: Any = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.max_num_batched_tokens = num_batched_tokens
    scheduler.max_num_seqs = max_num_seqs
    scheduler.cache_size = -(-cache_bytes // _GIB)
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": str(num_threads),
        "PERFORMANCE_HINT": "LATENCY",
    }
    return genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


def greedy(num_tokens: int) -> Any:
    """Return a configuration of exactly so many tokens."""
    genai: Any = importlib.import_module("openvino_genai")
    config = genai.GenerationConfig()
    config.max_new_tokens = num_tokens
    config.min_new_tokens = num_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


def tensor(token_ids: Sequence[int]) -> Any:
    """Return [1, num_tokens], int64."""
    numpy: Any = importlib.import_module("numpy")
    openvino: Any = importlib.import_module("openvino")
    return openvino.Tensor(numpy.array([list(token_ids)], dtype=numpy.int64))


class OpenvinoEngine:
    """The pipeline, and the handles of what runs in it: a handle that is dropped cancels its request."""

    def load(self, what: Load) -> None:
        num_tokens = what.max_batch * (what.max_context + _BLOCK_SIZE)
        self._pipeline = pipeline(
            what.model,
            what.num_threads,
            what.max_batch,
            num_tokens * what.kv_bytes_per_token,
            _MAX_NUM_BATCHED_TOKENS,
        )
        self._max_context = what.max_context
        self._num_requests = 0
        self._held: list[Any] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        handle = self._add(prompt, 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        seconds = time.perf_counter() - started
        if _num_read(handle) != 1:
            raise RuntimeError("a prompt brought no token")
        return seconds

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        self._held = [self._add(prompt, self._max_context - len(prompt)) for prompt in prompts]
        waiting = list(self._held)
        while waiting:
            self._pipeline.step()
            waiting = [handle for handle in waiting if not _num_read(handle)]

    def decode(self, num_steps: int) -> list[float]:
        for handle in self._held:
            _num_read(handle)
        seconds = [self._step() for _ in range(num_steps + 1)][1:]
        counts = {_num_read(handle) for handle in self._held}
        if counts != {num_steps + 1}:
            raise RuntimeError(f"{num_steps + 1} steps brought {counts} tokens")
        return seconds

    def release(self) -> None:
        for handle in self._held:
            handle.cancel()
        self._held = []
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()

    def _step(self) -> float:
        started = time.perf_counter()
        self._pipeline.step()
        return time.perf_counter() - started

    def _add(self, prompt: Sequence[int], num_tokens: int) -> Any:
        self._num_requests += 1
        return self._pipeline.add_request(self._num_requests, tensor(prompt), greedy(num_tokens))


def _num_read(handle: Any) -> int:
    """Take what has come for a request since the last call, and count its tokens."""
    num_tokens = 0
    while handle.can_read():
        num_tokens += sum(len(output.generated_ids) for output in handle.read().values())
    return num_tokens


if __name__ == "__main__":
    serve(OpenvinoEngine())
