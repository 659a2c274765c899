"""The exceptions of the client.

TandemAPIError                  the server answered with an error; `code` and `message` are the server's
├── RateLimitError              the server is busy, or a quota is used up; `retry_after` is the time to wait
├── NotFoundError               the model is not served
├── AuthenticationError         the token is missing, wrong, or lacks the permission
├── DeadlineExceededError       the server ended the call at its deadline; it is not repeated
├── StreamTruncated             a stream ended without `[DONE]`
└── TandemConnectionError       no answer: nothing listens at the address, or the connection broke
    └── TandemTimeoutError      no answer within the timeout
"""

from __future__ import annotations

import math


class TandemAPIError(Exception):
    """A call failed.

    `status` is the HTTP status. It is None for an error inside a stream, which began with 200, and when there was no
    answer. `code` is Cloudflare's error code (3040: out of capacity), or 0. `retry_after` is in seconds.
    """

    may_repeat = True
    """Whether the call may be sent again; False if the server says that its work was done, and billed."""

    def __init__(self, status: int | None, code: int | str, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, code, message, retry_after)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.code else self.message


class RateLimitError(TandemAPIError):
    """The server is busy, or a quota is used up."""


class NotFoundError(TandemAPIError):
    """The model or resource is not at this address."""


class AuthenticationError(TandemAPIError):
    """The token is missing, wrong, or lacks the permission."""


class DeadlineExceededError(TandemAPIError):
    """The call took longer than its deadline; sent again it would take as long. Ask for fewer tokens, or more time."""

    may_repeat = False


class StreamTruncated(TandemAPIError):
    """A stream ended without `[DONE]`; the text so far is incomplete."""


class TandemConnectionError(TandemAPIError):
    """Nothing listens at the address, or the connection broke before an answer.

    `was_sent`: the request may have run, and may have been billed. Such a call is not repeated.
    """

    was_sent = False


class TandemTimeoutError(TandemConnectionError):
    """There was no answer within the timeout."""


def api_error(status: int | None, code: int | str, message: str, retry_after: float | None = None) -> TandemAPIError:
    """Return the most specific exception for an error of the server."""
    kind = _BY_STATUS.get(_STATUS_OF_CODE.get(code) or status or 0, TandemAPIError)
    return kind(status, code, message, retry_after)


def retry_after_seconds(header: str | None) -> float | None:
    """Return the seconds of a Retry-After header; None if it is absent or a date (RFC 9110, 10.2.3)."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


_BY_STATUS: dict[int, type[TandemAPIError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    408: DeadlineExceededError,
    429: RateLimitError,
    504: DeadlineExceededError,
}

# These codes of Cloudflare have a meaning of their own, whatever the status: an unknown model may have status 400, and
# an error inside a stream has no status.
_STATUS_OF_CODE: dict[int | str, int] = {3007: 408, 3021: 429, 3036: 429, 3040: 429, 3042: 404, 5007: 404, 10000: 401}
