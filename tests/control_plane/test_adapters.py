"""A client names a LoRA adapter; the hashes, the Submit and the worker keep it apart from the model itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control_plane.dispatch.block_hashes import PromptHasher, wire_prompt
from control_plane.dispatch.dispatcher import _check_adapter
from control_plane.dispatch.request_state import RequestState
from control_plane.dispatch.submitter import decode_submit
from control_plane.fleet.model_variants import remedy_of, variant_of
from control_plane.generation import AccountPolicies, Adapter, TokenIds
from tandem.v1 import types_pb2 as pb
from tandem_engine.adapters import find_adapters
from tandem_engine.errors import ModelUnusable
from tandem_engine.messages import AddRequest
from tandem_engine.sampling_params import SamplingParams
from tandem_engine.scheduling.admission import RequestRefused, build_request
from tandem_engine.scheduling.scheduler_config import SchedulerConfig
from tandem_runtime.errors import FingerprintMismatch, ModelNotFound
from tandem_runtime.kv.spaces import model_identity
from tandem_worker.convert import add_request
from tandem_worker.settings import WorkerSettings
from tandem_worker.submit_reader import SubmitReader
from tests.control_plane.api.gateway import serve
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.dispatch.test_block_hashes import CARD, WORKER, asked
from tests.control_plane.dispatch.test_request_stream import Events
from tests.control_plane.fleet.test_model_catalog import new, register, serving

RED, BLUE = Adapter("red", "01"), Adapter("blue", "02")
ADAPTERS = [pb.Adapter(name=each.name, digest=each.digest) for each in (BLUE, RED)]
PROMPT = tuple(range(40))


async def test_a_name_with_an_adapter_is_the_model_with_it_and_an_unknown_one_names_what_exists() -> None:
    registry, catalog = new()
    async with serving() as (_, address):
        register(registry, "w", address, adapters=ADAPTERS, aliases=["tiny"])
        base, red, by_alias = [await catalog.get(name) for name in ("m", "m:red", "tiny:red")]
        assert (base.adapter, red.adapter, red.model_id) == (None, RED, "m") and by_alias == red
        assert red.facts.adapter == RED and base.facts != red.facts
        with pytest.raises(ModelNotFound, match="no adapter 'green' of m here; its adapters: blue, red"):
            await catalog.get("m:green")
        with pytest.raises(ModelNotFound, match="no model 'other:red' here"):
            await catalog.get("other:red")
        register(registry, "whole", address, model_id="m:red")  # a model's own name takes precedence
        assert (await catalog.get("m:red")).model_id == "m:red"


async def test_hashes_of_an_adapter_are_those_of_no_other_and_come_with_the_prompt() -> None:
    hasher = PromptHasher(b"s" * 32, AccountPolicies(), 4)
    requests = [asked("me", PROMPT, adapter=adapter, num_public_tokens=12) for adapter in (None, RED, BLUE)]
    found = [await hasher.hashes(request, CARD) for request in requests]
    hashes = [each for each in found if each is not None]
    assert len({each.root for each in hashes}) == 3
    every = [block for each in hashes for block in each.blocks]
    assert len(set(every)) == len(every) == 30  # the public blocks, too, are of one adapter
    # what a text process has computed for the adapter is taken, and for no other
    wire = wire_prompt(
        TokenIds(PROMPT),
        identity=model_identity(CARD.fingerprint),
        grain=4,
        salt=hashes[1].salt,
        num_public_tokens=12,
        adapter=RED.digest,
    )
    assert (wire.hash_root, wire.hashes) == (hashes[1].root, hashes[1].blocks.packed)
    for adapter, expected in ((RED, hashes[1]), (BLUE, hashes[2])):
        again = await hasher.hashes(asked("me", PROMPT, adapter=adapter, num_public_tokens=12, wire=wire), CARD)
        assert again is not None and again.blocks == expected.blocks


async def test_a_submit_names_the_adapter_and_a_worker_without_these_files_refuses_it() -> None:
    request = asked("me", PROMPT, adapter=RED)
    card = pb.ModelCard(adapters=ADAPTERS)
    card.MergeFrom(CARD)
    _check_adapter(request, card)
    with pytest.raises(ModelNotFound, match="have adapter 'red' no longer"):
        _check_adapter(request, CARD)
    state = RequestState(request, CARD, None, Events())
    submit = decode_submit(state, state.choices[0], WORKER)
    assert submit.adapter == ADAPTERS[1]
    submit.token_ids[:] = PROMPT
    SubmitReader(card).read(submit)
    assert add_request(submit, "r", "aggregated").adapter == "red"
    for others in ([], [pb.Adapter(name="red", digest="ff")]):
        changed = pb.ModelCard(adapters=others)
        changed.MergeFrom(CARD)
        with pytest.raises(FingerprintMismatch, match="the request names adapter 'red' with digest 01"):
            SubmitReader(changed).read(submit)


def test_workers_with_other_adapters_are_another_variant() -> None:
    plain, both = variant_of(pb.ModelCard(), 16), variant_of(pb.ModelCard(adapters=ADAPTERS), 16)
    assert plain != both == variant_of(pb.ModelCard(adapters=ADAPTERS[::-1]), 16)
    assert remedy_of("adapters", 16, 16) == "give all workers of the model the same --adapters"


async def test_clients_see_adapters_and_may_name_one_as_lora() -> None:
    async with serve(ScriptedDispatcher(Script((5, 6))), adapters=(BLUE, RED)) as gateway:
        listed = (await gateway.client.get("/v1/models")).json()["data"]
        base = listed[0]["id"]
        assert [(each["id"], each.get("parent")) for each in listed] == [
            (base, None),
            (f"{base}:blue", base),
            (f"{base}:red", base),
        ]
        body: dict[str, Any] = {"prompt": "hi", "lora": "red"}
        answer = await gateway.client.post(f"/client/v4/accounts/me/ai/run/{base}", json=body)
        assert answer.status_code == 200, answer.text
        chat = {"model": f"{base}:blue", "messages": [{"role": "user", "content": "hi"}]}
        named = await gateway.client.post("/v1/chat/completions", json=chat)
        assert named.status_code == 200 and named.json()["model"] == f"{base}:blue"
        unknown = await gateway.client.post("/v1/chat/completions", json={**chat, "model": f"{base}:green"})
        assert unknown.status_code == 404 and "blue, red" in unknown.text
        assert [each.adapter for each in gateway.dispatcher.requests] == [RED, BLUE]


def test_our_own_engine_has_no_adapters() -> None:
    with pytest.raises(ValueError, match="--adapters is for vLLM, the engine is tandem"):
        WorkerSettings(adapters=("red=/red",))
    command = AddRequest("r", [1], 1, SamplingParams(max_tokens=1), adapter="red")
    config = SchedulerConfig(num_blocks=4, block_size=16, context_length=32, vocab_size=8)
    with pytest.raises(RequestRefused, match="no adapter 'red' in this engine; its adapters: none"):
        build_request(command, config, arrival=0, added_ns=0)
    assert build_request(command, config, arrival=0, added_ns=0, adapters={"red"}).adapter == "red"


def test_adapters_are_folders_with_a_digest_of_their_files(tmp_path: Path) -> None:
    for name, rank in (("b", 4), ("a", 16)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(f'{{"r": {rank}}}')
        (tmp_path / name / "adapter_model.safetensors").write_bytes(b"the same weights")
    found = find_adapters([f"x={tmp_path / 'b'}", f"a={tmp_path / 'a'}"])
    assert [(each.name, each.rank) for each in found] == [("a", 16), ("x", 4)]
    assert found[0].digest != found[1].digest
    (tmp_path / "b" / "adapter_model.safetensors").write_bytes(b"other weights")
    assert find_adapters([f"x={tmp_path / 'b'}"])[0].digest != found[1].digest
    for entry, why in (
        ("=p", "write NAME=PATH"),
        ("a:b=/p", "write NAME=PATH"),
        (f"a={tmp_path}", "no adapter_config.json and no adapter_model.safetensors; save it with peft"),
    ):
        with pytest.raises(ModelUnusable, match=why):
            find_adapters([entry])
    with pytest.raises(ModelUnusable, match="names a twice"):
        find_adapters([f"a={tmp_path / 'a'}", f"a={tmp_path / 'b'}"])
