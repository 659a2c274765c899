"""Runs `model.generate()` of transformers: a static batch of equal lengths."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.peers.protocol import Load, serve


class TransformersGenerate:
    """A transformers model with its default attention and a DynamicCache."""

    def load(self, what: Load) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(what.num_threads)
        model: Any = AutoModelForCausalLM.from_pretrained(what.model, dtype=torch.float32)
        self._model = model.eval()
        self._cache: Any = None
        self._tokens: Any = None

    def prefill(self, prompt: Sequence[int]) -> float:
        import torch

        started = time.perf_counter()
        self._generate(torch.tensor([list(prompt)]), None, 1, None)
        return time.perf_counter() - started

    def hold(self, prompts: Sequence[Sequence[int]]) -> None:
        """Compute one prompt after the other; a whole batch of them at once would take gigabytes."""
        import torch
        from transformers import DynamicCache

        caches = []
        for prompt in prompts:
            cache = DynamicCache(config=self._model.config)
            with torch.inference_mode():
                self._model(torch.tensor([list(prompt)]), past_key_values=cache, logits_to_keep=1)
            caches.append(cache)
        self._cache = DynamicCache(config=self._model.config)
        for index in range(self._model.config.num_hidden_layers):
            layers = [cache.layers[index] for cache in caches]
            keys, values = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("keys", "values"))
            self._cache.update(keys, values, index)
        self._tokens = torch.tensor([[*prompt, prompt[0]] for prompt in prompts])

    def decode(self, num_steps: int) -> list[float]:
        clock = _Clock()
        # Its first token comes with all that generate() does once; the seconds are those between tokens.
        self._tokens = self._generate(self._tokens, self._cache, num_steps + 1, clock)
        return clock.seconds

    def release(self) -> None:
        self._cache = self._tokens = None

    def _generate(self, tokens: Any, cache: Any, num_tokens: int, streamer: Any) -> Any:
        import torch

        with torch.inference_mode():
            return self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                past_key_values=cache,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                pad_token_id=0,
                streamer=streamer,
            )


class _Clock:
    """A streamer of generate(): notes when each step's tokens come."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._has_prompt = False

    def put(self, value: Any) -> None:
        if self._has_prompt:  # the prompt comes first
            self._times.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        pass

    @property
    def seconds(self) -> list[float]:
        return [later - earlier for earlier, later in pairwise(self._times)]


if __name__ == "__main__":
    serve(TransformersGenerate())
