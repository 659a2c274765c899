"""Tables over a stream that is open for something else: the question, and the answer in parts.

    gateway: TableQuestions.ask ──AskTables──▶ answer_parts: service
             TableQuestions.received ◀──TablesPart── one after the other

A part is small, so whatever else goes over the stream waits for one part at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from tandem.v1 import types_pb2 as pb
from tandem.v1.tables_pb2 import TablesReply
from tandem_runtime.errors import DeadlineExceeded, InternalError, TandemError, Unavailable, Unsupported, from_proto
from tandem_runtime.log import get_logger
from tandem_runtime.message_sizes import SERVICES
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

Send = Callable[[pb.AskTables], None]

PART_BYTES = 32_768
MAX_BYTES = SERVICES["tandem.v1.WorkerService"].reply_bytes
"""Of an answer, as of the call `Tables`."""


def answer_parts(question: pb.AskTables, tables: Callable[[int], TablesReply]) -> list[pb.TablesPart]:
    """Return the answer to a question. An error of `tables` is the answer: the stream serves others, and goes on."""
    try:
        data = tables(question.max_rows).SerializeToString()
    except Exception as error:
        log.exception("tables_failed")
        detail = InternalError(f"the tables could not be made: {message_of(error)}").to_proto()
        return [pb.TablesPart(number=question.number, is_last=True, error=detail)]
    starts = range(0, max(1, len(data)), PART_BYTES)
    parts = [pb.TablesPart(number=question.number, data=data[start : start + PART_BYTES]) for start in starts]
    parts[-1].is_last = True
    return parts


@dataclass(eq=False)
class _Open:
    """A question that has not been answered yet."""

    reply: asyncio.Future[TablesReply]
    data: bytearray = field(default_factory=bytearray)


class TableQuestions:
    """The questions of a gateway on its stream to one service: one at a time; all on the event loop."""

    def __init__(self, name: str) -> None:
        """`name`: of the service, in errors."""
        self._name = name
        self._send: Send | None = None
        """Sends a question on the stream that is open now; None: the service does not answer there."""
        self._is_open = False
        """Whether a stream is open, and the service has told whether it answers."""
        self._number = 0
        self._open: _Open | None = None
        self._turn = asyncio.Lock()

    async def ask(self, max_rows: int, seconds: float) -> TablesReply:
        """Return the service's tables, at most `max_rows` of each.

        Raises Unsupported if the service does not answer on its stream, Unavailable if no stream is open, or this one
        ends, DeadlineExceeded after `seconds`, and the error that the service answers with.
        """
        try:
            async with asyncio.timeout(seconds), self._turn:
                return await self._asked(max_rows)
        except TimeoutError:
            raise DeadlineExceeded(f"{self._name} has not sent its tables within {seconds:g} seconds") from None

    @property
    def is_open(self) -> bool:
        """Whether it is known how to ask the service now."""
        return self._is_open

    def opened(self, send: Send | None) -> None:
        """The service has said on a new stream whether it answers: `send` puts a question there; None: it does not."""
        self._is_open, self._send = True, send

    def closed(self) -> None:
        """The stream has ended; so does a question that is open."""
        self._is_open, self._send = False, None
        self._end(Unavailable(f"the stream to {self._name} ended before its tables had come"))

    def received(self, part: pb.TablesPart) -> None:
        """Take in a part; one of a question that nobody waits for any more is dropped."""
        if self._open is None or part.number != self._number:
            return
        if part.HasField("error"):
            self._end(from_proto(part.error))
            return
        data = self._open.data
        data += part.data
        if len(data) > MAX_BYTES:
            self._end(InternalError(f"{self._name} sent more than {MAX_BYTES:,} bytes of tables"))
        elif part.is_last:
            self._answered(data)

    async def _asked(self, max_rows: int) -> TablesReply:
        if not self._is_open:
            raise Unavailable(f"no stream to {self._name} is open")
        if self._send is None:
            raise Unsupported(f"{self._name} does not send tables over its stream")
        self._number += 1
        self._open = _Open(asyncio.get_running_loop().create_future())
        try:
            self._send(pb.AskTables(number=self._number, max_rows=max_rows))
            return await self._open.reply
        finally:
            self._open = None

    def _answered(self, data: bytearray) -> None:
        assert self._open is not None, "only an open question has an answer"
        try:
            reply = TablesReply.FromString(bytes(data))
        except DecodeError as error:
            self._end(InternalError(f"the tables of {self._name} are not readable: {error}"))
        else:
            if not self._open.reply.done():
                self._open.reply.set_result(reply)

    def _end(self, error: TandemError) -> None:
        if self._open is not None and not self._open.reply.done():
            self._open.reply.set_exception(error)
