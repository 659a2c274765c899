"""A real engine process loads an encoder, encodes, refuses, cancels and stops."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import pytest_asyncio

from tandem_engine.client import EngineClient
from tandem_engine.encoder.messages import (
    CancelTexts,
    EncoderReady,
    EncoderStats,
    EncodeTexts,
    TextInput,
    TextsEncoded,
    TextsRefused,
)
from tandem_engine.messages import EngineFailed, LoadProgress, Ping, Pong
from tandem_engine.settings import EngineConfig
from tests.checkpoints import VOCAB_SIZE
from tests.tandem_engine.encoder import checkpoints

Kind = TypeVar("Kind")

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Front:
    """Reads events in order until the one it waits for."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.seen: list[Any] = []
        self._events = client.events()

    async def wait_for(self, kind: type[Kind]) -> Kind:
        async for event, fds in self._events:
            assert not fds, "an encoder has no descriptors"
            self.seen.append(event)
            if isinstance(event, kind):
                return event
        raise AssertionError(f"the engine ended without {kind.__name__}")


def _config(folder: Path, **values: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), device="cpu", num_threads=1, encodes=True, **values)


def _text(*token_ids: int) -> TextInput:
    return TextInput(np.array(token_ids, "<u4").tobytes())


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """One engine for all tests that do not change it."""
    folder = tmp_path_factory.mktemp("bert")
    checkpoints.make("bert", folder)
    client = await EngineClient.start(_config(folder))
    front = Front(client)
    await front.wait_for(EncoderReady)
    yield front
    await client.stop()
    assert client.returncode == 0


async def test_a_process_loads_and_encodes(front: Front) -> None:
    # 1. It reports progress, then what it makes of an input.
    assert any(isinstance(event, LoadProgress) for event in front.seen)
    ready = next(event for event in front.seen if isinstance(event, EncoderReady))
    assert (ready.encoder.task, ready.encoder.num_values, ready.model.vocab_size) == ("text-embedding", 72, VOCAB_SIZE)
    assert set(ready.model.asset_paths) == {"tokenizer.json", "tokenizer_config.json"}
    # 2. A call is answered with the values of all its inputs, and with its times.
    front.client.send(EncodeTexts(1, [_text(5, 6, 7), _text(8)]))
    encoded = await front.wait_for(TextsEncoded)
    assert (encoded.key, encoded.num_tokens, len(encoded.values)) == (1, 4, 2 * 72 * 4)
    assert 0 < encoded.scheduled_ns <= encoded.finished_ns
    # 3. Nothing is left.
    stats = await front.wait_for(EncoderStats)
    assert (stats.num_waiting, stats.num_tokens_in_flight, stats.counters["encoded_inputs"]) == (0, 0, 2)


async def test_a_call_that_cannot_be_done_is_refused(front: Front) -> None:
    front.client.send(EncodeTexts(2, [_text(5), _text(VOCAB_SIZE)]))
    refused = await front.wait_for(TextsRefused)
    assert (refused.key, refused.reason) == (2, "invalid")
    assert "input 1" in refused.message and str(VOCAB_SIZE) in refused.message


async def test_a_cancelled_call_has_no_answer_and_a_ping_has_one(front: Front) -> None:
    front.client.send(EncodeTexts(3, [_text(*range(2, 90))] * 400))
    front.client.send(CancelTexts(3))
    front.client.send(EncodeTexts(4, [_text(5)]))
    front.client.send(Ping())
    encoded = await front.wait_for(TextsEncoded)
    assert encoded.key == 4
    if not any(isinstance(event, Pong) for event in front.seen):
        await front.wait_for(Pong)


async def test_a_model_that_is_no_encoder_ends_the_process_with_its_name(tmp_path: Path) -> None:
    checkpoints.make("qwen3-causal", tmp_path)
    client = await EngineClient.start(_config(tmp_path))
    failed = await Front(client).wait_for(EngineFailed)
    assert failed.kind == "unsupported" and "Qwen3ForCausalLM" in failed.message
    await client.stop()
