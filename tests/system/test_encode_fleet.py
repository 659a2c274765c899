"""Embeddings of a real fleet of encode workers: equal vectors, whatever happens to a worker meanwhile."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import cloudflare
import httpx
import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests.clients.node import bundled_worker
from tests.examples.workerd import example_worker
from tests.system.fleet import Fleet, Service, until
from tests.tandem_engine.encoder.checkpoints import make, make_with_head, write_sentence_files

WORKERS = ("encode-0", "encode-1")
TEXTS = [f"text {index} " + "about caches " * (index % 7) for index in range(48)]
pytestmark = pytest.mark.asyncio(loop_scope="module")


class Embeddings:
    """The fleet, and the vectors of `TEXTS`, each asked for alone."""

    def __init__(self, fleet: Fleet, flags: Sequence[str]) -> None:
        self.fleet = fleet
        self.flags = flags
        self.http = httpx.AsyncClient(base_url=fleet.base_url, timeout=60, trust_env=False)
        self.alone: dict[str, bytes] = {}

    async def of(self, *texts: str) -> list[bytes]:
        """Return the bytes of each text's vector."""
        body = {"model": "tiny-bert", "input": list(texts), "encoding_format": "base64"}
        answer = await self.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 200, answer.text
        return [base64.b64decode(each["embedding"]) for each in answer.json()["data"]]

    def start(self, name: str) -> Service:
        return self.fleet.start("encode", name, *self.flags)

    async def start_again(self, name: str) -> None:
        """Start a worker that has ended, and return once the new one is ready."""
        before = self.fleet.worker(name)
        self.start(name)

        def is_back() -> bool:
            worker = self.fleet.worker(name)
            is_new = before is None or worker is None or worker.incarnation != before.incarnation
            return worker is not None and is_new and worker.is_usable

        await until(is_back, 60, lambda: self.fleet.tails([name]))

    async def steps(self, name: str) -> float:
        return sum((await self.fleet.stats(name)).counters.values())

    async def all_are_answered_while(self, happens: Callable[[], Awaitable[None]]) -> None:
        """Ask for texts all the while, and compare every vector with the one that the text had alone."""
        is_over = asyncio.Event()

        async def ask(first: int) -> int:
            num = 0
            while not is_over.is_set() or not num:
                texts = [TEXTS[(first + num + index) % len(TEXTS)] for index in range(5)]
                assert await self.of(*texts) == [self.alone[text] for text in texts]
                num += 1
            return num

        asking = [asyncio.create_task(ask(7 * index)) for index in range(6)]
        try:
            await happens()
        finally:
            is_over.set()
        assert sum(await asyncio.gather(*asking)) >= len(asking)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embeddings(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Embeddings]:
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "tiny-bert"
    make("bert", checkpoint)
    write_sentence_files(checkpoint, "pooling_mode_mean_tokens")
    flags = ["--model", str(checkpoint), "--num-threads", "1", "--engine-timeout-seconds", "1"]
    async with Fleet(tmp_path_factory.mktemp("encode"), certificates=True) as fleet:
        here = Embeddings(fleet, flags)
        for name in WORKERS:
            here.start(name)
        ranker = checkpoint.parent / "tiny-ranker"
        make_with_head("bert", ranker, 1)
        fleet.start("encode", "ranker", "--model", str(ranker), "--num-threads", "1")
        await fleet.ready()
        for text in TEXTS:
            (here.alone[text],) = await here.of(text)
        yield here
        await here.http.aclose()


async def test_a_fleet_that_only_embeds_is_ready_and_lists_its_model(embeddings: Embeddings) -> None:
    assert (await embeddings.http.get("/readyz")).status_code == 200
    models = (await embeddings.http.get("/v1/models")).json()["data"]
    lengths = {model["id"]: model["context_length"] for model in models}
    assert lengths.keys() == {"tiny-bert", "tiny-ranker"} and lengths["tiny-bert"] == 96
    refused = await embeddings.http.post("/v1/completions", json={"model": "tiny-bert", "prompt": "hi"})
    assert refused.status_code == 400 and "makes embeddings" in refused.text


async def test_texts_get_the_same_bits_alone_and_together_from_both_workers(embeddings: Embeddings) -> None:
    before = {name: await embeddings.steps(name) for name in WORKERS}
    found = await asyncio.gather(*(embeddings.of(*TEXTS[index:]) for index in range(16)))
    assert all(each == [embeddings.alone[text] for text in TEXTS[index:]] for index, each in enumerate(found))
    after = {name: await embeddings.steps(name) for name in WORKERS}
    assert all(after[name] > before[name] for name in WORKERS)
    vector: Any = np.frombuffer(embeddings.alone[TEXTS[0]], "<f4")
    assert vector.shape == (72,) and np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


async def test_the_cloudflare_sdk_gets_the_same_vectors(embeddings: Embeddings) -> None:
    def work() -> Any:
        base_url = f"{embeddings.fleet.base_url}/client/v4"
        with cloudflare.Cloudflare(base_url=base_url, api_token="unused", max_retries=0) as client:
            return client.ai.run("tiny-bert", account_id="acc", text=TEXTS[:2])

    found: Any = await asyncio.to_thread(work)
    vectors: Any = np.array(found["data"], dtype="<f4")
    assert found["shape"] == [2, 72]
    assert [vector.tobytes() for vector in vectors] == [embeddings.alone[text] for text in TEXTS[:2]]


@pytest.mark.services
async def test_a_worker_s_binding_and_the_ai_sdk_embed_and_rank(embeddings: Embeddings, tmp_path: Path) -> None:
    folder = bundled_worker(tmp_path)
    query = {"embedder": "tiny-bert", "ranker": "tiny-ranker"}
    with example_worker(embeddings.fleet.gateway.http_address, folder) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as worker:
            answer = await worker.get("/encode", params=query)
    found = answer.json()
    assert answer.status_code == 200, found
    assert found["shape"] == [2, 72] and found["embeddings"] == found["data"]
    scores = [each["score"] for each in found["ranking"]]
    assert {each["originalIndex"] for each in found["ranking"]} == {0, 1} and scores == sorted(scores, reverse=True)


async def test_a_worker_that_is_killed_costs_nobody_an_answer(embeddings: Embeddings) -> None:
    async def killed() -> None:
        service = embeddings.fleet.services["encode-0"]
        service.kill()
        await embeddings.fleet.ended(service)
        await embeddings.start_again("encode-0")

    await embeddings.all_are_answered_while(killed)


async def test_an_engine_that_dies_ends_its_worker_and_costs_nobody_an_answer(embeddings: Embeddings) -> None:
    async def engine_killed() -> None:
        service = embeddings.fleet.services["encode-1"]
        _engine_of(service).kill()
        assert await embeddings.fleet.ended(service) == 1
        await embeddings.start_again("encode-1")

    await embeddings.all_are_answered_while(engine_killed)


async def test_an_engine_that_stands_still_loses_its_calls_to_the_other_worker(embeddings: Embeddings) -> None:
    async def stopped() -> None:
        engine = _engine_of(embeddings.fleet.services["encode-0"])
        engine.send_signal(signal.SIGSTOP)
        try:
            await until(lambda: not _is_usable(embeddings, "encode-0"), 30)
        finally:
            engine.send_signal(signal.SIGCONT)
        await until(lambda: _is_usable(embeddings, "encode-0"), 30)

    await embeddings.all_are_answered_while(stopped)


async def test_a_worker_that_is_told_to_stop_finishes_what_it_has(embeddings: Embeddings) -> None:
    async def drained() -> None:
        service = embeddings.fleet.services["encode-1"]
        service.kill(signal.SIGTERM)
        assert await embeddings.fleet.ended(service) == 0
        await embeddings.start_again("encode-1")

    await embeddings.all_are_answered_while(drained)


async def test_after_all_that_nothing_is_left_behind(embeddings: Embeddings) -> None:
    await embeddings.fleet.pools_are_full()
    assert len(embeddings.fleet.registry.workers()) == len(WORKERS) + 1  # and the ranker


def _engine_of(service: Service) -> psutil.Process:
    (engine,) = [
        child for child in psutil.Process(service.process.pid).children() if "tandem_engine.process" in child.cmdline()
    ]
    return engine


def _is_usable(embeddings: Embeddings, name: str) -> bool:
    worker = embeddings.fleet.worker(name)
    return worker is not None and worker.is_usable
