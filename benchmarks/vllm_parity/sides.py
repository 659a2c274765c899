"""Runs the sides that are compared: vLLM alone, and Tandem's engine process with vLLM."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.served import ROOT
from benchmarks.vllm_parity.work import NUM_TOKENS
from tandem_engine.channel import Received, close_all
from tandem_engine.client import EngineClient, Program
from tandem_engine.demo import checkpoint_path
from tandem_engine.messages import AddRequest, EngineFailed, Ready, Refused, RequestFailed, StepDone
from tandem_engine.settings import EngineConfig

DEMO = "built-in"
MODELS = (DEMO, "llama", "qwen3_moe", "mistral", "gemma3", "llama-int8")
"""The built-in model, a random Llama, a mixture of experts, windows in all layers, windows in some layers, the Llama
with weights of 8 bits."""
_KV_BYTES = 256 << 20
_MAX_MODEL_LEN = 512
_MAX_NUM_SEQS = 64
_MAX_NUM_BATCHED_TOKENS = 512
WORKER_FLAGS = (
    *("--dtype", "float32", "--max-model-len", str(_MAX_MODEL_LEN), "--kv-memory-bytes", str(_KV_BYTES)),
    *("--max-num-seqs", str(_MAX_NUM_SEQS), "--max-num-batched-tokens", str(_MAX_NUM_BATCHED_TOKENS)),
)
"""The settings of `serving`, for a worker."""


@dataclass(frozen=True)
class Alone:
    """Greedy answers of `vllm.LLM`."""

    tokens: Sequence[Sequence[int]]
    margins: Sequence[Sequence[float]]
    """The lead of the best log probability over the second, per position."""
    noise: float
    """Largest difference of one log probability between two batches, over `num_compared` positions."""
    num_compared: int


def made(folder: Path, kind: str) -> Path:
    """Return the checkpoint's folder, below `folder` if it is made; in a process of its own, which imports torch."""
    if kind == DEMO:
        return checkpoint_path()
    subprocess.run([sys.executable, "-m", "tests.checkpoints", str(folder), kind], cwd=ROOT, check=True)
    return folder / f"random-{kind}"


async def ask_alone(python: str, model: Path, folder: Path, prompts: Sequence[Sequence[int]], num_single: int) -> Alone:
    """Return vLLM's own answers, with the settings that `serving` gives it."""
    asked, answers = folder / f"{model.name}-asked.json", folder / f"{model.name}-answers.json"
    settings = {
        "dtype": "float32",
        "max_model_len": _MAX_MODEL_LEN + 1,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
        "kv_cache_memory_bytes": _KV_BYTES,
        "block_size": 32,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "seed": 0,
    }
    facts = {"model": str(model), "settings": settings, "num_tokens": NUM_TOKENS, "num_single": num_single}
    asked.write_text(json.dumps({**facts, "prompts": prompts}))
    script = Path(__file__).with_name("alone.py")
    process = await asyncio.create_subprocess_exec(python, "-P", str(script), str(asked), str(answers))
    if code := await process.wait():
        raise RuntimeError(f"vLLM alone ended with {code}; its error is above")
    return Alone(**json.loads(answers.read_text()))


class Serving:
    """An engine process of Tandem."""

    def __init__(self, client: EngineClient, events: AsyncIterator[Received], ready: Ready) -> None:
        self.ready = ready
        self._client = client
        self._events = events
        self._num_used_blocks = 0

    @property
    def num_used_blocks(self) -> int:
        """Blocks of the pool that requests have, after the last step."""
        return self._num_used_blocks

    async def answers(self, requests: Sequence[AddRequest]) -> Mapping[str, list[int]]:
        """Ask all at once; return the tokens by request id. Raises RuntimeError if one fails."""
        for request in requests:
            self._client.send(request)
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        num_left = len(tokens)
        async for received in self._events:
            match received.message:
                case StepDone() as done:
                    self._num_used_blocks = done.stats.num_used_blocks
                    for output in done.outputs:
                        tokens[output.request_id] += output.token_ids
                        num_left -= output.is_last
                case Refused() | RequestFailed() | EngineFailed() as failure:
                    raise RuntimeError(str(failure))
            if not num_left:
                return tokens
        raise RuntimeError("the engine process ended")


@asynccontextmanager
async def serving(program: Program, model: Path, **settings: Any) -> AsyncIterator[Serving]:
    """Start an engine process."""
    config = EngineConfig(
        str(model),
        served_model_name=model.name,
        dtype="float32",
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=_MAX_NUM_SEQS,
        max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS,
        max_num_waiting=1000,
        kv_memory_bytes=_KV_BYTES,
        num_threads=1,
        **settings,
    )
    client = await EngineClient.start(config, program)
    try:
        events = client.events()
        yield Serving(client, events, await _ready(events))
    finally:
        await client.stop()


async def _ready(events: AsyncIterator[Received]) -> Ready:
    async for received in events:
        close_all(received.fds)
        if isinstance(received.message, EngineFailed):
            raise RuntimeError(received.message.message)
        if isinstance(received.message, Ready):
            return received.message
    raise RuntimeError("the engine process ended before it was ready")
