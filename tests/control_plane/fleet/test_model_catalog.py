"""A gateway knows every served model by its names, and forgets models that are gone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog.testing

from control_plane.api.http.errors import public_message
from control_plane.fleet import model_files
from control_plane.fleet.model_catalog import ModelCatalog
from control_plane.fleet.registry import RESTART_SECONDS, WorkerRegistry
from control_plane.fleet.status import FleetStatus
from control_plane.generation import ModelDescription
from tandem.v1 import types_pb2 as pb
from tandem.v1 import worker_pb2_grpc
from tandem.v1.tables_pb2 import TablesReply, TablesRequest
from tandem_runtime.errors import InternalError, ModelNotFound, Unavailable, Unsupported
from tandem_runtime.model_table import ModelTable
from tandem_runtime.server import GrpcServer
from tests.control_plane.worker_rows import worker_rows
from tests.tandem_worker.kv_harness import until

TOKENIZER = b'{"model": {}}'


class AssetServer(worker_pb2_grpc.WorkerServiceServicer):
    """A worker that only serves assets: `content`, and others by their digests."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.others: dict[bytes, bytes] = {}
        self.num_fetches = 0
        self.answers: asyncio.Event | None = None
        """Set: no file is sent before this event."""

    async def Attach(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.Event]:
        raise Unsupported("nothing but assets here")
        yield

    async def Drain(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:
        return pb.StatsReply()

    async def Tables(self, request: TablesRequest, context: Any) -> TablesReply:
        return TablesReply()

    async def GetAsset(self, request: pb.AssetRequest, context: Any) -> AsyncIterator[pb.Chunk]:
        self.num_fetches += 1
        if self.answers is not None:
            await self.answers.wait()
        content = self.others.get(request.digest, self.content)
        for start in range(0, len(content), 4):
            yield pb.Chunk(offset=start, data=content[start : start + 4])


@asynccontextmanager
async def serving(content: bytes = TOKENIZER) -> AsyncIterator[tuple[AssetServer, str]]:
    assets = AssetServer(content)
    server = GrpcServer(
        "127.0.0.1:0", lambda grpc: worker_pb2_grpc.add_WorkerServiceServicer_to_server(assets, grpc), []
    )
    address = await server.start()
    try:
        yield assets, address
    finally:
        await server.stop(0)


def digest_of(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def register(
    registry: WorkerRegistry,
    name: str,
    address: str = "",
    *,
    state: pb.WorkerState.ValueType = pb.WORKER_STATE_READY,
    assets: tuple[str, ...] = ("tokenizer.json",),
    config: bytes | None = None,
    tokenizer: bytes = TOKENIZER,
    **card: Any,
) -> None:
    digest = digest_of(tokenizer)
    fields = {"model_id": "m", "fingerprint": pb.Fingerprint(digest=b"f" * 16), "context_length": 512, **card}
    listed = [pb.Asset(name=asset, digest=digest) for asset in assets]
    if config is not None:
        listed.append(pb.Asset(name="tokenizer_config.json", digest=digest_of(config)))
    info = pb.WorkerInfo(
        worker_id=name,
        incarnation=name,
        role=pb.WORKER_ROLE_DECODE,
        address=address,
        card=pb.ModelCard(assets=listed, **fields),
    )
    registry.register(info, pb.LoadReport(state=state))


def new() -> tuple[WorkerRegistry, ModelCatalog]:
    registry = WorkerRegistry(3.0, 5.0)
    return registry, ModelCatalog(registry)


async def test_a_tokenizer_is_fetched_once_from_whoever_has_it() -> None:
    registry, catalog = new()
    async with serving() as (assets, address):
        register(registry, "unreachable", "127.0.0.1:1", context_length=100)
        register(registry, "good", address, context_length=100)
        await catalog.prefetch()
        model = await catalog.get("m")
    assert (model.tokenizer_json, model.tokenizer_config, assets.num_fetches) == (TOKENIZER, {}, 1)
    assert catalog.list() == [model]


async def test_a_gateway_that_has_just_started_waits_for_a_model_whose_workers_may_come_after_anothers() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, registration_seconds=60.0)
    with pytest.raises(Unavailable, match="no worker has loaded a model yet"):
        await catalog.get("m")
    async with serving() as (_, address):
        register(registry, "first", address, context_length=100)
        asked = [asyncio.create_task(catalog.get(name)) for name in ("second", "second:with-an-adapter")]
        assert (await catalog.get("m")).model_id == "m"
        register(registry, "second", address, model_id="second", context_length=100)
        assert (await asked[0]).model_id == "second"
        with pytest.raises(ModelNotFound, match="adapter"):
            await asked[1]


@pytest.mark.parametrize("is_at_work", [True, False])
async def test_a_gateway_that_comes_to_a_fleet_at_work_holds_requests_back_until_it_knows_the_fleet(
    is_at_work: bool,
) -> None:
    """Else the first worker that calls gets every session, and what the others have of it is computed again."""
    now, registry = 100.0, WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, lambda: now, settling_seconds=60.0)
    async with serving() as (_, address):
        if not is_at_work:  # it starts together with this gateway
            register(registry, "first", address, model_id="", state=pb.WORKER_STATE_LOADING)
        register(registry, "first", address)
        await catalog.prefetch()
        asked = asyncio.create_task(catalog.get("m"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert asked.done() is not is_at_work
        asked.cancel()
        now += 61.0
        assert (await catalog.get("m")).model_id == "m"
        register(registry, "later", address)
        assert (await catalog.get("m")).model_id == "m"


async def test_a_name_that_no_worker_tells_of_in_time_is_refused() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, registration_seconds=0.05)
    register(registry, "first", "127.0.0.1:1")
    for _ in range(2):
        with pytest.raises(ModelNotFound, match="no model 'other' here; served: m"):
            await catalog.get("other")


async def test_a_file_that_does_not_match_its_digest_is_not_used() -> None:
    registry, catalog = new()
    async with serving(b"something else") as (_, address):
        register(registry, "w", address)
        with pytest.raises(Unavailable, match="has not got the files of m") as refusal:
            await catalog.get("m")
        await catalog.prefetch()  # logs the failure and continues
        assert "does not match its digest" in catalog.problem_of("m")
    said = public_message(refusal.value)
    assert "in a moment, here or to another gateway" in said, "a client reads it, and no address of a worker"
    assert refusal.value.retry_after_seconds == 2.0
    assert catalog.list() == []


async def test_a_model_is_without_files_until_a_worker_has_sent_them_and_not_when_its_workers_come_back() -> None:
    registry, catalog = new()
    assert catalog.without_files() == frozenset()
    async with serving() as (_, address):
        register(registry, "w", "127.0.0.1:1")
        await catalog.prefetch()
        assert catalog.without_files() == {"m"}
        register(registry, "with-the-files", address)
        await catalog.prefetch()
        assert catalog.without_files() == frozenset()
    for worker_id in ("w", "with-the-files"):
        registry.deregister(worker_id, worker_id)
    await catalog.prefetch()
    register(registry, "again", "127.0.0.1:1", context_length=100)
    assert catalog.without_files() == frozenset(), "another context has the same files"
    register(registry, "another", "127.0.0.1:1", model_id="another")
    assert catalog.without_files() == {"another"}


@pytest.mark.parametrize("config", [b"no JSON", b"[1]", b"\xff\xfe", b"[" * 100_000])
async def test_a_worker_whose_file_is_malformed_harms_its_own_model_only(config: bytes) -> None:
    """Finding 6: such a worker ended the gateway."""
    registry, catalog = new()
    async with serving() as (assets, address):
        assets.others[digest_of(config)] = config
        register(registry, "bad", address, model_id="bad", config=config)
        register(registry, "good", address, model_id="good", fingerprint=pb.Fingerprint(digest=b"g" * 16))
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                await catalog.prefetch()
        with pytest.raises(Unavailable, match=r"tokenizer_config\.json of bad is not"):
            await catalog.get("bad")
    assert [model.model_id for model in catalog.list()] == ["good"]
    assert [(line["event"], line["model"]) for line in lines] == [("model_unusable", "bad")], "once per cause"
    rows = await worker_rows(FleetStatus(registry, problem_of=catalog.problem_of))
    shown = {row["model"]: row["load"]["error"] for row in rows}
    assert shown["good"] == "" and "tokenizer_config.json of bad is not" in shown["bad"]
    registry.deregister("bad", "bad")
    await catalog.prefetch()
    assert catalog.problem_of("bad") == ""


async def test_an_exception_that_nobody_expected_harms_one_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    registry, catalog = new()
    describe = ModelCatalog._describe

    async def fails(self: ModelCatalog, card: pb.ModelCard) -> Any:
        if card.model_id == "bad":
            raise KeyError("a defect")
        return await describe(self, card)

    monkeypatch.setattr(ModelCatalog, "_describe", fails)
    async with serving() as (_, address):
        register(registry, "bad", address, model_id="bad")
        register(registry, "good", address, model_id="good", fingerprint=pb.Fingerprint(digest=b"g" * 16))
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                await catalog.prefetch()
    assert [model.model_id for model in catalog.list()] == ["good"]
    assert [line["event"] for line in lines] == ["model_unusable"]
    assert "KeyError" in catalog.problem_of("bad")


async def test_the_same_weights_under_two_names_are_two_models() -> None:
    registry, catalog = new()
    async with serving() as (_, address):
        register(registry, "a", address, model_id="one")
        register(registry, "b", address, model_id="two", aliases=["zwei"])
        assert [(await catalog.get(name)).model_id for name in ("one", "two", "zwei")] == ["one", "two", "two"]
    assert [model.model_id for model in catalog.list()] == ["one", "two"]


def test_where_workers_differ_the_shortest_context_of_those_that_serve_counts() -> None:
    registry, catalog = new()
    register(registry, "a", context_length=512)
    register(registry, "b", context_length=256)
    register(registry, "c", context_length=128, state=pb.WORKER_STATE_DRAINING)
    assert catalog.card("m").context_length == 256


def test_an_unknown_model_is_refused_naming_those_that_are_served() -> None:
    registry, catalog = new()
    with pytest.raises(Unavailable, match="no worker has loaded a model"):
        catalog.card("x")
    register(registry, "a", model_id="one")
    register(registry, "b", model_id="two")
    with pytest.raises(ModelNotFound, match="served: one, two"):
        catalog.card("x")


async def test_a_model_is_known_while_its_workers_may_come_again() -> None:
    """The model is not listed then, but a request does not fail."""
    now = 100.0
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, clock=lambda: now)
    async with serving() as (_, address):
        register(registry, "w", address)
        described = await catalog.get("m")
    registry.deregister("w", "w")
    now += RESTART_SECONDS - 1
    assert (await catalog.get("m"), catalog.list()) == (described, [])
    now += 1
    with pytest.raises(Unavailable):
        catalog.card("m")


async def test_a_model_without_tokenizer_is_refused_with_the_remedy() -> None:
    registry, catalog = new()
    register(registry, "w", assets=())
    with pytest.raises(Unsupported, match=r"no tokenizer\.json"):
        await catalog.get("m")


async def test_of_models_that_came_and_went_a_bounded_number_of_bytes_is_kept() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, max_gone_bytes=10 * 4200)  # a description counts as 4 KiB and its file
    async with serving() as (_, address):
        for life in range(40):
            register(registry, "w", address, fingerprint=pb.Fingerprint(digest=bytes([life]) * 16))
            await catalog.get("m")
    assert catalog.num_kept == 11, "the one that is served, and ten that are gone"


async def test_fifty_served_models_in_turn_are_fetched_once() -> None:
    """Finding 8: with 33 models, every tokenizer was fetched again twice a second."""
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, max_gone_bytes=0)
    async with serving() as (assets, address):
        for number in range(50):
            content = f'{{"model": {number}}}'.encode()
            assets.others[digest_of(content)] = content
            register(registry, f"w-{number}", address, model_id=f"m-{number}", tokenizer=content)
        for _ in range(3):
            await catalog.prefetch()
            for number in range(50):
                model = await catalog.get(f"m-{number}")
                assert model.tokenizer_json == f'{{"model": {number}}}'.encode()
        assert (assets.num_fetches, len(catalog.list()), len(catalog.served_text_keys())) == (50, 50, 50)
        registry.deregister("w-0", "w-0")
        content = b"one more"
        assets.others[digest_of(content)] = content
        register(registry, "w-50", address, model_id="m-50", tokenizer=content)
        await catalog.prefetch()
        assert (assets.num_fetches, catalog.num_kept) == (51, 50), "what is gone is dropped: nothing of it may be kept"


async def test_a_model_that_comes_back_in_time_is_not_fetched_again() -> None:
    registry, catalog = new()
    async with serving() as (assets, address):
        register(registry, "w", address)
        await catalog.prefetch()
        registry.deregister("w", "w")
        register(registry, "other", address, model_id="other")
        await catalog.prefetch()
        register(registry, "w", address)
        await catalog.prefetch()
        assert assets.num_fetches == 1, "the other model has the same file"


async def test_a_model_whose_worker_does_not_answer_delays_no_other() -> None:
    """All descriptions were made one after the other, 20 s each for such a worker."""
    registry, catalog = new()
    async with serving() as (silent, silent_address), serving() as (assets, address):
        silent.answers = asyncio.Event()
        register(registry, "silent", silent_address, model_id="silent")
        preparing = asyncio.create_task(catalog.prefetch())
        await until(lambda: silent.num_fetches == 1)
        other = b"another file"
        assets.others[digest_of(other)] = other
        register(registry, "good", address, model_id="good", tokenizer=other)
        await catalog.prefetch()
        assert [model.model_id for model in catalog.list()] == ["good"]
        silent.answers.set()
        await preparing
    assert [model.model_id for model in catalog.list()] == ["good", "silent"]


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
async def test_a_file_that_is_too_large_is_fetched_less_and_less_often(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "MAX_ASSET_BYTES", 8)
    monkeypatch.setattr(model_files, "MAX_CONFIG_BYTES", 8)
    now, huge = 100.0, b"{" * 100
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, clock=lambda: now)
    async with serving() as (assets, address):
        assets.others[digest_of(huge)] = huge
        if name == "tokenizer.json":
            register(registry, "w", address, tokenizer=huge)
        else:
            register(registry, "w", address, config=huge)
        fetched_at = []
        for _ in range(200):
            before = assets.num_fetches
            await catalog.prefetch()
            if assets.num_fetches > before:
                fetched_at.append(now - 100.0)
            now += 1.0
    assert fetched_at == [0.0, 10.0, 30.0, 70.0, 150.0]
    assert f"sends more than 8 bytes as {name}" in catalog.problem_of("m")


async def test_a_worker_with_the_file_is_asked_at_once_though_another_did_not_give_it() -> None:
    now = 100.0
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, clock=lambda: now)
    async with serving(b"something else") as (bad, bad_address), serving() as (_, address):
        register(registry, "bad", bad_address)
        for _ in range(3):
            await catalog.prefetch()
            with pytest.raises(Unavailable, match="has not got the files"):
                await catalog.get("m")
            assert "does not match" in catalog.problem_of("m")
        assert bad.num_fetches == 1, "a failure holds for half a second, then twice as long"
        register(registry, "good", address)
        assert (await catalog.get("m")).tokenizer_json == TOKENIZER


async def test_a_worker_that_sends_too_much_takes_its_variant_from_no_worker_that_has_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It registers the digest of others' file before they come, and a second worker registers another file."""
    monkeypatch.setattr(model_files, "MAX_ASSET_BYTES", 20)
    registry, other = WorkerRegistry(3.0, 5.0), b"another file"
    catalog = ModelCatalog(registry)
    async with serving(b"{" * 100) as (_, bad_address), serving() as (assets, address):
        assets.others[digest_of(other)] = other
        register(registry, "bad-0", bad_address)
        await catalog.prefetch()
        register(registry, "bad-1", address, tokenizer=other)
        await catalog.prefetch()
        assert (await catalog.get("m")).tokenizer_json == other
        for name in ("good-0", "good-1"):
            register(registry, name, address)
        await catalog.prefetch()
        assert (await catalog.get("m")).tokenizer_json == TOKENIZER
        apart = {worker.worker_id for worker in registry.workers() if worker.apart_for}
        assert apart == {"bad-1"}


class Loader:
    """Refuses some tokenizers."""

    def __init__(self, *refused: bytes) -> None:
        self.refused: tuple[bytes, ...] = refused
        self.loaded: list[str] = []
        self.is_away = False

    def is_loaded(self, model: ModelDescription) -> bool:
        return model.text_key in self.loaded

    async def load(self, model: ModelDescription) -> None:
        if self.is_away:
            raise Unavailable("the gateway's text processes have ended")
        if model.tokenizer_json in self.refused:
            raise InternalError(f"the tokenizer.json of {model.model_id} cannot be read")
        self.loaded.append(model.text_key)


async def test_a_worker_with_a_broken_tokenizer_gives_way_to_a_good_one_and_takes_nothing_from_it() -> None:
    registry, broken = WorkerRegistry(3.0, 5.0), b"broken"
    catalog = ModelCatalog(registry, loader=Loader(broken))
    async with serving() as (assets, address):
        assets.others[digest_of(broken)] = broken
        register(registry, "bad", address, tokenizer=broken)
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                await catalog.prefetch()
            assert (catalog.problem_of("m"), catalog.list()) == ("the tokenizer.json of m cannot be read", [])
            register(registry, "good", address)
            apart = {worker.worker_id: worker.apart_for for worker in registry.workers()}
            assert apart == {"bad": "assets", "good": ""}
            await catalog.prefetch()
        assert (catalog.problem_of("m"), (await catalog.get("m")).tokenizer_json) == ("", TOKENIZER)
        assert [line["event"] for line in lines if line["event"] == "model_unusable"] == ["model_unusable"]
        for number in range(5):  # more of the bad ones change nothing
            register(registry, f"bad-{number}", address, tokenizer=broken)
        assert (await catalog.get("m")).tokenizer_json == TOKENIZER
        registry.deregister("good", "good")
        await catalog.prefetch()
        assert catalog.problem_of("m") == "the tokenizer.json of m cannot be read"


async def test_a_model_that_was_usable_once_is_not_handed_to_another_variant_by_a_failed_load() -> None:
    registry, loader, other = WorkerRegistry(3.0, 5.0), Loader(), b"another file"
    catalog = ModelCatalog(registry, loader=loader)
    async with serving() as (assets, address):
        assets.others[digest_of(other)] = other
        register(registry, "good", address)
        await catalog.prefetch()
        register(registry, "rogue", address, tokenizer=other)
        loader.loaded.clear()  # the text processes have begun anew, and there is no memory for this load
        loader.refused = (TOKENIZER,)
        await catalog.prefetch()
        assert "cannot be read" in catalog.problem_of("m")
        assert {worker.worker_id: worker.apart_for for worker in registry.workers()} == {"good": "", "rogue": "assets"}
        loader.refused = ()
        await catalog.prefetch()
        assert catalog.problem_of("m") == ""


async def test_text_processes_that_begin_anew_are_no_models_fault() -> None:
    registry, loader = WorkerRegistry(3.0, 5.0), Loader()
    catalog = ModelCatalog(registry, loader=loader)
    async with serving() as (_, address):
        register(registry, "w", address)
        loader.is_away = True
        with structlog.testing.capture_logs() as lines:
            await catalog.prefetch()
        assert (lines, catalog.problem_of("m"), len(catalog.list())) == ([], "", 1)
        loader.is_away = False
        await catalog.prefetch()
        assert len(loader.loaded) == 1


async def test_every_served_model_is_loaded_before_a_request_needs_it_and_again_once_the_loader_has_lost_it() -> None:
    registry, loader = WorkerRegistry(3.0, 5.0), Loader()
    catalog = ModelCatalog(registry, loader=loader)
    async with serving() as (assets, address):
        for number in range(3):
            register(registry, f"w-{number}", address, model_id=f"m-{number}", chat_template=str(number))
        await catalog.prefetch()
        assert len(set(loader.loaded)) == 3 and catalog.served_text_keys() == set(loader.loaded)
        loader.loaded.clear()
        await catalog.prefetch()
        assert (len(loader.loaded), assets.num_fetches) == (3, 1)


async def test_a_model_answers_to_the_names_of_the_table_in_its_wire_format() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    models = ModelTable.from_toml({"mine": {"aliases": ["my"], "wire_format": "openai"}})
    catalog = ModelCatalog(registry, models=models)
    async with serving() as (_, address):
        register(registry, "a", address, model_id="mine")
        register(registry, "b", address, model_id="meta-llama/Llama-3.2-1B-Instruct")
        mine, llama = await catalog.get("my"), await catalog.get("@cf/meta/llama-3.2-1b-instruct")
    assert (mine.model_id, mine.aliases, mine.wire_format, mine.is_fallback) == ("mine", ("my",), "openai", False)
    assert (llama.model_id, llama.wire_format) == ("meta-llama/Llama-3.2-1B-Instruct", "native")
    assert llama.aliases == ("@cf/meta/llama-3.2-1b-instruct",)


def test_a_model_answers_without_its_at_sign_and_its_folder() -> None:
    registry, catalog = new()
    register(registry, "a", model_id="@tandem/demo")
    register(registry, "b", model_id="meta-llama/Llama-3.2-1B", aliases=["llama"])
    for name in ("@tandem/demo", "tandem/demo", "demo"):
        assert catalog.card(name).model_id == "@tandem/demo"
    assert catalog.card("Llama-3.2-1B").model_id == "meta-llama/Llama-3.2-1B"
    for name in ("", "@demo", "emo", "@tandem", "tandem"):
        with pytest.raises(ModelNotFound, match="served: @tandem/demo, meta-llama"):
            catalog.card(name)


def test_a_short_name_is_no_worker_s_to_take() -> None:
    registry, catalog = new()
    register(registry, "a", model_id="@tandem/demo")
    register(registry, "b", model_id="other/demo")
    with pytest.raises(ModelNotFound, match="'demo' may be @tandem/demo or other/demo; send the whole name"):
        catalog.card("demo")
    register(registry, "c", model_id="demo")
    assert catalog.card("demo").model_id == "demo"


async def test_a_name_that_a_worker_serves_goes_before_the_tables() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, models=ModelTable.from_toml({"one": {"aliases": ["two"]}}))
    async with serving() as (_, address):
        register(registry, "a", address, model_id="one")
        register(registry, "b", address, model_id="two")
        assert (await catalog.get("two")).model_id == "two"


async def test_the_fallback_answers_for_text_in_the_form_of_who_was_asked() -> None:
    registry = WorkerRegistry(3.0, 5.0)
    catalog = ModelCatalog(registry, fallback_model="m")
    with pytest.raises(Unavailable, match="no worker has loaded a model yet"):
        await catalog.get("x")  # the fallback is not loaded either
    async with serving() as (_, address):
        register(registry, "a", address)
        loaded, unknown, newer = [await catalog.get(name) for name in ("m", "x", "@cf/openai/gpt-oss-20b")]
        assert (await catalog.get("openai/gpt-oss-20b")).wire_format == "openai", "as if it were loaded by its Hub id"
        for name in ("@cf/baai/bge-m3", "@cf/openai/whisper"):
            with pytest.raises(ModelNotFound, match="served: m"):
                await catalog.get(name)
    assert [model.model_id for model in (loaded, unknown, newer)] == ["m", "m", "m"]
    assert [model.is_fallback for model in (loaded, unknown, newer)] == [False, True, True]
    assert (unknown.wire_format, newer.wire_format) == ("native", "openai")
    with pytest.raises(ModelNotFound):
        catalog.card("x")  # routing uses no fallback
    assert catalog.list() == [loaded]


async def test_workers_are_looked_through_once_after_a_change_and_not_for_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 500 workers, GET /v1/models looked through all of them 500 times."""
    registry, catalog = new()
    num_read = 0
    workers = registry.workers

    def read(role: pb.WorkerRole.ValueType | None = None) -> Any:
        nonlocal num_read
        num_read += 1
        return workers(role)

    async with serving() as (_, address):
        for number in range(20):
            register(registry, f"w-{number}", address)
        await catalog.prefetch()
        monkeypatch.setattr(registry, "workers", read)
        for _ in range(3):
            assert [model.model_id for model in catalog.list()] == ["m"]
            assert catalog.card("m").context_length == 512
        assert num_read == 0
        register(registry, "shorter", address, context_length=256)
        assert [catalog.card("m").context_length for _ in range(3)] == [256] * 3
        assert num_read == 3  # decode, prefill, encode


async def test_of_each_model_the_card_of_a_ready_worker_is_preferred_whichever_came_first() -> None:
    registry, catalog = new()
    register(registry, "loading", context_length=128, state=pb.WORKER_STATE_LOADING)
    register(registry, "ready", context_length=512)
    register(registry, "also loading", context_length=512, state=pb.WORKER_STATE_LOADING)
    assert catalog.card("m").context_length == 512
    register(registry, "loading", context_length=128)
    assert catalog.card("m").context_length == 128
    registry.deregister("loading", "loading")
    assert catalog.card("m").context_length == 512
