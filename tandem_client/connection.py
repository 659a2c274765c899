"""The address, token and account of a client, and when a failed call is retried."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from tandem_client.errors import RateLimitError, TandemAPIError, TandemConnectionError, TandemTimeoutError
from tandem_client.wire import is_loopback, request_headers, run_path

DEFAULT_BASE_URL = "http://127.0.0.1:8642"
DEFAULT_TIMEOUT_SECONDS = 600.0
CONNECT_TIMEOUT_SECONDS = 5.0
MAX_RETRIES = 2
MAX_RETRY_DELAY_SECONDS = 8.0
_JITTER = 0.5
"""A retry waits up to so much longer: clients that were refused together do not come back together."""


@dataclass(frozen=True)
class Connection:
    """Address and identity. Defaults: TANDEM_BASE_URL, TANDEM_TOKEN and TANDEM_ACCOUNT."""

    base_url: str
    token: str | None
    account: str

    @classmethod
    def resolve(cls, base_url: str | None, token: str | None, account: str | None) -> Connection:
        url = base_url or os.environ.get("TANDEM_BASE_URL") or DEFAULT_BASE_URL
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {url!r}; it needs http:// or https:// in front")
        account = account or os.environ.get("TANDEM_ACCOUNT") or "default"
        return cls(url.rstrip("/"), token or os.environ.get("TANDEM_TOKEN"), account)

    @property
    def client_options(self) -> dict[str, Any]:
        """Options for an httpx client. A proxy from the environment is not used for this machine."""
        return {"base_url": self.base_url, "trust_env": not is_loopback(self.base_url)}

    def request_options(
        self, model: str, inputs: Mapping[str, Any], extra_headers: Mapping[str, str] | None, timeout: float
    ) -> dict[str, Any]:
        """Return the arguments of httpx's `build_request` for one run."""
        return {
            "method": "POST",
            "url": run_path(self.account, model),
            "json": dict(inputs),
            "headers": request_headers(self.token, extra_headers),
            "timeout": httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT_SECONDS)),
        }

    @property
    def models_options(self) -> dict[str, Any]:
        """Arguments of httpx's `build_request` for the list of models."""
        return {"method": "GET", "url": "/v1/models", "headers": request_headers(self.token, None)}

    def failed(self, error: httpx.TransportError) -> TandemConnectionError:
        """Return the exception for a transport error. Only while connecting is it certain that nothing was sent."""
        failed = self._failed(error)
        failed.was_sent = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        return failed

    def _failed(self, error: httpx.TransportError) -> TandemConnectionError:
        if isinstance(error, httpx.TimeoutException):
            return TandemTimeoutError(None, 0, f"no answer in time from {self.base_url} ({type(error).__name__})")
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError):
            return TandemConnectionError(None, 0, f"no answer from {self.base_url}: {reason}; is Tandem running there?")
        return TandemConnectionError(
            None,
            0,
            f"the connection to {self.base_url} broke before the whole answer was here: {reason}; the call may have "
            "run and is not repeated by itself, because it would be billed twice",
        )


def retry_delay_seconds(
    error: TandemAPIError, num_tries: int, draw: Callable[[], float] = random.random
) -> float | None:
    """Return the seconds to wait before a retry, or None for no retry.

    The wait is that of Retry-After, and up to half as long again.
    Retried are errors that can pass: no connection, too busy, draining. A connection that broke after the call was sent
    is not: the call may have run. Nor is an answer with `x-should-retry: false`: the call's work was done, and billed.
    If the server asks for a longer wait than MAX_RETRY_DELAY_SECONDS, there is no retry, and the caller gets the error
    with `retry_after`. `draw` returns a random number from 0 to 1.
    """
    never_sent = isinstance(error, TandemConnectionError) and not error.was_sent
    passing = isinstance(error, RateLimitError) or never_sent or error.status == 503
    if num_tries > MAX_RETRIES or not passing or not error.may_repeat or isinstance(error, TandemTimeoutError):
        return None
    delay = error.retry_after if error.retry_after is not None else 0.25 * 2**num_tries
    return delay * (1 + _JITTER * draw()) if delay <= MAX_RETRY_DELAY_SECONDS else None
