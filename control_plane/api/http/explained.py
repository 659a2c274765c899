"""Adds a request's explanation, its seams, and the full Server-Timing line of a stream, to the answer.

A whole answer and a stream get the explanation if the request has the header `x-tandem-explain: 1`: a field `tandem` of
the JSON object, or one more event before [DONE]. The line is in a field of a stream's last event, since its header has
only what was known when the stream began. Seams, which few answers have, are in a field `tandem` too: of the whole
answer, or of a stream's last ordinary event. Clients skip fields that they do not know.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from control_plane.api.answer_classes import SeamObject
from control_plane.api.http.request_context import timeline_of
from control_plane.api.http.sse import frame
from control_plane.explain.journal import Journal
from control_plane.explain.server_timing import server_timing
from control_plane.explain.store import document_of

_FRAME_END = b"}\n\n"
_encode = msgspec.json.Encoder().encode


class Explained:
    """What the answer of one HTTP request gets. Use this once the answer has ended."""

    def __init__(self, request: Request) -> None:
        self._timeline = timeline_of(request)

    def in_last(self, frames: bytes, seams: Sequence[SeamObject] = ()) -> bytes:
        """Return frames whose last one, an object, has the durations in the field `server_timing`, and the seams."""
        if not frames.endswith(_FRAME_END):
            return frames
        line = _encode(server_timing(self._timeline))
        found = b',"tandem":' + _encode({"seams": seams}) if seams else b""
        return b'%b,"server_timing":%b%b%b' % (frames[: -len(_FRAME_END)], line, found, _FRAME_END)

    def event(self, base: Mapping[str, Any]) -> bytes:
        """Return the event with the explanation, b"" if the request does not want one; `base` are its other fields."""
        wanted = self._wanted()
        if not wanted:
            return b""
        return self.in_last(frame({**base, "tandem": wanted}))

    def whole(self, body: bytes, seams: Sequence[SeamObject] = ()) -> bytes:
        """Return an answer, a JSON object, with its seams, and the explanation if it is wanted; a list as it is."""
        if not body.endswith(b"}"):
            return body
        wanted = self._wanted()
        if seams:
            wanted["seams"] = seams
        return b'%b,"tandem":%b}' % (body[:-1], _encode(wanted)) if wanted else body

    async def pieces(self, body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces of an answer, the last one as `whole` does."""
        last = b""
        async for piece in body:
            if not piece:
                continue
            if last:
                yield last
            last = piece
        yield self.whole(last)

    def _wanted(self) -> dict[str, Any]:
        if not self._timeline.wants_explanation:
            return {}
        found = [part.explanation for part in self._timeline.parts if isinstance(part, Journal)]
        explanations = [each for each in found if each is not None]
        if not explanations:
            return {}
        first, *others = explanations
        more = {"other_ids": [each.summary.id for each in others]} if others else {}
        return {"explanation": msgspec.Raw(document_of(first)), **more}
