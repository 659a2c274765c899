"""Peers get the same numbers as Tandem, and serve what was requested."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.peers import openvino_server, places
from benchmarks.peers.convert_gguf import gguf_name, turned
from benchmarks.peers.openvino_server import Server, Stepper
from benchmarks.peers.protocol import FIRST_TOKEN_ID, Load, prompt_ids
from benchmarks.peers.tandem_engine import TandemEngine
from tests.checkpoints import make_checkpoint


def test_prompts_are_the_same_for_a_seed_and_share_no_beginning_between_seeds() -> None:
    first, again, other = (prompt_ids(64, 2000, seed) for seed in (1, 1, 2))
    assert first == again
    assert first[:4] != other[:4]
    assert min(first) >= FIRST_TOKEN_ID
    assert max(first) < 2000


def test_tensors_have_the_names_that_llama_cpp_looks_for() -> None:
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert gguf_name("model.layers.11.mlp.gate_proj.weight") == "blk.11.ffn_gate.weight"
    assert gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    with pytest.raises(KeyError):
        gguf_name("model.layers.0.self_attn.q_norm.weight")


def test_dimensions_that_turn_together_come_to_lie_side_by_side() -> None:
    rows = np.arange(8)[:, None] * np.ones((1, 3))  # two heads of four dimensions; i turns with i + 2
    assert turned(rows, num_heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_a_peer_is_there_once_all_of_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PEERS", tmp_path)
    assert not places.is_installed("openvino")
    places.mark_installed("openvino", "2026.4.1")
    assert places.is_installed("openvino")
    assert places.versions() == {"openvino": "2026.4.1"}


def test_our_engine_is_driven_step_by_step(tmp_path: Path) -> None:
    model = str(make_checkpoint(tmp_path, "llama"))
    engine = TandemEngine()
    engine.load(Load(model, 100, 1, max_batch=3, max_context=48, kv_bytes_per_token=0, settings={}))
    assert engine.prefill([11, 12, 13]) > 0
    engine.hold([[11, 12, 13], [14, 15, 16, 17], [18, 19]])
    assert len(engine.decode(5)) == 5
    assert len(engine.decode(2)) == 2
    engine.release()
    engine.hold([[token] * 40 for token in (21, 22, 23)])  # takes all of the pool: nothing is left of the others
    assert len(engine.decode(6)) == 6


# ----------------------------------------------------------------------------------------------- OpenVINO's server


class _Handle:
    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens
        self.ready: list[int] = []
        self.cancelled = threading.Event()

    def can_read(self) -> bool:
        return bool(self.ready)

    def read(self) -> dict[int, Any]:
        tokens, self.ready = self.ready, []
        return {0: type("Output", (), {"generated_ids": tokens})}

    def cancel(self) -> None:
        self.cancelled.set()


class _Pipeline:
    """Makes one token per request and step, the number of the request."""

    def __init__(self) -> None:
        self.handles: dict[int, _Handle] = {}

    def add_request(self, request_id: int, prompt: list[int], num_tokens: int) -> _Handle:
        self.handles[request_id] = _Handle(num_tokens)
        return self.handles[request_id]

    def step(self) -> None:
        for request_id, handle in self.handles.items():
            if handle.left and not handle.cancelled.is_set():
                handle.left -= 1
                handle.ready.append(request_id)


@pytest.fixture
def _plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_server, "tensor", list)
    monkeypatch.setattr(openvino_server, "greedy", lambda num_tokens: num_tokens)


@pytest.mark.usefixtures("_plain_requests")
async def test_answers_stream_side_by_side_and_end() -> None:
    stepper = Stepper(_Pipeline())
    stepper.start()
    async with await Server(stepper).listen(0) as server, _client(server) as client:
        assert (await client.get("/health")).is_success
        answers = await asyncio.gather(*(_tokens(client, num_tokens) for num_tokens in (3, 5)))
    assert [len(tokens) for tokens in answers] == [3, 5]
    assert {len(set(tokens)) for tokens in answers} == {1}


@pytest.mark.usefixtures("_plain_requests")
async def test_a_client_that_leaves_takes_its_request_along() -> None:
    pipeline = _Pipeline()
    stepper = Stepper(pipeline)
    stepper.start()
    async with await Server(stepper).listen(0) as server, _client(server) as client:
        asked = {"prompt": [1], "n_predict": 10**9}
        async with client.stream("POST", "/completion", json=asked) as answer:
            await anext(answer.aiter_lines())
        assert await asyncio.to_thread(pipeline.handles[1].cancelled.wait, 10)
        assert len(await _tokens(client, 2)) == 2  # the others go on


def _client(server: asyncio.Server) -> httpx.AsyncClient:
    port = server.sockets[0].getsockname()[1]
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False)


async def _tokens(client: httpx.AsyncClient, num_tokens: int) -> list[int]:
    found: list[int] = []
    async with client.stream("POST", "/completion", json={"prompt": [1, 2], "n_predict": num_tokens}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                found += json.loads(line.removeprefix("data: ")).get("tokens", [])
    return found
