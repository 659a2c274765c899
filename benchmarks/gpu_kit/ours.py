"""Runs Tandem's engine in this process, step by step as `tandem_engine.process` does."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from select import select
from typing import Any

from benchmarks.gpu_kit.part import MissingFlag
from tandem_engine.assembly import assemble
from tandem_engine.messages import AddRequest, PositionLogprobs, Refused, RequestFailed, StepDone
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.settings import EngineConfig

_BLOCK_TOKENS = 16
_STALL_SECONDS = 60.0


@dataclass
class Answer:
    """Tokens of one request, and when each of them came; seconds of `time.perf_counter`."""

    added: float
    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    """One per token, if they were asked for."""
    is_done: bool = False


@dataclass(frozen=True)
class Size:
    """The most that an engine is given at once."""

    max_batch: int
    num_kv_tokens: int
    """Prompts and answers of all requests that run at once."""
    max_batched_tokens: int

    def num_pages(self, page_tokens: int) -> int:
        """Return how many pages hold them: of each request the last one is partly filled, and one is spare."""
        return -(-self.num_kv_tokens // page_tokens) + 2 * self.max_batch


class Ours:
    """One engine with one model. `close` gives its memory back."""

    def __init__(self, model: Path, device: str, size: Size, *, dtype: str = "auto", **settings: Any) -> None:
        """`settings`: of the engine; raises MissingFlag for one that this checkout does not have."""
        if unknown := sorted(settings.keys() - set(EngineConfig.__struct_fields__)):
            flags = ", ".join("--" + name.replace("_", "-") for name in unknown)
            raise MissingFlag(f"the engine of this checkout does not know {flags}")
        config = EngineConfig(
            model=str(model),
            device=device,
            dtype=dtype,  # type: ignore[arg-type]
            block_size=_BLOCK_TOKENS,
            num_kv_blocks=size.num_pages(_BLOCK_TOKENS),
            max_num_seqs=size.max_batch,
            max_num_batched_tokens=size.max_batched_tokens,
            max_prefill_tokens_with_decodes=size.max_batched_tokens,
            speculation="off",  # random weights repeat themselves, which no model does
            **settings,
        )
        assembled = assemble(config, lambda stage, fraction: None)
        self._core = assembled.core
        self.info = assembled.ready.model
        self.kv_bytes = assembled.ready.num_blocks * assembled.ready.layout.bytes_per_block
        self._num_requests = 0

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        num_logprobs: int | None = None,
    ) -> list[Answer]:
        """Answer all prompts at once, each with that many tokens; raises RuntimeError if one of them fails."""
        answers: dict[str, Answer] = {}
        for seed, prompt in enumerate(prompts):
            sampling = SamplingParams(num_tokens, seed, temperature, top_p, num_logprobs=num_logprobs)
            answers[self._add(prompt, sampling)] = Answer(time.perf_counter())
        worked = time.perf_counter()
        while not all(answer.is_done for answer in answers.values()):
            if self._core.has_work():
                self._core.run_step(lambda event: self._take(event, answers))
                self._wait_for_step()
                worked = time.perf_counter()
            elif time.perf_counter() - worked > _STALL_SECONDS:
                raise RuntimeError(
                    f"the engine has had nothing to do for {_STALL_SECONDS:g} s, and answers are missing"
                )
        return list(answers.values())

    def close(self) -> None:
        import torch

        if end_threads := getattr(self._core, "close", None):  # a core that plans ahead has a thread
            end_threads()
        del self._core
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _wait_for_step(self) -> None:
        """Wait for the step that runs on a thread of its own, as the engine's process does; it needs the GIL."""
        wake_fd = getattr(self._core, "wake_fd", None)  # of a core that plans ahead
        if wake_fd is not None and (running := wake_fd()) is not None and select([running], [], [], _STALL_SECONDS)[0]:
            os.eventfd_read(running)

    def _add(self, prompt: Sequence[int], sampling: SamplingParams) -> str:
        self._num_requests += 1
        request_id = f"request-{self._num_requests}"
        events = self._core.handle(AddRequest(request_id, list(prompt), len(prompt), sampling))
        if refused := [event for event in events if isinstance(event, Refused)]:
            raise RuntimeError(f"the engine refuses a request: {refused[0].message}")
        return request_id

    def _take(self, event: object, answers: dict[str, Answer]) -> None:
        now = time.perf_counter()
        if isinstance(event, RequestFailed):
            raise RuntimeError(f"the engine failed a request: {event.message}")
        if not isinstance(event, StepDone):
            return
        for output in event.outputs:
            answer = answers[output.request_id]
            answer.token_ids += output.token_ids
            answer.times += [now] * len(output.token_ids)
            answer.logprobs += output.logprobs
            answer.is_done = answer.is_done or output.is_last
