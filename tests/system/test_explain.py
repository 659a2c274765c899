"""A load over every route: each request's explanation adds up, and agrees with ledger, usage, trace and metrics.

Requests are handed over or local, cached, queued, restarted, migrated, cancelled and refused; chats, completions,
Workers AI, structured output, several prompts, several choices and embeddings; streamed and whole.
`TANDEM_EXPLAIN_REQUESTS` sets how many.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import sqlalchemy as sa

from control_plane.storage.database import Database, database_url
from control_plane.storage.tables import ledger
from tests.system.conftest import SMALL
from tests.system.fleet import Fleet, until
from tests.system.streams import MODEL
from tests.tandem_engine.encoder.checkpoints import make, make_with_head, write_sentence_files
from tests.telemetry import Telemetry, collected

NUM_REQUESTS = int(os.environ.get("TANDEM_EXPLAIN_REQUESTS", "500"))
SECONDS = 120 + NUM_REQUESTS
AT_ONCE = 12
NUM_FLOOD = 40
"""Requests at once, more than the pools of both decode workers hold."""
WORDS = ("the", "a", "model", "cache", "block", "token", "worker", "prompt", "answer", "reads", "finds", "slowly")
BEGINNING = "You are a helpful assistant who knows everything about caches and answers in few words. " * 6
RUN = f"/client/v4/accounts/default/ai/run/{MODEL}"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
KINDS = ("chat", "completion", "native", "structured", "prompts", "choices", "embeddings", "rerank", "leave", "refused")
ENDED = {"finished", "failed", "cancelled"}

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(SECONDS + 60)]


@dataclass
class Asked:
    """One HTTP request, as its client saw it."""

    kind: str
    is_stream: bool = False
    request_id: str = ""
    status: int = 0
    sent_at: float = 0.0
    first_byte_at: float = 0.0
    """When the first piece of the body came."""
    ended_at: float = 0.0
    usage: dict[str, Any] | None = None
    in_answer: dict[str, Any] | None = None
    """The explanation that came with the answer."""
    last_timing: str = ""
    """Server-Timing, of the last event of a stream."""


@dataclass
class Load:
    """All that was asked, and what is known of it."""

    asked: list[Asked] = field(default_factory=list)
    explained: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Data points by name."""
    listed: dict[str, dict[str, Any]] = field(default_factory=dict)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def load(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Load]:
    folder = tmp_path_factory.mktemp("explain")
    embedder, ranker = folder / "tiny-bert", folder / "tiny-ranker"
    make("bert", embedder)
    write_sentence_files(embedder, "pooling_mode_mean_tokens")
    make_with_head("bert", ranker, 1)
    with pytest.MonkeyPatch.context() as patch, collected(patch, as_json=True) as telemetry:
        async with Fleet(folder, local_prefill="auto") as fleet:
            fleet.start("kv", "kv-0")
            for index in range(2):
                fleet.start("prefill", f"prefill-{index}", *SMALL, "--prompt-grants")
                fleet.start("decode", f"decode-{index}", *SMALL)
            fleet.start("encode", "embedder", "--model", str(embedder), "--num-threads", "1")
            fleet.start("encode", "ranker", "--model", str(ranker), "--num-threads", "1")
            await fleet.ready()
            found = Load()
            # Each request on a connection of its own: an idle one might be closed just as it is used again.
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60, limits=limits, trust_env=False) as http:
                await _ask_all(fleet, http, found)
            async with httpx.AsyncClient(base_url=fleet.base_url, timeout=60, trust_env=False) as http:
                await _read_all(fleet, http, found, telemetry, folder)
            yield found


async def _ask_all(fleet: Fleet, http: httpx.AsyncClient, found: Load) -> None:
    chance, turn = random.Random(19), asyncio.Semaphore(AT_ONCE)

    async def one(kind: str, luck: float) -> None:
        async with turn:
            found.asked.append(await _ask(http, kind, random.Random(luck)))

    num_flood = min(NUM_FLOOD, NUM_REQUESTS // 5)
    plans = [(chance.choice(KINDS), chance.random()) for _ in range(NUM_REQUESTS - num_flood - 12)]
    half = len(plans) // 2
    await asyncio.gather(*(one(*plan) for plan in plans[:half]))
    # 1. More at once than the pools hold: some wait in the queue.
    found.asked += await asyncio.gather(*(_long(http, random.Random(seed), 60) for seed in range(num_flood)))
    # 2. A prefill worker dies under prompts that it has accepted.
    found.asked += await _while_dies(fleet, http, "prefill-1", 16, num_there=3)
    # 3. A decode worker dies under its answers.
    found.asked += await _while_dies(fleet, http, "decode-1", 4)
    await asyncio.gather(*(one(*plan) for plan in plans[half:]))


async def _while_dies(fleet: Fleet, http: httpx.AsyncClient, name: str, num: int, num_there: int = 1) -> list[Asked]:
    """Ask while a worker is killed that `num_there` of the requests run at: of prompts one may end just before."""
    worker = fleet.worker(name)
    assert worker is not None
    history = fleet.gateway.requests
    asking: list[asyncio.Task[Asked]] = []

    def has_some() -> bool:
        running = [journal.history for journal in history.running]
        calls = [call for each in running for call in each.calls if call.worker_id == name]
        return (
            sum(bool(call.accepted_at) and call.is_prefill != (call.output_at is not None) for call in calls)
            >= num_there
        )

    def has_some_or_none_runs() -> bool:
        return has_some() or all(task.done() for task in asking)

    for _ in range(20):
        seeds = range(len(asking), len(asking) + num)
        asking += [asyncio.create_task(_long(http, random.Random(f"{name}-{seed}"), 150)) for seed in seeds]
        await until(has_some_or_none_runs, 30, lambda: fleet.tails([name]))
        if has_some():
            break  # else all ended between two looks
    assert has_some(), f"{name} got none of {len(asking)} requests: {fleet.tails([name])}"
    fleet.services[name].kill(signal.SIGKILL)
    await fleet.ended(fleet.services.pop(name))
    return list(await asyncio.gather(*asking))


async def _long(http: httpx.AsyncClient, chance: random.Random, max_tokens: int) -> Asked:
    """Stream an answer to a prompt that no cache has."""
    body = {
        "model": MODEL,
        "prompt": _words(chance, 180),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    return await _stream(http, Asked("long", is_stream=True), "/v1/completions", body)


async def _ask(http: httpx.AsyncClient, kind: str, chance: random.Random) -> Asked:
    path, body = _body(kind, chance)
    asked = Asked(kind, is_stream=kind == "leave" or ("stream" in body and chance.random() < 0.5))
    if asked.is_stream:
        if path != RUN:
            body["stream_options"] = {"include_usage": True}
        return await _stream(http, asked, path, body, leave=kind == "leave")
    body.pop("stream", None)
    return await _whole(http, asked, path, body)


def _body(kind: str, chance: random.Random) -> tuple[str, dict[str, Any]]:
    text = (BEGINNING if chance.random() < 0.5 else "") + _words(chance, chance.randint(1, 60))
    most = chance.randint(1, 8)
    common = {"model": MODEL, "max_tokens": most, "seed": chance.getrandbits(32), "stream": True}
    messages = [{"role": "user", "content": text}]
    match kind:
        case "chat":
            return "/v1/chat/completions", {**common, "messages": messages}
        case "completion":
            return "/v1/completions", {**common, "prompt": text}
        case "native":
            return RUN, {"prompt": text, "max_tokens": most, "stream": True}
        case "structured":
            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
            return "/v1/chat/completions", {**common, "messages": messages, "max_tokens": 24, "response_format": form}
        case "prompts":
            return "/v1/completions", {**common, "prompt": [text, _words(chance, 9)]}
        case "choices":
            return "/v1/completions", {**common, "prompt": text, "n": 3}
        case "leave":
            return "/v1/completions", {**common, "prompt": text, "max_tokens": 60, "ignore_eos": True}
        case "embeddings":
            return "/v1/embeddings", {"model": "tiny-bert", "input": ["some text", "another text about caches"]}
        case "rerank":
            return "/v1/rerank", {"model": "tiny-ranker", "query": "cache", "documents": ["a", "a cache"]}
    return "/v1/completions", {**common, "prompt": text, "model": "no-such-model"}


def _words(chance: random.Random, num: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(num))


async def _whole(http: httpx.AsyncClient, asked: Asked, path: str, body: dict[str, Any]) -> Asked:
    asked.sent_at = time.perf_counter()
    answer = await http.post(path, json=body, headers={"x-tandem-explain": "1"})
    asked.ended_at = time.perf_counter()
    asked.request_id, asked.status = answer.headers["x-request-id"], answer.status_code
    asked.last_timing = answer.headers["server-timing"]
    value = answer.json()
    if asked.status == 200:
        asked.usage = value["result"]["usage"] if path == RUN else value["usage"]
        asked.in_answer = value["tandem"]["explanation"]
    return asked


async def _stream(
    http: httpx.AsyncClient, asked: Asked, path: str, body: dict[str, Any], *, leave: bool = False
) -> Asked:
    asked.sent_at = time.perf_counter()
    events: list[dict[str, Any]] = []
    headers = {"x-tandem-explain": "1"}
    async with http.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
        asked.request_id, asked.status = answer.headers["x-request-id"], answer.status_code
        if asked.kind == "refused":
            asked.last_timing = answer.headers["server-timing"]
            return asked
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            asked.first_byte_at = asked.first_byte_at or time.perf_counter()
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                assert "error" not in events[-1], line
            if leave and len(events) >= 3:
                return asked
    asked.ended_at = time.perf_counter()
    *_, last, explained = events
    asked.last_timing, asked.in_answer = last["server_timing"], explained["tandem"]["explanation"]
    asked.usage = last["usage"]
    return asked


async def _read_all(fleet: Fleet, http: httpx.AsyncClient, found: Load, telemetry: Telemetry, folder: Path) -> None:
    """Read ledger, explanations, list, spans and metrics once every request has ended."""
    await until(lambda: fleet.gateway.requests.num_running == 0, 30)
    await fleet.gateway.requests.drain()
    database = Database(database_url("", folder / "state"))
    try:
        async with database.each() as connection:
            rows = await connection.execute(sa.select(ledger))
        found.rows = {row.request_id: row for row in rows}
    finally:
        await database.close()
    answer = await http.get("/v1/requests", params={"limit": 500})
    found.listed = {row["id"]: row for row in answer.json()["data"]}
    ids = {asked.request_id for asked in found.asked} | set(found.rows)
    for request_id in sorted(ids):
        answer = await http.get(f"/v1/requests/{request_id}/explain")
        assert answer.status_code == 200, (request_id, answer.text)
        found.explained[request_id] = answer.json()
    found.spans = [json.loads(span) for span in _objects(telemetry.spans)]
    scopes = json.loads(telemetry.metrics)["resource_metrics"][0]["scope_metrics"]
    found.metrics = {metric["name"]: metric["data"]["data_points"] for scope in scopes for metric in scope["metrics"]}


def _objects(text: str) -> list[str]:
    """Return the JSON objects of a text, in which each begins and ends on lines of its own."""
    return [f"{{{part}}}" for part in text.removeprefix("{").removesuffix("}").split("}\n{")]


# --------------------------------------------------------------------------------------------------------------- laws


async def test_the_load_took_every_route(load: Load) -> None:
    explained = load.explained.values()
    assert Counter(each["state"] for each in explained).keys() == ENDED
    assert {each["route"]["mode"] for each in explained if each["route"]} == {"handed_over", "local"}
    assert {move["kind"] for each in explained for move in each["moves"]} == {"hand_over", "migration", "restart"}
    named = {segment["name"] for each in explained for segment in each["segments"]}
    assert named >= {"body", "text_wait", "text", "limits", "queue", "route", "submit", "worker_queue", "prefill"}
    assert named >= {"transport", "detokenize", "write"}
    assert any(each["cached_tokens"] for each in explained)
    assert {each["operation"] for each in explained} == {"chat", "text_completion", "embeddings", "rerank"}
    assert {asked.kind for asked in load.asked} == {*KINDS, "long"}
    assert {asked.is_stream for asked in load.asked} == {True, False}


async def test_each_half_shows_what_its_worker_had_granted(load: Load) -> None:
    by_mode: dict[str, list[Any]] = {"handed_over": [], "local": []}
    for each in load.explained.values():
        if (
            each["state"] == "finished"
            and each["admission"]
            and not any(m["kind"] != "hand_over" for m in each["moves"])
        ):
            by_mode[each["route"]["mode"]].append(each["admission"])
    assert any(admission["grant"] and admission["prefill_grant"] for admission in by_mode["handed_over"])
    assert any(admission["grant"] for admission in by_mode["local"])
    assert not any(admission["prefill_grant"] for admission in by_mode["local"])


async def test_segments_follow_each_other_and_sum_to_the_time_to_the_first_token(load: Load) -> None:
    """Within 2 % or 0.5 ms, with what no segment has counted as error."""
    num_checked = 0
    for each in load.explained.values():
        if each["state"] != "finished":
            continue
        num_checked += 1
        whole = each["duration_ms"] if each["ttft_ms"] is None else each["ttft_ms"]
        total = sum(segment["duration_ms"] for segment in each["segments"])
        assert abs(whole - total) <= max(0.5, 0.02 * whole), each
        assert abs(each["unexplained_ms"]) <= max(0.5, 0.02 * whole), each
        at = 0.0
        for segment in each["segments"]:
            assert segment["duration_ms"] >= 0 and segment["start_ms"] == pytest.approx(at, abs=0.05), each
            at = segment["start_ms"] + segment["duration_ms"]
    assert num_checked >= 0.56 * NUM_REQUESTS, "280 of the 500"


async def test_the_worker_that_brought_the_first_token_has_its_own_segment(load: Load) -> None:
    """No segment hides another's time: queue and prefill are those of the worker's ledger."""
    for each in load.explained.values():
        if each["state"] != "finished" or any(move["kind"] != "hand_over" for move in each["moves"]):
            continue
        names = [segment["name"] for segment in each["segments"]]
        assert names[:1] == ["body"] and "prefill" in names and "text" in names, each
        (prefill,) = [segment for segment in each["segments"] if segment["name"] == "prefill"]
        role = "encode" if each["operation"] in ("embeddings", "rerank") else prefill["process"]
        assert prefill["process"] == role and prefill["worker"], each
        phases = [phase for phase in each["phases"] if phase["worker"] == prefill["worker"]]
        kinds = ("encode",) if role == "encode" else ("prefill", "decode")
        longest = max(phase["duration_ms"] for phase in phases if phase["name"] in kinds)
        assert prefill["duration_ms"] <= longest + 0.01, each


async def test_nothing_is_explained_that_the_client_did_not_wait_for(load: Load) -> None:
    for asked in load.asked:
        each = load.explained[asked.request_id]
        mine = [each for key, each in load.explained.items() if key.startswith(asked.request_id)]
        firsts = [each["ttft_ms"] for each in mine if each["ttft_ms"] is not None]
        if asked.first_byte_at and firsts:  # of two prompts, either may have the first text
            assert min(firsts) <= 1000 * (asked.first_byte_at - asked.sent_at), mine
        if asked.ended_at:
            assert each["duration_ms"] <= 1000 * (asked.ended_at - asked.sent_at), each


async def test_the_answer_had_the_explanation_and_the_durations(load: Load) -> None:
    for asked in load.asked:
        each = load.explained[asked.request_id]
        if asked.in_answer is not None:
            assert asked.in_answer == each
        if asked.last_timing and each["state"] == "finished":
            shown = dict(part.split(";dur=") for part in asked.last_timing.split(", "))
            total = shown.pop("total")
            sums: dict[str, float] = {}
            for segment in each["segments"]:
                sums[segment["name"]] = sums.get(segment["name"], 0.0) + segment["duration_ms"]
            assert {name: float(ms) for name, ms in shown.items()} == pytest.approx(sums, abs=0.01)
            assert float(total) >= sum(sums.values()) - 0.01
        assert asked.kind == "leave" or asked.last_timing


async def test_explanation_ledger_and_usage_agree(load: Load) -> None:
    same = {
        "prompt_tokens": "num_prompt_tokens",
        "computed_tokens": "num_computed_tokens",
        "cached_tokens": "num_cached_tokens",
        "pool_tokens": "num_pool_tokens",
        "store_tokens": "num_store_tokens",
        "remote_tokens": "num_remote_tokens",
        "completion_tokens": "num_completion_tokens",
        "reprefill_tokens": "num_reprefill_tokens",
        "bytes_moved": "num_bytes_moved",
        "prefill_us": "prefill_us",
        "decode_us": "decode_us",
        "microneurons": "microneurons",
        "seams": "num_seams",
    }
    assert load.rows.keys() == {key for key, each in load.explained.items() if each["error"] != "ModelNotFound"}
    for request_id, row in load.rows.items():
        each = load.explained[request_id]
        assert each["usage"] == {ours: getattr(row, column) for ours, column in same.items()}
        assert (each["state"], each["error"], each["model"]) == (row.status, row.error, row.model)
        assert " ".join(each["finish_reasons"]) == row.finish_reasons and each["account"] == row.account
        assert each["gateway"] == row.gateway
    for asked in load.asked:
        if asked.usage is None:
            continue
        mine = [each["usage"] for key, each in load.explained.items() if key.startswith(asked.request_id)]
        assert len(mine) == (2 if asked.kind == "prompts" else 1)
        assert asked.usage["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in mine)
        assert asked.usage.get("completion_tokens", 0) == sum(usage["completion_tokens"] for usage in mine)
        if details := asked.usage.get("prompt_tokens_details"):
            assert details["cached_tokens"] == sum(usage["cached_tokens"] for usage in mine)
        if "neurons" in asked.usage:
            assert asked.usage["neurons"] == pytest.approx(sum(usage["microneurons"] for usage in mine) / 1e6)


async def test_explanation_and_trace_agree(load: Load) -> None:
    spans = {span["attributes"]["tandem.request_id"]: span for span in load.spans if _is_server(span)}
    for asked in load.asked:
        each, span = load.explained[asked.request_id], spans[asked.request_id]
        attributes = span["attributes"]
        assert span["context"]["trace_id"] == f"0x{each['trace_id']}"
        assert attributes["gen_ai.operation.name"] == each["operation"]
        assert attributes.get("gen_ai.response.model", "") == each["model"]
        assert ("error.type" in attributes) == (each["state"] != "finished"), (attributes, each)
        if each["state"] == "finished" and asked.kind != "prompts":  # the span has the last prompt's figures
            usage = each["usage"]
            assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
            assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
            assert attributes["gen_ai.usage.cache_read.input_tokens"] == usage["cached_tokens"]
            assert list(attributes["gen_ai.response.finish_reasons"]) == _each_reason(each, attributes)


def _is_server(span: dict[str, Any]) -> bool:
    return "tandem.request_id" in span["attributes"]


def _each_reason(each: dict[str, Any], attributes: dict[str, Any]) -> list[str]:
    """Return the reasons of all choices, of which the ledger has each kind once."""
    reasons = list(attributes["gen_ai.response.finish_reasons"])
    assert list(dict.fromkeys(reasons)) == each["finish_reasons"]
    return reasons


async def test_explanation_and_metrics_agree(load: Load) -> None:
    explained = list(load.explained.values())

    def total(name: str, **labels: str) -> float:
        points = [point for point in load.metrics.get(name, []) if labels.items() <= point["attributes"].items()]
        return float(sum(point.get("value", point.get("sum", 0.0)) for point in points))

    def count(name: str, **labels: str) -> int:
        points = [point for point in load.metrics.get(name, []) if labels.items() <= point["attributes"].items()]
        return sum(point["count"] for point in points)

    for kind, column in (
        ("input", "computed_tokens"),
        ("cached_input", "cached_tokens"),
        ("output", "completion_tokens"),
    ):
        assert total("tandem.tokens", type=kind) == _sum(explained, column)
    for tier in ("pool", "store", "remote"):
        assert total("tandem.cache.hit_tokens", tier=tier) == _sum(explained, f"{tier}_tokens")
    assert count("gen_ai.server.request.duration") == len(explained)
    durations = sum(each["duration_ms"] for each in explained) / 1000
    assert total("gen_ai.server.request.duration") == pytest.approx(durations, abs=1e-6 * len(explained))
    firsts = [each["ttft_ms"] / 1000 for each in explained if each["ttft_ms"] is not None]
    assert count("gen_ai.server.time_to_first_token") == len(firsts)
    assert total("gen_ai.server.time_to_first_token") == pytest.approx(sum(firsts), abs=1e-6 * len(firsts))
    waits = [_segment(each, "queue") / 1000 for each in explained if each["route"]]
    assert total("tandem.queue.wait") == pytest.approx(sum(waits), abs=1e-6 * len(explained))
    for mode in ("handed_over", "local"):
        routes = [each["route"] for each in explained if each["route"] and each["route"]["mode"] == mode]
        assert total("tandem.route.decisions", mode=mode) == len(routes)
    moves = [move for each in explained for move in each["moves"]]
    assert total("tandem.hand_over.size") == sum(move["num_bytes"] for move in moves if move["kind"] == "hand_over")
    assert total("tandem.migrations") == sum(move["kind"] != "hand_over" for move in moves)
    assert total("tandem.refusals", cause="ModelNotFound") == sum(
        each["error"] == "ModelNotFound" for each in explained
    )


def _sum(explained: Sequence[dict[str, Any]], column: str) -> int:
    return sum(each["usage"][column] for each in explained)


def _segment(each: dict[str, Any], name: str) -> float:
    return sum(float(segment["duration_ms"]) for segment in each["segments"] if segment["name"] == name)


async def test_what_moved_is_in_the_moves_and_the_cost(load: Load) -> None:
    for each in load.explained.values():
        handed = [move for move in each["moves"] if move["kind"] == "hand_over"]
        if each["state"] == "finished":
            assert sum(move["num_bytes"] for move in handed) == each["usage"]["bytes_moved"], each
        for move in each["moves"]:
            assert move["from"] and move["to"] and move["why"], each
            assert move["duration_ms"] >= 0
        outcomes = [attempt["outcome"] for attempt in (each["route"] or {"attempts": []})["attempts"]]
        assert each["state"] != "finished" or not outcomes or outcomes[-1] == "accepted", each


async def test_the_list_has_the_newest_rows_and_the_same_values(load: Load) -> None:
    newest = sorted(load.explained.values(), key=lambda each: -each["started_ms"])[: len(load.listed)]
    assert len(load.listed) == min(500, len(load.explained))
    assert {row["started_ms"] for row in load.listed.values()} == {each["started_ms"] for each in newest}
    for request_id, row in load.listed.items():
        assert row == {name: load.explained[request_id][name] for name in row}
