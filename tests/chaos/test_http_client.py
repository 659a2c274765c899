"""Tests of the client that judges streams: what is cut off must not look finished, and who is refused comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence

import httpx

from tests.chaos.embeddings import EmbeddingQuestion
from tests.chaos.http_client import HttpQuestion, HttpStreamRecord, send_over_http
from tests.chaos.http_gateway import Conditions, HttpGateway

QUESTION = HttpQuestion({}, ("abcd",), ("length",), 4, 7)
USAGE = {"prompt_tokens": 7, "completion_tokens": 4}


def event(text: str, finish_reason: str | None = None) -> str:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


LAST = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n"
WHOLE = [event("ab"), event("cd", "length"), LAST, "data: [DONE]\n\n"]


class Killed(HttpGateway):
    """One that may break streams."""

    def may_lose(self, life: int, *, has_head: bool) -> bool:
        return True


def gateway(
    *answers: httpx.Response, is_killed: bool = False, is_overloaded: bool = False
) -> tuple[HttpGateway, list[httpx.Response]]:
    """Return a gateway that gives these answers, and those that it has not given yet."""
    left = list(answers)
    http = httpx.AsyncClient(base_url="http://gateway", transport=httpx.MockTransport(lambda request: left.pop(0)))
    kind = Killed if is_killed else HttpGateway
    return kind("gateway-a", http, Conditions(lambda since: False, lambda since: is_overloaded)), left


def stream(events: Sequence[str], *, breaks: bool = False) -> httpx.Response:
    async def body() -> AsyncIterator[bytes]:
        for each in events:
            yield each.encode()
        if breaks:
            raise httpx.ReadError("the connection was reset")

    return httpx.Response(200, headers={"x-request-id": f"request-{len(events)}"}, content=body())


async def sent(*gateways: HttpGateway) -> HttpStreamRecord:
    record = HttpStreamRecord(QUESTION)
    await send_over_http(gateways, record)
    return record


async def test_a_whole_answer_is_compared_with_text_reason_and_usage() -> None:
    assert (await sent(gateway(stream(WHOLE))[0])).failure == ""
    assert "undisturbed" in (await sent(gateway(stream([event("abcx", "length"), *WHOLE[2:]]))[0])).failure
    assert "undisturbed" in (await sent(gateway(stream([*WHOLE[:2], WHOLE[3]]))[0])).failure


async def test_an_answer_that_is_not_streamed_is_compared_too() -> None:
    for text, is_right in (("abcd", True), ("abxx", False)):
        choice = {"index": 0, "text": text, "finish_reason": "length"}
        record = HttpStreamRecord(QUESTION, is_streamed=False)
        http = gateway(httpx.Response(200, json={"choices": [choice], "usage": USAGE}))[0]
        await send_over_http([http], record)
        assert (record.failure == "") is is_right


async def test_vectors_are_compared_bit_by_bit_with_those_of_each_text_alone() -> None:
    question = EmbeddingQuestion({}, (), (), 0, 7, ("AAAA", "AAAB"))
    for vectors, num_tokens, failure in (
        (["AAAA", "AAAB"], 7, ""),
        (["AAAB", "AAAA"], 7, "vectors [0, 1] differ"),
        (["AAAA"], 7, "1 vectors for 2 texts"),
        (["AAAA", "AAAB"], 8, "8 tokens, not 7"),
    ):
        data = [{"index": index, "embedding": vector} for index, vector in enumerate(vectors)]
        record = HttpStreamRecord(question, is_streamed=False)
        answer = httpx.Response(200, json={"data": data, "usage": {"prompt_tokens": num_tokens}})
        await send_over_http([gateway(answer)[0]], record)
        assert record.failure.startswith(failure) and bool(record.failure) is bool(failure)


async def test_a_stream_that_ends_early_without_an_error_is_a_failure_wherever_it_ends() -> None:
    record = await sent(gateway(stream(WHOLE[:1]), is_killed=True)[0])
    assert record.failure == "the stream ended without [DONE] after 1 events"


async def test_what_a_killed_gateway_has_sent_is_the_beginning_and_the_client_asks_the_next_one() -> None:
    first, other = gateway(stream(WHOLE[:1], breaks=True), is_killed=True)[0], gateway(stream(WHOLE))[0]
    record = await sent(first, other)
    assert (record.failure, record.broken_ids, record.request_id) == ("", ["request-1"], "request-4")


async def test_a_stream_that_is_cut_off_with_other_text_or_as_if_finished_is_a_failure() -> None:
    for events in ([event("ax")], [event("ab", "length")]):
        record = await sent(gateway(stream(events, breaks=True), is_killed=True)[0])
        assert record.failure.startswith("cut off with")


async def test_a_stream_breaks_only_where_a_gateway_was_killed() -> None:
    record = await sent(gateway(stream(WHOLE[:1], breaks=True))[0])
    assert "after its head and 1 events" in record.failure


async def test_a_client_comes_back_after_429_in_a_burst_only_and_only_with_retry_after() -> None:
    refusal = httpx.Response(429, headers={"retry-after": "0"}, text="full")
    burst, left = gateway(refusal, stream(WHOLE), is_overloaded=True)
    record = await sent(burst)
    assert (record.failure, record.num_overloaded, left) == ("", 1, [])
    assert "429" in (await sent(gateway(refusal)[0])).failure
    unnamed = gateway(httpx.Response(429, text="full"), is_overloaded=True)[0]
    assert "retry-after None" in (await sent(unnamed)).failure
