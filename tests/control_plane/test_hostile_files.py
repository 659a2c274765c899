"""A worker that registers a broken, huge or hostile tokenizer or template is an event, and nothing else."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.gateway import Gateway
from control_plane.settings import ControlPlaneSettings
from tandem.v1 import types_pb2 as pb
from tandem_runtime import log as logs
from tests.control_plane.api.model import CHATML, byte_level_tokenizer
from tests.control_plane.scripted_worker import ScriptedWorker
from tests.control_plane.test_gateway_background import running

_MEBIBYTE = b" " * (1 << 20)
_ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
_GOOD = {"tokenizer.json": byte_level_tokenizer().to_str().encode(), "tokenizer_config.json": b'{"bos_token": "<s>"}'}
_BAD: dict[str, tuple[dict[str, bytes], str, str]] = {
    "no-json": ({"tokenizer.json": b"no JSON"}, CHATML, "tokenizer.json of no-json cannot be read"),
    "refused": ({"tokenizer.json": b'{"model": {"type": "BPE"}}'}, CHATML, "tokenizer.json of refused cannot be read"),
    "config": ({"tokenizer_config.json": b"no JSON"}, CHATML, "tokenizer_config.json of config is not JSON"),
    "endless": ({}, _ENDLESS, "template of endless did not render one word within 2 s"),
    "huge": ({"tokenizer.json": _MEBIBYTE * 300}, CHATML, "sends more than 268,435,456 bytes as tokenizer.json"),
    "sparse": (
        {"tokenizer.json": b'{"model": {"type": "WordLevel", "vocab": {"a": 4000000}, "unk_token": "a"}}'},
        CHATML,
        "4,000,000 ids below 4,000,001 have no token",
    ),
}
"""Files and template of each model, and the reason that its event has."""


class FileWorker(ScriptedWorker):
    """Serves the files of its model."""

    def __init__(self, model_id: str, files: dict[str, bytes], chat_template: str, life: int = 0) -> None:
        super().__init__(model_id, life=life)
        self.model_id = model_id
        self.chat_template = chat_template
        self.files = {name: _digest(content) for name, content in {**_GOOD, **files}.items()}
        self.contents = {_digest(content): content for content in {**_GOOD, **files}.values()}

    def info(self, **changes: Any) -> pb.WorkerInfo:
        info = super().info(**changes)
        info.card.vocab_size = 420
        info.card.chat_template = self.chat_template
        for name, digest in self.files.items():
            info.card.assets.add(name=name, digest=digest)
        return info

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        content = memoryview(self.contents[request.digest])
        for start in range(0, len(content), len(_MEBIBYTE)):
            yield pb.Chunk(offset=start, data=bytes(content[start : start + len(_MEBIBYTE)]))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


class World:
    """A running gateway's HTTP."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def models(self) -> list[str]:
        return [model["id"] for model in (await self._http.get("/v1/models")).json()["data"]]

    async def unusable(self) -> dict[str, str]:
        """Return the errors of all events of that kind."""
        events = (await self._http.get("/v1/events", params={"kind": "model_unusable"})).json()["data"]
        found = {event["model"]: event["fields"]["error"] for event in events}
        assert len(found) == len(events), "one event for each model"
        return found

    async def chats(self, model: str) -> bool:
        body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
        answer = await self._http.post("/v1/chat/completions", json=body)
        return answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3

    async def is_ready(self, model: str = "") -> bool:
        return (await self._http.get("/readyz", params={"model": model} if model else {})).status_code == 200


@pytest.mark.timeout(180)
async def test_hostile_files_are_events_and_nothing_else(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "state_dir": str(tmp_path)}
    logs.configure("tandem-control", json=True)  # the log is where events come from
    gateway = Gateway(ControlPlaneSettings(**settings, suspect_seconds=600, gone_seconds=600))  # they send no heartbeat
    good = await FileWorker("good", {}, CHATML).start()
    bad = [await FileWorker(name, files, template).start() for name, (files, template, _) in _BAD.items()]
    mended = await FileWorker("no-json", {}, CHATML, life=1).start()
    mended.worker_id = "no-json-mended"
    workers = [good, *bad, mended]
    try:
        async with (
            running(gateway),
            asyncio.timeout(120),
            httpx.AsyncClient(base_url=f"http://{gateway.http_address}", timeout=30) as http,
        ):
            world = World(http)
            for worker in bad:
                worker.register(gateway.registry)
            good.register(gateway.registry)
            while not await world.chats("good"):
                pass  # the first answer may come before its description
            while set(errors := await world.unusable()) != set(_BAD):
                assert await world.chats("good"), "while the others' files are fetched and tried"
            for name, (_, _, reason) in _BAD.items():
                assert reason in errors[name]
            generation = gateway.text_processes.zygote.keys
            assert await world.chats("good") and len(generation) == 1
            assert await world.models() == ["good"]
            while not await world.is_ready("good"):
                pass
            assert await world.is_ready() and not await world.is_ready("no-json")
            mended.register(gateway.registry)
            while not (await world.chats("no-json") and await world.is_ready("no-json")):
                pass
            assert set(await world.unusable()) == set(_BAD), "and no more events"
    finally:
        for worker in workers:
            await worker.kill()
