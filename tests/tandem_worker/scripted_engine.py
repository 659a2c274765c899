"""A stand-in for the engine process: an EngineLink that records commands and yields the events of a test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tandem_engine import messages
from tandem_engine.channel import Received
from tandem_engine.encoder.messages import EncoderCommand
from tandem_worker.engine_link import EngineLink


class ScriptedEngine(EngineLink):
    """Implements all of EngineLink; `answer` is called with every command sent."""

    def __init__(self) -> None:
        self.sent: list[messages.Command | EncoderCommand] = []
        self.num_descriptors: list[int] = []
        """Of each command sent."""
        self.answer: Callable[[Any], None] = lambda command: None
        self._events: asyncio.Queue[Received | None] = asyncio.Queue()
        self.pid_ = 0

    @property
    def pid(self) -> int:
        return self.pid_

    def send(self, command: messages.Command | EncoderCommand, *fds: int) -> None:
        for fd in fds:
            os.close(os.dup(fd))  # fails for a closed descriptor, like the real link
        self.sent.append(command)
        self.num_descriptors.append(len(fds))
        self.answer(command)

    def sent_of(self, kind: type[Any]) -> list[Any]:
        return [command for command in self.sent if isinstance(command, kind)]

    def emit(self, event: Any, fds: tuple[int, ...] = ()) -> None:
        self._events.put_nowait(Received(event, fds))

    def end(self) -> None:
        self._events.put_nowait(None)

    async def events(self) -> AsyncIterator[Received]:
        while (received := await self._events.get()) is not None:
            yield received

    async def stop(self) -> None:
        self.end()


LAYOUT = messages.LayoutInfo(2, 16, 2, 32, 32, "float32", "layer,kv,head,token,dim", 8192)
STATS = messages.EngineStats(0, 0, 0, 8, 8, 0, 0, 0, {})


def ready(region_id: str = "") -> messages.Ready:
    model = messages.ModelInfo(
        model_id="m",
        architecture="LlamaForCausalLM",
        num_parameters=1,
        dtype="float32",
        device="cpu",
        vocab_size=64,
        context_length=128,
        eos_token_ids=[2],
        generation_defaults={"temperature": 0.5},
        chat_template="",
        weights_digest="w",
        quantization="",
        kv_dtype="float32",
        tokenizer_digest="t",
        numerics_class="n",
        asset_paths={},
    )
    return messages.Ready(model, LAYOUT, 8, region_id, 8 * 8192 + 64, 8 * 8192, 8, 8192)


def step(
    outputs: Sequence[messages.RequestOutput] = (), sealed: Sequence[messages.SealedBlocks] = ()
) -> messages.StepDone:
    return messages.StepDone(1, list(outputs), list(sealed), STATS)


def output(key: str, position: int, token_ids: Sequence[int], *, is_last: bool = False) -> messages.RequestOutput:
    return messages.RequestOutput(
        key, 0, list(token_ids), position, finish_reason="length" if is_last else None, is_last=is_last
    )
