"""Runs Tandem's engine: its core steps here as in its own process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.peers.protocol import Load, serve

if TYPE_CHECKING:
    from tandem_engine.core import EngineCore

_MAX_NUM_BATCHED_TOKENS = 512


class TandemEngine:
    """An `EngineCore`, driven as `tandem_engine.process` drives it."""

    def load(self, what: Load) -> None:
        from tandem_engine.assembly import assemble
        from tandem_engine.settings import EngineConfig

        block_size = 16
        max_num_batched_tokens = max(_MAX_NUM_BATCHED_TOKENS, what.max_batch)
        settings = {
            "speculation": "off",  # random weights repeat themselves, which no model does
            "max_num_seqs": what.max_batch,
            "max_num_batched_tokens": max_num_batched_tokens,
            # Held requests begin within a few steps of each other, so their contexts are about equally long.
            "max_prefill_tokens_with_decodes": max_num_batched_tokens,
            # One more each: the scheduler keeps a spare block per request.
            "num_kv_blocks": what.max_batch * (-(-what.max_context // block_size) + 1),
            **what.settings,
        }
        config = EngineConfig(
            model=what.model, device="cpu", block_size=block_size, num_threads=what.num_threads, **settings
        )
        self._core: EngineCore = assemble(config, lambda stage, fraction: None).core
        self._max_context = what.max_context
        self._num_requests = 0
        self._held: list[str] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        started = time.perf_counter()
        self._add(prompt, max_tokens=1)
        while self._core.has_work():
            self._core.step()
        return time.perf_counter() - started

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        self._held = [self._add(prompt, self._max_context - len(prompt)) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < len(self._held):
            begun |= {output.request_id for output in self._core.step().outputs}

    def decode(self, num_steps: int) -> list[float]:
        return [self._step() for _ in range(num_steps + 1)][1:]

    def release(self) -> None:
        from tandem_engine.messages import AbortRequest

        for request_id in self._held:
            self._core.handle(AbortRequest(request_id))
        self._held = []

    def _step(self) -> float:
        started = time.perf_counter()
        done = self._core.step()
        seconds = time.perf_counter() - started
        if len(done.outputs) != len(self._held):
            raise RuntimeError(f"a step brought {len(done.outputs)} tokens to {len(self._held)} requests")
        return seconds

    def _add(self, prompt: Sequence[int], max_tokens: int) -> str:
        from tandem_engine.messages import AddRequest, Refused
        from tandem_engine.sampling_params import SamplingParams

        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        events = self._core.handle(AddRequest(request_id, list(prompt), len(prompt), sampling))
        if refused := [event for event in events if isinstance(event, Refused)]:
            raise RuntimeError(refused[0].message)
        return request_id


if __name__ == "__main__":
    serve(TandemEngine())
