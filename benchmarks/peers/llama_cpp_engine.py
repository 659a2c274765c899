"""Runs llama.cpp: its own batches, through llama-cpp-python's low-level binding."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.protocol import Load, serve

_UBATCH_TOKENS = 512
_FLASH_ATTENTION_ON = 1
_F32 = 0


class LlamaCppEngine:
    """One context whose sequences have a cache each, float32, with flash attention."""

    def load(self, what: Load) -> None:
        self._llama: Any = importlib.import_module("llama_cpp")
        self._llama.llama_backend_init()
        model_params = self._llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = self._llama.llama_model_load_from_file(what.model.encode(), model_params)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {what.model}")
        params = self._llama.llama_context_default_params()
        params.n_ctx = what.max_batch * what.max_context
        params.n_seq_max = what.max_batch
        params.n_batch = params.n_ubatch = _UBATCH_TOKENS
        params.n_threads = params.n_threads_batch = what.num_threads
        params.flash_attn_type = _FLASH_ATTENTION_ON
        params.type_k = params.type_v = _F32
        params.kv_unified = False
        self._context = self._llama.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context; does it fit in memory?")
        self._memory = self._llama.llama_get_memory(self._context)
        self._vocab_size = what.vocab_size
        self._batch = self._llama.llama_batch_init(_UBATCH_TOKENS, 0, 1)
        self._ends: list[int] = []
        self._next: list[int] = []

    def prefill(self, prompt: Sequence[int]) -> float:
        self._llama.llama_memory_clear(self._memory, True)
        started = time.perf_counter()
        self._compute_prompt(prompt, 0)
        return time.perf_counter() - started

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        self._llama.llama_memory_clear(self._memory, True)
        self._next = [self._compute_prompt(prompt, sequence) for sequence, prompt in enumerate(prompts)]
        self._ends = [len(prompt) for prompt in prompts]

    def decode(self, num_steps: int) -> list[float]:
        return [self._step() for _ in range(num_steps + 1)][1:]

    def release(self) -> None:
        self._llama.llama_memory_clear(self._memory, True)
        self._ends, self._next = [], []

    def _compute_prompt(self, prompt: Sequence[int], sequence: int) -> int:
        """Return the token that follows; logits of the last position only."""
        for start in range(0, len(prompt), _UBATCH_TOKENS):
            part = prompt[start : start + _UBATCH_TOKENS]
            is_last = start + len(part) == len(prompt)
            for row, token in enumerate(part):
                self._put(row, token, start + row, sequence, is_last and row + 1 == len(part))
            self._run(len(part))
        return self._greedy(len(part) - 1)

    def _step(self) -> float:
        started = time.perf_counter()
        for row, (token, position) in enumerate(zip(self._next, self._ends, strict=True)):
            self._put(row, token, position, row, True)
        self._run(len(self._next))
        self._next = [self._greedy(row) for row in range(len(self._next))]
        self._ends = [end + 1 for end in self._ends]
        return time.perf_counter() - started

    def _put(self, row: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[row], batch.pos[row] = token, position
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
        batch.logits[row] = wants_logits

    def _run(self, num_tokens: int) -> None:
        self._batch.n_tokens = num_tokens
        if code := self._llama.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {code}")

    def _greedy(self, row: int) -> int:
        numpy: Any = importlib.import_module("numpy")
        logits = self._llama.llama_get_logits_ith(self._context, row)
        pointer = ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
        return int(numpy.ctypeslib.as_array(pointer, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCppEngine())
