"""What can a call to Tandem raise?

TandemAPIError                  the answer was an error; `code` and `message` are the server's
├── RateLimitError              too busy, or a quota is used up: `retry_after` says when
├── NotFoundError               nothing here serves that model
├── AuthenticationError         the token is missing, wrong, or not allowed this
├── StreamTruncated             a stream broke off before it said that it was done
└── TandemConnectionError       no answer at all: nobody listens there, or the connection broke
    └── TandemTimeoutError      no answer in time
"""

from __future__ import annotations

import math


class TandemAPIError(Exception):
    """A call failed.

    `status` is the HTTP status, or None when no status carried the error: it came inside a stream that had begun with
    200, or nothing was answered. `code` is Cloudflare's error code (3040: out of capacity), 0 where there is none.
    `retry_after` is in seconds.
    """

    def __init__(self, status: int | None, code: int | str, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, code, message, retry_after)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"{self.code}: {self.message}" if self.code else self.message


class RateLimitError(TandemAPIError):
    """Too busy just now, or a quota is used up."""


class NotFoundError(TandemAPIError):
    """Nothing at this address serves what was asked for."""


class AuthenticationError(TandemAPIError):
    """The token is missing, wrong, or does not allow this."""


class StreamTruncated(TandemAPIError):
    """A stream ended without `[DONE]`: what came so far is a beginning, not an answer."""


class TandemConnectionError(TandemAPIError):
    """Nobody listens at the address, or the connection broke before an answer."""


class TandemTimeoutError(TandemConnectionError):
    """Nothing was answered in time."""


def api_error(status: int | None, code: int | str, message: str, retry_after: float | None = None) -> TandemAPIError:
    """Return the most specific exception for an error the server sent."""
    kind = _BY_STATUS.get(_STATUS_OF_CODE.get(code) or status or 0, TandemAPIError)
    return kind(status, code, message, retry_after)


def retry_after_seconds(header: str | None) -> float | None:
    """Read a Retry-After header given in seconds; None where it is absent or a date (RFC 9110, 10.2.3)."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


_BY_STATUS: dict[int, type[TandemAPIError]] = {
    401: AuthenticationError,
    403: AuthenticationError,
    404: NotFoundError,
    429: RateLimitError,
}

# Cloudflare's codes that mean one of the above whatever the status: an unknown model may come with 400, and an error
# inside a stream has no status of its own.
_STATUS_OF_CODE: dict[int | str, int] = {3021: 429, 3036: 429, 3040: 429, 3042: 404, 5007: 404, 10000: 401}
