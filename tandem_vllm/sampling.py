"""vLLM's side of the draw: an out-of-tree logits processor (vllm/v1/sample/logits_processor/interface.py).

Tandem asks vLLM for greedy sampling and no penalties, so the processor gets the raw logits in float32, and vLLM takes
the token that the processor made the largest.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tandem_engine.execution.grammar.masks import GrammarMasks
from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed
from tandem_engine.execution.sampler import SampleOp
from tandem_engine.ops import plain_sampling
from tandem_engine.ops.cpu import KernelsUnavailable
from tandem_engine.ops.cpu.library import load_kernels, set_num_threads
from tandem_engine.ops.cpu.sampling import Sampler
from tandem_engine.ops.device_sampling import DeviceSampler
from tandem_vllm.drawing import EXTRA_ARGS_KEY, Drawer, Drawn, RowRequest, RowUpdate, decode_row_request

_LLGUIDANCE = "1.9."
"""The release that gateways and our own engine use. vLLM 0.32 installs 1.7, for grammars of its own."""


class TandemDraw(LogitsProcessor):
    """Draws the tokens of the requests that the core names before each step, and keeps them for the core."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        facts: dict[str, Any] = vllm_config.additional_config[EXTRA_ARGS_KEY]
        library = _library()
        self.masks = GrammarMasks(lambda: _guide(facts, library))
        self._drawer = Drawer(self.masks, _sample_op(device, library))
        self._samples: Collection[str] = ()
        self._drawn = Drawn()

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self._drawer.update(_row_update(batch_update))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self._drawn = self._drawer.draw(logits, self._samples)
        return logits

    def begin(self, samples: Collection[str]) -> None:
        """Name the requests whose tokens the next step samples."""
        self._samples, self._drawn = samples, Drawn()

    def take(self) -> Drawn:
        """Return the tokens of the step."""
        return self._drawn


def _row_update(update: BatchUpdate) -> RowUpdate:
    return RowUpdate(
        added=[(index, _row_request(params), prompt or [], output) for index, params, prompt, output in update.added],
        removed=list(update.removed),
        moved=[(source, target, how == MoveDirectionality.SWAP) for source, target, how in update.moved],
    )


def _row_request(params: SamplingParams) -> RowRequest:
    assert params.extra_args is not None, "every request of this engine carries its own sampling parameters"
    return decode_row_request(params.extra_args[EXTRA_ARGS_KEY])


def _library() -> ctypes.CDLL | None:
    """Return the C++ library that draws and computes masks; None: numpy and Python do, which is slower."""
    try:
        kernels = load_kernels()
    except KernelsUnavailable as error:
        logging.getLogger(__name__).warning("without C++ sampling, a row takes 8 to 25 ms of a step: %s", error)
        return None
    set_num_threads(kernels.library, torch.get_num_threads())
    return kernels.library


def _sample_op(device: torch.device, library: ctypes.CDLL | None) -> SampleOp:
    on_host = plain_sampling.sample if library is None else Sampler(library).sample
    return on_host if device.type == "cpu" else DeviceSampler(device, on_host).sample


def _guide(facts: dict[str, Any], library: ctypes.CDLL | None) -> Compile:
    path, eos_token_ids = facts["tokenizer_path"], facts["eos_token_ids"]
    if not path or not eos_token_ids:
        missing = "tokenizer.json" if not path else "token that ends an answer"
        raise GrammarFailed(f"this model has no {missing}: structured output is not possible with it")
    if not (installed := version("llguidance")).startswith(_LLGUIDANCE):
        raise GrammarFailed(
            f"structured output needs llguidance {_LLGUIDANCE}* in vLLM's environment, which has {installed}: older "
            "ones let an answer's whitespace go on for ever; install it there with `pip install --no-deps`"
        )
    from tandem_engine.execution.grammar.guided import Guide  # llguidance, some megabytes

    try:
        return Guide(Path(path), facts["vocab_size"], eos_token_ids, library)
    except ValueError as error:
        raise GrammarFailed(f"llguidance cannot read the tokenizer of this model: {error}") from error
