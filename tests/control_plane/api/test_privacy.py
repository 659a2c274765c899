"""Logs, spans and metrics quote nobody: marked secrets go through every error path that a client can cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from control_plane.accounts.limits import Limits
from control_plane.accounts.service import Accounts
from control_plane.api.http.request_context import HttpSettings
from control_plane.generation import EncoderFacts, EncodingRequest, TokenIds, TokenRequest
from control_plane.storage.database import database_url
from tandem_runtime.errors import Cancelled, InternalError, InvalidRequest, Overloaded, Unavailable
from tests.control_plane.api.gateway import Gateway, serve
from tests.control_plane.api.model import byte_level_tokenizer, ids_of
from tests.control_plane.api.scripted_dispatcher import Script, ScriptedDispatcher
from tests.control_plane.harness import harness, new_request, tokens_of
from tests.control_plane.scripted_worker import ScriptedWorker, fail_after, refuse_with
from tests.control_plane.scripted_worker import serve as serve_tokens
from tests.telemetry import Telemetry, collected

MARKS = {
    name: f"zq{name}qz"
    for name in (
        "prompt",
        "token",
        "header",
        "argument",
        "model",
        "session",
        "salt",
        "grammar",
        "field",
        "path",
        "tool",
    )
}
PROMPT = f"My secret is {MARKS['prompt']}."
WAITING = f"{PROMPT} And wait."
MODEL = f"@cf/{MARKS['model']}"
HEADERS = {
    "cf-consn-model-id": "demo",
    "x-session-affinity": MARKS["session"],
    "x-unknown": MARKS["header"],
    "user-agent": MARKS["header"],
    "baggage": f"key={MARKS['header']}",
    "referer": f"http://127.0.0.1/{MARKS['header']}",
}
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "user": MARKS["header"]}
RUN = "/client/v4/accounts/me/ai/run"
TOOL = {"type": "function", "function": {"name": MARKS["tool"], "parameters": {"type": "object"}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": MARKS["tool"], "arguments": f'{{"city": "{MARKS["argument"]}"}}'},
}


def quoting(request: TokenRequest) -> str:
    """Return what a careless exception would say."""
    return f"{byte_level_tokenizer().decode(list(request.token_ids))} {list(request.token_ids)}"


def script_of(request: TokenRequest) -> Script:
    """Fail in the way that the request's seed names, with messages that quote the prompt."""
    said, hello = quoting(request), ids_of("Hello world, how are you")
    failures: dict[int, Script] = {
        1: Script(refuse=KeyError(said)),
        2: Script(refuse=InvalidRequest(f"the worker refuses {said}")),
        3: Script(refuse=Unavailable("worker d is gone")),
        4: Script(hello, fail_after=1, failure=ValueError(said)),
        5: Script(hello, fail_after=1, failure=InvalidRequest(said)),
        6: Script(hello, fail_after=0, failure=InternalError("a worker failed")),
        7: Script(hello, pause_after=0),
        8: Script(refuse=Overloaded("full")),
        9: Script(hello, fail_after=1, failure=ExceptionGroup(said, [LookupError(said)])),
    }
    return failures.get(request.choice_seeds[0], Script([*hello, 1]))


@contextlib.asynccontextmanager
async def world(folder: Path, **changes: Any) -> AsyncIterator[tuple[Gateway, Accounts]]:
    accounts = Accounts(database_url("", folder))
    await accounts.open()
    await accounts.store.create("me", Limits(None, 1_000_000, 50))
    _, secret = await accounts.store.create_token("me", "first", ["inference", "usage"])
    accounts.authenticator.forget()
    MARKS["api token"] = secret
    dispatcher = ScriptedDispatcher()
    dispatcher.choose = script_of
    try:
        async with serve(
            dispatcher,
            accounts=accounts,
            timeout_seconds=0.25,
            settings=HttpSettings(max_body_bytes=200_000),
            **changes,
        ) as gateway:
            gateway.client.headers.update({"authorization": f"Bearer {secret}", **HEADERS})
            yield gateway, accounts
    finally:
        await accounts.close()


def bodies() -> list[tuple[str, str, dict[str, Any] | bytes]]:
    """Return requests of every endpoint, good ones and bad ones: method, path, body."""
    good = [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"model": "demo", "prompt": [PROMPT, PROMPT]}),
        (f"{RUN}/@tandem/demo", {"prompt": PROMPT}),
        ("/run", {"inputs": {"prompt": PROMPT}}),
    ]
    found: list[tuple[str, str, dict[str, Any] | bytes]] = [("POST", path, body) for path, body in good]
    for path, body in good:
        inner = body["inputs"] if path == "/run" else body

        def wrapped(fields: dict[str, Any], path: str = path, inner: Any = inner) -> dict[str, Any]:
            return {"inputs": {**inner, **fields}} if path == "/run" else {**inner, **fields}

        found += [
            ("POST", path, wrapped({"seed": seed, "stream": stream})) for seed in range(10) for stream in (True, False)
        ]
        found += [
            ("POST", path, f'{{"prompt": "{PROMPT}"'.encode()),
            ("POST", path, f'["{PROMPT}"]'.encode()),
            ("POST", path, b'{"prompt": "' + MARKS["prompt"].encode() + b'\xff"}'),
            ("POST", path, wrapped({MARKS["field"]: PROMPT})),
            ("POST", path, wrapped({"max_tokens": PROMPT})),
            ("POST", path, wrapped({"temperature": [MARKS["prompt"]]})),
            ("POST", path, wrapped({"prompt_cache_key": MARKS["salt"], "stop": [MARKS["prompt"]] * 50})),
            ("POST", path, wrapped({"cache_salt": MARKS["salt"]})),
            ("POST", path, wrapped({"guided_regex": f"({MARKS['grammar']}"})),
            ("POST", path, wrapped({"guided_json": {"type": MARKS["grammar"]}})),
            ("POST", path, wrapped({"response_format": {"type": MARKS["grammar"]}})),
            (
                "POST",
                path,
                wrapped({"response_format": {"type": "json_schema", "json_schema": {"$ref": f"#/{MARKS['grammar']}"}}}),
            ),
            ("POST", path, wrapped({"tools": [{**TOOL, "function": {"name": MARKS["tool"] + " !"}}]})),
            ("POST", path, wrapped({"tools": [TOOL], "tool_choice": {"type": MARKS["tool"]}})),
            ("POST", path, wrapped({"tools": [{"type": "function", "function": {**TOOL, "parameters": PROMPT}}]})),
            ("POST", path, wrapped({"prompt": PROMPT * 2000, "messages": None})),
            ("POST", path, wrapped({"prompt": PROMPT + " \ud83d", "model": MODEL})),
            ("POST", path, wrapped({"prompt": PROMPT + "x" * 300_000})),
        ]
    messages = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": MARKS["argument"], "content": PROMPT},
    ]
    broken = {**CALL, "function": {"name": MARKS["tool"], "arguments": f"{{{MARKS['argument']}"}}
    found += [
        ("POST", "/v1/chat/completions", {**CHAT, "messages": messages, "tools": [TOOL]}),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": [{"role": "assistant", "tool_calls": [broken]}]}),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": [{"role": MARKS["prompt"], "content": PROMPT}]}),
        ("POST", "/v1/chat/completions", {**CHAT, "messages": PROMPT * 2000}),
        ("POST", "/v1/chat/completions", {**CHAT, "model": MODEL}),
        ("POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT}),
        ("POST", f"{RUN}/{MODEL}", {"prompt": PROMPT}),
        ("GET", f"/v1/models/{MARKS['model']}", b""),
        ("GET", f"/{MARKS['path']}/x", b""),
        ("DELETE", f"{RUN}/{MODEL}", b""),
        ("GET", f"/client/v4/accounts/me/ai/usage?from={MARKS['prompt']}", b""),
        ("GET", f"/client/v4/accounts/me/ai/usage?model={MARKS['model']}", b""),
        ("GET", f"/client/v4/accounts/{MARKS['path']}/ai/usage", b""),
        ("PATCH", "/client/v4/accounts/me", {"limits": {MARKS["field"]: 1}}),
    ]
    return found


async def send(gateway: Gateway, method: str, path: str, body: dict[str, Any] | bytes) -> int:

    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"cf-consn-model-id": MODEL} if MODEL in path else {}
    try:
        answer = await gateway.client.request(method, path, content=content, headers=headers)
    except httpx.RemoteProtocolError:  # a stream that was cut after its error event
        return 0
    return answer.status_code


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "console"])
async def test_no_secret_of_a_request_is_in_logs_spans_or_metrics(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    statuses: set[int] = set()
    with collected(monkeypatch, as_json=as_json) as telemetry:
        async with world(tmp_path_factory.mktemp("one")) as (gateway, accounts):
            requests = bodies()
            for start in range(0, len(requests), 8):  # eight at the same time: some wait for their time limit
                batch = requests[start : start + 8]
                statuses.update(await asyncio.gather(*(send(gateway, *request) for request in batch)))
            await _wrong_tokens(gateway)
            await _leave(gateway)
            await _fail_database(gateway, accounts, monkeypatch)
            await accounts.metering.drain()
        async with world(
            tmp_path_factory.mktemp("other"), chat_template="{{ raise_exception(messages[0].content) }}"
        ) as (
            gateway,
            _,
        ):
            statuses.add(await send(gateway, "POST", "/v1/chat/completions", CHAT))
        _is_complete(telemetry, statuses)
        assert telemetry.found(*MARKS.values()) == []


def _is_complete(telemetry: Telemetry, statuses: set[int]) -> None:
    """Check that the test looked at something: each kind of failure was there, and each kind of telemetry."""
    assert {200, 400, 401, 403, 404, 405, 408, 413, 429, 500, 503, 504} - statuses <= {401}
    for event in ("unhandled_exception", "stream_failed", "request_failed", "limits_failed"):
        assert event in telemetry.log, f"no {event} was caused"
    assert "chat @tandem/demo" in telemetry.spans or "chat demo" in telemetry.spans
    assert '"error.type"' in telemetry.spans and "POST /v1/chat/completions" in telemetry.spans
    assert "gen_ai.server.request.duration" in telemetry.metrics and '"unknown"' in telemetry.metrics


async def _wrong_tokens(gateway: Gateway) -> None:
    for headers in (
        {"authorization": f"Bearer tdm_{MARKS['token']}"},
        {"authorization": f"Basic {MARKS['token']}"},
        {"authorization": "", "x-auth-key": MARKS["token"]},
    ):
        answer = await gateway.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 401


async def _leave(gateway: Gateway) -> None:
    """Leave before the first token, and in the middle of the answer."""
    gateway.dispatcher.waits_for_resume.clear()
    asking = asyncio.create_task(gateway.client.post("/v1/chat/completions", json={**CHAT, "seed": 7}))
    await gateway.dispatcher.waits_for_resume.wait()
    asking.cancel()
    await asyncio.wait([asking])
    async with gateway.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as response:
        await anext(response.aiter_lines())


async def _fail_database(gateway: Gateway, accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the database fail with messages that quote the request."""

    async def fails(*arguments: object, **options: object) -> Any:
        raise KeyError(PROMPT, MARKS["api token"], MARKS["session"])

    with monkeypatch.context() as patch:
        patch.setattr(accounts.database, "run", fails)
        for path, body in (("/v1/chat/completions", CHAT), (f"{RUN}/demo", {"prompt": PROMPT})):
            assert (await gateway.client.post(path, json=body)).status_code in (408, 500, 503, 504)
        answer = await gateway.client.get("/client/v4/accounts/me/ai/usage")
        assert answer.status_code in (200, 500)


class QuotingEncoders:
    """Fails in the way that a text's first word names, with messages that quote the texts."""

    async def encode(self, request: EncodingRequest, computed: list[int]) -> bytes:
        ids = list(TokenIds.unpack(request.inputs[0].token_ids))
        said = byte_level_tokenizer().decode(ids)
        failures: dict[str, Exception] = {
            "key": KeyError(said, ids),
            "wrong": InvalidRequest(f"the worker refuses {said}"),
            "gone": Unavailable("no encode worker is ready"),
            "full": Overloaded("full"),
            "group": ExceptionGroup(said, [LookupError(said)]),
        }
        if said.split()[0] in failures:
            raise failures[said.split()[0]]
        if said.startswith("slow"):
            await asyncio.sleep(60)
        computed.append(len(ids))
        return bytes(8 * len(request.inputs))


def encoder_bodies() -> list[tuple[str, str, dict[str, Any] | bytes]]:
    found: list[tuple[str, str, dict[str, Any] | bytes]] = []
    for kind in ("good", "key", "wrong", "gone", "full", "group", "slow"):
        text = f"{kind} {PROMPT}"
        found += [
            ("POST", "/v1/embeddings", {"model": "demo", "input": [text, text], "user": MARKS["header"]}),
            ("POST", f"{RUN}/demo", {"text": text}),
            ("POST", f"{RUN}/demo", {"query": text, "contexts": [{"text": PROMPT}]}),
            ("POST", "/run", {"inputs": {"contexts": [{"text": text}]}}),
        ]
    for path in ("/v1/embeddings", "/v1/rerank", f"{RUN}/demo"):
        found += [
            ("POST", path, f'{{"input": "{PROMPT}"'.encode()),
            ("POST", path, {"model": "demo", "input": PROMPT, MARKS["field"]: PROMPT}),
            ("POST", path, {"model": MODEL, "input": PROMPT}),
            ("POST", path, {"model": "demo", "input": [PROMPT * 500]}),
            ("POST", path, {"model": "demo", "input": [[MARKS["prompt"]]]}),
            ("POST", path, {"model": "demo", "query": PROMPT, "documents": [PROMPT], "top_n": MARKS["argument"]}),
            ("POST", path, {"model": "demo", "query": PROMPT, "documents": [{MARKS["field"]: PROMPT}]}),
            ("POST", path, {"text": PROMPT, "pooling": MARKS["grammar"]}),
            ("POST", path, {"query": PROMPT + " \ud83d", "contexts": [{"text": PROMPT}]}),
            ("POST", path, {"model": "demo", "input": PROMPT + "x" * 300_000}),
        ]
    return found


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "console"])
async def test_no_text_for_an_encoder_is_in_logs_spans_or_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    model: dict[str, Any] = {"task": "text-embedding", "encoder": EncoderFacts(2, (), "cls", True)}
    statuses: set[int] = set()
    with collected(monkeypatch, as_json=as_json) as telemetry:
        async with world(tmp_path, encoders=QuotingEncoders(), **model) as (gateway, accounts):
            requests = encoder_bodies()
            for start in range(0, len(requests), 8):
                batch = requests[start : start + 8]
                statuses.update(await asyncio.gather(*(send(gateway, *request) for request in batch)))
            await accounts.metering.drain()
        assert statuses >= {200, 400, 404, 408, 413, 429, 500, 503, 504}
        assert "unhandled_exception" in telemetry.log and "POST /v1/embeddings" in telemetry.spans
        assert telemetry.found(*MARKS.values()) == []


@pytest.mark.parametrize("as_json", [True, False], ids=["json", "console"])
async def test_no_token_of_an_answer_and_no_text_of_a_worker_is_in_the_dispatchers_log(
    monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    secret = InvalidRequest(f"the grammar {MARKS['grammar']} is not one")

    async def diverge(worker: ScriptedWorker, attach: Any, submit: Any) -> None:
        attach.accept(submit)
        attach.tokens(submit, len(submit.token_ids) + 7, [987_654_321])

    with collected(monkeypatch, as_json=as_json) as telemetry:
        for behave in (refuse_with(secret), fail_after(2, secret), diverge, fail_after(2, Cancelled("no"))):
            for others in ([], [ScriptedWorker("e", behave=serve_tokens)]):
                async with harness(ScriptedWorker("d", behave=behave), *others) as here:
                    with contextlib.suppress(InvalidRequest, Cancelled, InternalError, Overloaded):
                        await tokens_of(await here.dispatcher.submit(new_request()))
        assert "migration_started" in telemetry.log and "attempt_refused" in telemetry.log
        assert telemetry.found(*MARKS.values(), "987654321", "987_654_321") == []


async def test_made_up_model_names_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 27: after 2,000 names, OpenTelemetry put all models, the real ones too, into one overflow."""
    with collected(monkeypatch, as_json=True) as telemetry:
        async with serve(ScriptedDispatcher(Script([*ids_of("Hello"), 1]))) as gateway:
            for name in ("demo", "@tandem/demo", *(f"made-up-{number}" for number in range(20))):
                await gateway.client.post("/v1/chat/completions", json={**CHAT, "model": name})
        data = json.loads(telemetry.metrics)
    points = [
        point["attributes"]
        for metric in data["resource_metrics"][0]["scope_metrics"][0]["metrics"]
        for point in metric["data"]["data_points"]
    ]
    labels = {point["gen_ai.request.model"] for point in points if "gen_ai.request.model" in point}
    assert labels == {"demo", "@tandem/demo", "unknown"}


async def test_a_request_is_named_by_its_route_and_never_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    with collected(monkeypatch, as_json=True) as telemetry:
        async with serve() as gateway:
            for path in ("/healthz", f"/v1/models/{MARKS['model']}", f"{RUN}/{MODEL}", f"/{MARKS['path']}"):
                await gateway.client.get(path)
            await gateway.client.request("BREW", "/healthz")
    names = {json.loads(line)["name"] for line in _objects(telemetry.spans)}
    assert names == {
        "GET /healthz",
        "GET /v1/models/{model:path}",
        "GET /client/v4/accounts/{account}/ai/run/{model:path}",
        "GET (no route)",
        *({"_OTHER /healthz"} & names),  # the server may refuse such a method before the application sees it
    }


def _objects(text: str) -> list[str]:
    """Split concatenated JSON objects, each of which starts and ends in the first column."""
    return ["{" + part for part in ("\n" + text).split("\n{")[1:]]
