"""Runs continuous batching of transformers; its own thread steps, and pauses between commands."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from benchmarks.peers.protocol import Load, serve

_PAGE_SIZE = 32
_MAX_BATCH_TOKENS = 512
_RESULT_SECONDS = 60.0


class TransformersContinuous:
    """A `ContinuousBatchingManager`; a new one for every set of requests."""

    def load(self, what: Load) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(what.num_threads)
        model: Any = AutoModelForCausalLM.from_pretrained(what.model, dtype=torch.float32)
        self._model = model.eval()
        self._max_context = what.max_context
        self._num_blocks = what.max_batch * (-(-what.max_context // _PAGE_SIZE) + 1)
        self._manager: Any = None
        self._pause = ExitStack()
        self._held: list[str] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        manager = self._started()
        started = time.perf_counter()
        manager.add_request(list(prompt), max_new_tokens=1, eos_token_id=-1)
        self._result(manager)
        seconds = time.perf_counter() - started
        manager.stop()
        return seconds

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        self._manager = self._started()
        self._held = [
            self._manager.add_request(
                list(prompt), max_new_tokens=self._max_context - len(prompt), streaming=True, eos_token_id=-1
            )
            for prompt in prompts
        ]
        self._wait_for(1)
        self._pause.enter_context(self._manager.pause())

    def decode(self, num_steps: int) -> list[float]:
        while self._manager.get_result(timeout=0.01) is not None:
            pass  # of the step that was under way when the pause was asked for
        self._pause.close()
        times = self._wait_for(num_steps + 1)
        self._pause.enter_context(self._manager.pause())
        return [later - earlier for earlier, later in pairwise(times)]

    def release(self) -> None:
        self._pause.close()
        self._manager.stop(hard_stop=True)
        self._manager = None

    def _wait_for(self, num_tokens: int) -> list[float]:
        """Return when the last request had its first, second, ... token, until each has so many."""
        counts: Counter[str] = Counter()
        times: list[float] = []
        while len(times) < num_tokens:
            counts[self._result(self._manager).request_id] += 1
            if min(counts[request_id] for request_id in self._held) > len(times):
                times.append(time.perf_counter())
        return times

    def _result(self, manager: Any) -> Any:
        result = manager.get_result(timeout=_RESULT_SECONDS)
        if result is None or result.error:
            raise RuntimeError(f"continuous batching brought nothing: {result and result.error}")
        return result

    def _started(self) -> Any:
        import transformers

        library: Any = transformers
        manager = self._model.init_continuous_batching(
            generation_config=library.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=library.ContinuousBatchingConfig(
                page_size=_PAGE_SIZE,
                num_blocks=self._num_blocks,
                max_batch_tokens=_MAX_BATCH_TOKENS,
                allow_block_sharing=False,
            ),
        )
        manager.start()
        return manager


if __name__ == "__main__":
    serve(TransformersContinuous())
