"""A structured answer validates when its decode worker is killed."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import jsonschema_rs
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from tandem_engine.grammar import Grammar
from tests.checkpoints import make_checkpoint
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, token_request
from tests.system.streams import client, run

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 9999}},
              "required": ["id"], "additionalProperties": False},
    "minItems": 12, "maxItems": 14,
}  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with Fleet(tmp_path_factory.mktemp("structured")) as fleet:
        fleet.start("kv", "kv-0")
        fleet.start("prefill", "prefill-0", *SMALL)
        fleet.start("decode", "decode-0", *SMALL)
        fleet.start("decode", "decode-1", *SMALL)
        await fleet.ready()
        yield fleet


async def test_a_native_answer_is_an_object(fleet: Fleet) -> None:
    inputs = {"prompt": "List some ids.", "response_format": {"type": "json_schema", "json_schema": SCHEMA}}
    async with client(fleet.base_url) as http:
        result = await run(http, {**inputs, "temperature": 1.5, "seed": 2, "max_tokens": 1500})
    jsonschema_rs.validate(SCHEMA, result["response"])
    assert result["finish_reason"] == "stop"


async def test_an_answer_goes_on_and_validates_when_its_decode_worker_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    grammar, (model,) = Grammar("json_schema", json.dumps(SCHEMA)), fleet.gateway.catalog.list()
    sampling = {"grammar": grammar, "stop_token_ids": model.eos_token_ids, "temperature": 1.5, "seed": 4}

    async def answer(kill_after: int | None) -> list[int]:
        request = token_request(model.model_id, range(40, 90), 400, cacheable=False, choice_seeds=(4,), **sampling)
        stream = await fleet.gateway.dispatcher.submit(request)
        async for _ in stream:
            if kill_after is not None and len(stream.state.choices[0].tokens) >= kill_after:
                kill_after = None
                fleet.services[stream.route["decode"]].kill(signal.SIGKILL)
        return stream.state.choices[0].tokens

    expected = await answer(None)
    assert await answer(len(expected) // 3) == expected
    tokenizer = Tokenizer.from_file(str(make_checkpoint(tmp_path, "demo") / "tokenizer.json"))
    jsonschema_rs.validate(SCHEMA, json.loads(tokenizer.decode(expected)))
