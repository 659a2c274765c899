"""Runs continuous batching of transformers in this process, with its own defaults where a card is concerned.

`ContinuousBatchingManager` is what `model.generate_batch` uses; kept here, it captures its CUDA graphs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_kit.ours import Answer, Size

_RESULT_SECONDS = 60.0


class Theirs:
    """A model of transformers and its manager, whose thread waits between two runs. `close` ends it."""

    def __init__(self, model: Path, device: str, size: Size, *, dtype: str = "auto") -> None:
        import torch
        import transformers
        from transformers.utils import import_utils

        library: Any = transformers
        loaded: Any = library.AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self._model = loaded.to(torch.device(device)).eval()
        is_on_card = device != "cpu"
        # Flash attention reads pages of a multiple of 256 tokens; on a CPU a small page saves memory.
        page_tokens = 256 if is_on_card else 32
        # Without the package, transformers would fetch a kernel from its Hub: nothing is downloaded here.
        has_flash = import_utils.is_flash_attn_2_available() or import_utils.is_flash_attn_3_available()
        known = library.ContinuousBatchingConfig.__dataclass_fields__
        chosen = {
            "page_size" if "page_size" in known else "block_size": page_tokens,  # until 5.17.0: block_size
            "num_blocks": size.num_pages(page_tokens),
            "max_batch_tokens": max(size.max_batched_tokens, size.max_batch),
            "max_requests_per_batch": size.max_batch,
            "allow_block_sharing": False,
            "auto_switch_to_flash": has_flash,
        }
        self._manager = self._model.init_continuous_batching(
            generation_config=library.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=library.ContinuousBatchingConfig(
                **{name: value for name, value in chosen.items() if name in known}
            ),
        )
        self._page_tokens = page_tokens
        with torch.no_grad():
            self._manager.warmup()
        self._manager.start()

    @property
    def conditions(self) -> dict[str, Any]:
        """Return what its manager has chosen."""
        chosen = self._manager.continuous_batching_config
        return {
            "attention": self._model.config._attn_implementation,
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "cuda_graphs": list(chosen.use_cuda_graph),
            "asynchronous": chosen.use_async_batching,
            "page_tokens": self._page_tokens,
            "max_batch_tokens": chosen.max_batch_tokens,
        }

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Answer]:
        """Answer all prompts at once, greedy, each with that many tokens; raises RuntimeError if one of them fails."""
        request_ids = self._manager.add_requests(
            [list(prompt) for prompt in prompts], max_new_tokens=num_tokens, record_timestamps=True
        )
        found: dict[str, Answer] = {}
        while len(found) < len(request_ids):
            result = self._manager.get_result(timeout=_RESULT_SECONDS)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching brought nothing: {result and result.error}")
            if result.is_finished():
                found[result.request_id] = Answer(
                    result.created_time, list(result.generated_tokens), list(result.timestamps), is_done=True
                )
        return [found[request_id] for request_id in request_ids]

    def close(self) -> None:
        self._manager.stop(hard_stop=True)
        self._manager.destroy()
        self._model = None
