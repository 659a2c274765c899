"""Asks a gateway for JSON, with the errors that commands print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from tandem_client.connection import Connection
from tandem_client.errors import TandemAPIError
from tandem_client.wire import error_of

_TIMEOUT_SECONDS = 5.0
_LONG_TIMEOUT_SECONDS = 15.0
"""For what the gateway asks a worker, which it waits for."""


def get_json(url: str | None, path: str, parameters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the answer of `GET path`. Raise TandemAPIError, also if the gateway cannot be reached."""
    return _ask("GET", url, path, parameters or {}, _TIMEOUT_SECONDS)


def post_json(url: str | None, path: str) -> dict[str, Any]:
    """Return the answer of `POST path`, without a body. Raise TandemAPIError, also without a gateway."""
    return _ask("POST", url, path, {}, _LONG_TIMEOUT_SECONDS)


def _ask(
    method: str, url: str | None, path: str, parameters: Mapping[str, str], timeout_seconds: float
) -> dict[str, Any]:
    connection = Connection.resolve(url, None, "default")
    options = connection.models_options | {"method": method, "url": path, "params": dict(parameters)}
    with httpx.Client(timeout=timeout_seconds, **connection.client_options) as client:
        try:
            answer = client.send(client.build_request(**options))
        except httpx.TransportError as error:
            raise connection.failed(error) from error
    if not answer.is_success:
        raise error_of(answer.status_code, answer.headers, answer.content)
    document: dict[str, Any] = answer.json()
    return document


def names_of_workers(url: str | None) -> dict[str, str]:
    """Return the name of each worker by its id; {} for a token that may not see the fleet."""
    try:
        rows = get_json(url, "/v1/workers")["data"]
    except TandemAPIError:
        return {}
    return {row["id"]: row.get("name") or row["id"] for row in rows}
