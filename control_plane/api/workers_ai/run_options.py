"""What may a caller of Workers AI say about a run besides its inputs?

The binding sends the third argument of `AI.run` as `options`; the REST face has `options` in the body, and its clients
write run options into the query too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field
from starlette.requests import Request

from control_plane.api.http.body import Body, check, refuse_extras
from control_plane.api.services import caller_of
from control_plane.text.request import Caller
from tandem_runtime.errors import InvalidRequest, Unsupported

_IGNORED_IN_QUERY = frozenset({"version"})
"""The binding's protocol version."""

_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": None, "undefined": None, "null": None}
"""How clients write options into a query."""

Tag = Annotated[str, Field(max_length=50, pattern=r"^[A-Za-z0-9:\-./@]*$")]


class GatewayOptions(Body):
    """AI Gateway's: there is no gateway with a cache of answers here, so every answer is fresh."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        {"id", "cacheKey", "cacheTtl", "skipCache", "metadata", "collectLog", "eventId", "retries"}
    )

    requestTimeoutMs: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """The request's deadline, if that is sooner than the operator's."""


class RunOptions(Body):
    """Names are Cloudflare's."""

    harmless: ClassVar[frozenset[str]] = frozenset(
        {"returnRawResponse", "prefix", "extraHeaders", "sessionOptions", "signal"}
    )
    """The binding deals with these before it sends anything."""

    rejectIfBusy: bool | None = None
    """429 at once instead of waiting while every worker is busy."""
    queueRequest: Annotated[bool | None, Field(json_schema_extra={"enum": [False, None]})] = None
    """Asynchronous batches are not supported."""
    websocket: Annotated[bool | None, Field(json_schema_extra={"enum": [False, None]})] = None
    """A WebSocket as the answer is not supported."""
    tags: Annotated[list[Tag], Field(max_length=5)] | None = None
    gateway: GatewayOptions | None = None

    def check(self, at: str = "options.") -> None:
        """Refuse by name what is not built; raises InvalidRequest."""
        for name, what in (("queueRequest", "asynchronous batches"), ("websocket", "a WebSocket as the answer")):
            if getattr(self, name):
                raise Unsupported(f"{at}{name} is not supported here ({what}); leave it out", field=f"{at}{name}")

    @property
    def timeout_seconds(self) -> float | None:
        gateway = self.gateway
        return gateway.requestTimeoutMs / 1000 if gateway is not None and gateway.requestTimeoutMs else None


class RunQuery(Body):
    """The run options that a query can carry; each says yes or no."""

    harmless: ClassVar[frozenset[str]] = frozenset({"returnRawResponse", "tags", "gateway"})

    rejectIfBusy: bool | None = None
    queueRequest: bool | None = None
    websocket: bool | None = None


def options_of(value: Any) -> RunOptions:
    """Check the `options` of a call; raises InvalidRequest naming the option."""
    if value is None:
        return RunOptions()
    if not isinstance(value, dict):
        raise InvalidRequest("options must be an object such as {}", field="options")
    options = check(RunOptions, value, at="options.")
    options.check()
    refuse_extras(options, at="options.")
    return options


def options_in_query(query: Mapping[str, str]) -> RunOptions:
    """Check run options that were written into the query; raises InvalidRequest naming the one that is wrong."""
    values = {name: _FLAGS.get(text.lower(), text) for name, text in query.items() if name not in _IGNORED_IN_QUERY}
    said = check(RunQuery, values, at="?")
    refuse_extras(said, at="?")
    options = RunOptions(**said.model_dump(include=set(RunQuery.model_fields)))
    options.check("?")
    return options


def caller_with(request: Request, *options: RunOptions | None) -> Caller:
    """Return who calls, with what any of these options ask for."""
    said = [each for each in options if each is not None]
    timeouts = [each.timeout_seconds for each in said if each.timeout_seconds is not None]
    return replace(
        caller_of(request),
        reject_if_busy=any(each.rejectIfBusy for each in said),
        timeout_seconds=min(timeouts, default=None),
    )
