"""Wraps every gRPC call that a server answers.

- Continues the caller's trace and request id.
- Gives a unary call without a deadline the default one.
- Turns a `TandemError` into its status, with the whole error in the trailing metadata.
- Logs any other exception and answers INTERNAL with an incident id.
- Gives the reason to a caller whose call was cut because its certificate expired or was revoked.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from typing import Any, NoReturn

import grpc
import structlog

from tandem_runtime import tracing
from tandem_runtime.calls import DEFAULT_TIMEOUT_SECONDS, REQUEST_ID, TRACEPARENT
from tandem_runtime.certificates.access import reason_of_cut
from tandem_runtime.channel import ERROR_METADATA, call_error
from tandem_runtime.errors import DeadlineExceeded, InternalError, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.loop_lag import name_task

log = get_logger(__name__)

_MAX_DETAILS_CHARACTERS = 500
"""The limit of gRPC's status line; the metadata holds the whole message."""

_MAX_MESSAGE_CHARACTERS = 8000
"""Metadata is limited to 64 KiB (`server._OPTIONS`); a larger message would break the call."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps the handlers of all four kinds of RPC."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        return handler and _wrapped(handler, handler_call_details.method)


def _wrapped(handler: Any, method: str) -> Any:
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(_streaming(inner, method), handler.request_deserializer, handler.response_serializer)
    inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(_unary(inner, method), handler.request_deserializer, handler.response_serializer)


def _unary(inner: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    async def answer(request: Any, context: Any) -> Any:
        _take_up(context, method)
        seconds = DEFAULT_TIMEOUT_SECONDS if context.time_remaining() is None else None
        timeout = asyncio.timeout(seconds)
        try:
            async with timeout:
                return await inner(request, context)
        except asyncio.CancelledError:
            if (reason := _taken_reason_of_cut()) is None:
                raise
            await _abort(context, method, reason)
        except Exception as error:  # noqa: BLE001 - every exception becomes the call's status
            await _abort(context, method, _too_slow(method) if timeout.expired() else error)

    return answer


def _streaming(inner: Callable[..., Any], method: str) -> Callable[..., Awaitable[None]]:
    """Return a handler that writes what `inner` yields.

    It writes each message itself, as gRPC would: so a call that is cut while a slow reader holds up a write ends here,
    with the reason, and `inner` is closed at once.
    """

    async def answer(request: Any, context: Any) -> None:
        _take_up(context, method)
        is_writing = False
        try:
            result = inner(request, context)
            if hasattr(result, "__aiter__"):
                async with _closing(result):
                    async for message in result:
                        is_writing = True
                        await context.write(message)
                        is_writing = False
            else:
                await result  # the handler writes to the context itself
        except asyncio.CancelledError:
            if (reason := _taken_reason_of_cut()) is None:
                raise
            await _abort(context, method, reason)
        except Exception as error:
            if is_writing:
                raise  # gRPC's own: the call or its connection has ended
            await _abort(context, method, error)

    return answer


def _taken_reason_of_cut() -> TandemError | None:
    """Return why this call was cut, and let its task go on to say so; None for any other cancellation."""
    reason = reason_of_cut()
    if reason is not None and (task := asyncio.current_task()) is not None:
        task.uncancel()
    return reason


def _closing(messages: Any) -> AbstractAsyncContextManager[Any]:
    """Close the handler's generator when the call ends, not when the garbage collector finds it."""
    return aclosing(messages) if hasattr(messages, "aclose") else nullcontext()


def _take_up(context: Any, method: str) -> None:
    """Bind the caller's trace and request id to this call's task, and name it. gRPC starts one task for each call."""
    name_task(method)
    metadata = dict(context.invocation_metadata() or ())
    tracing.attach(str(metadata.get(TRACEPARENT, "")))
    if request_id := metadata.get(REQUEST_ID):
        structlog.contextvars.bind_contextvars(request_id=request_id)


async def _abort(context: Any, method: str, error: Exception) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has set the status
    if isinstance(error, grpc.aio.AioRpcError):
        error = call_error(error)
    if not isinstance(error, TandemError):
        error = _incident(method, error)
    detail = error.to_proto()
    detail.message = detail.message[:_MAX_MESSAGE_CHARACTERS]
    trailing = ((ERROR_METADATA, detail.SerializeToString()),)
    await context.abort(error.grpc_status, error.message[:_MAX_DETAILS_CHARACTERS], trailing)
    raise AssertionError("abort always raises")


def _too_slow(method: str) -> DeadlineExceeded:
    return DeadlineExceeded(f"{method} took longer than {DEFAULT_TIMEOUT_SECONDS:g} s; give the call its own deadline")


def _incident(method: str, error: Exception) -> InternalError:
    incident = secrets.token_hex(4)
    log.error("rpc_failed", method=method, incident=incident, exc_info=error)
    return InternalError(f"{method} failed inside; its log has the reason under incident {incident}")
