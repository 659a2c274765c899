"""Every seal reaches the KV service once it is reachable, with the stream or without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tandem.v1 import kv_transfer_pb2 as kv
from tandem.v1 import types_pb2 as pb
from tandem_runtime.errors import DeadlineExceeded, InvalidRequest, Unavailable
from tandem_runtime.kv.seal_stream import SealStream, seal_request


class Stream:
    """Answers with what it is given, in order; errors are raised, and without an answer nothing comes."""

    def __init__(self, *answers: object, breaks_at_write: bool = False) -> None:
        self.written: list[kv.SealRequest] = []
        self.is_cancelled = False
        self._answers = list(answers)
        self._breaks_at_write = breaks_at_write

    async def write(self, request: kv.SealRequest) -> None:
        if self._breaks_at_write:
            raise Unavailable("the service went away")
        self.written.append(request)

    async def read(self) -> Any:
        if not self._answers:
            await asyncio.get_running_loop().create_future()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def cancel(self) -> None:
        self.is_cancelled = True


class Calls:
    def __init__(self) -> None:
        self.requests: list[kv.SealRequest] = []

    async def __call__(self, request: kv.SealRequest) -> kv.SealReply:
        self.requests.append(request)
        return kv.SealReply(state=kv.HANDLE_STATE_SEALED)


FIRST = seal_request(pb.KvHandle(handle_id=b"h"), [kv.Slab(index=0)], None)
LAST = seal_request(pb.KvHandle(handle_id=b"h"), [], kv.Closed(num_blocks=1, first_tokens=[kv.FirstToken(token_id=7)]))
FILLING, SEALED = (kv.SealReply(state=state) for state in (kv.HANDLE_STATE_FILLING, kv.HANDLE_STATE_SEALED))


async def states(line: SealStream) -> Sequence[int]:
    return [(await line.seal(request)).state for request in (FIRST, LAST)]


async def test_all_seals_of_a_handle_take_one_stream() -> None:
    stream, calls = Stream(FILLING, SEALED), Calls()
    line = SealStream(lambda: stream, calls, 5)
    assert await states(line) == [kv.HANDLE_STATE_FILLING, kv.HANDLE_STATE_SEALED]
    assert stream.written == [FIRST, LAST] and calls.requests == []
    assert LAST.close and LAST.num_blocks == 1 and LAST.first_tokens[0].token_id == 7
    line.close()
    assert stream.is_cancelled


@pytest.mark.parametrize(
    "stream",
    [Stream(FILLING, Unavailable("gone")), Stream(FILLING, grpc.aio.EOF), Stream(breaks_at_write=True)],
    ids=["broken under way", "ended", "broken before"],
)
async def test_once_the_stream_is_broken_seals_are_calls(stream: Stream) -> None:
    calls = Calls()
    line = SealStream(lambda: stream, calls, 5)
    await states(line)
    num_before = len(calls.requests)
    await line.seal(LAST)
    assert calls.requests[-2:] == [LAST, LAST] and len(calls.requests) == num_before + 1


async def test_a_refusal_is_raised_and_not_asked_again() -> None:
    calls = Calls()
    line = SealStream(lambda: Stream(InvalidRequest("slab 0 is sealed and cannot change")), calls, 5)
    with pytest.raises(InvalidRequest, match="slab 0 is sealed"):
        await line.seal(FIRST)
    assert calls.requests == []


async def test_a_service_that_is_silent_is_a_typed_error() -> None:
    with pytest.raises(DeadlineExceeded, match=r"not answered a seal for 0\.01 s"):
        await SealStream(lambda: Stream(), Calls(), 0.01).seal(FIRST)
