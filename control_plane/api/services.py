"""What do the endpoints work with, and who is calling?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from starlette.requests import Request

from control_plane.accounts.gate import Identity
from control_plane.accounts.prices import Price
from control_plane.generation import ModelCatalog
from control_plane.text.request import Caller
from control_plane.text.text_service import TextService
from tandem_runtime.errors import InvalidRequest

MAX_ACCOUNT_CHARACTERS = 64


class Readiness(Protocol):
    async def check(self) -> tuple[bool, dict[str, Any]]:
        """Return whether a request has really gone the whole way lately, and what is known about it."""


class FleetView(Protocol):
    def workers(self) -> list[dict[str, Any]]:
        """Return every worker with its state, load and memory, as plain JSON values."""


@dataclass(frozen=True)
class HttpSettings:
    max_body_bytes: int = 10 * 1024 * 1024
    ping_seconds: float = 15.0
    """Silence on an OpenAI stream after which a comment keeps proxies from closing it."""
    operator_token: str = ""
    """What `tandem up`, which has started this, asks for the fleet with; "": nothing."""


@dataclass(frozen=True)
class Services:
    text: TextService
    catalog: ModelCatalog
    fleet: FleetView
    readiness: Readiness
    settings: HttpSettings
    price_of: Callable[[str], Price] | None = None
    """What a model costs, by the id that its worker serves; None: nothing is counted here."""


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)


def request_id_of(request: Request) -> str:
    return cast(str, request.state.request_id)


def check_name(name: str, text: str, max_characters: int) -> None:
    """Raise InvalidRequest for what can be no account's or model's name, before any database is asked for it."""
    if len(text) > max_characters or not text.isprintable():
        raise InvalidRequest(
            f"{name} is {text[:max_characters]!r}; a name has up to {max_characters} printable characters", field=name
        )


def caller_of(request: Request) -> Caller:
    """Return who calls; raises InvalidRequest for an account that none can have."""
    identity = getattr(request.state, "identity", None) or Identity(request.path_params.get("account", "default"))
    check_name("account", identity.account, MAX_ACCOUNT_CHARACTERS)
    return Caller(
        request_id=request_id_of(request),
        account=identity.account,
        identity=identity,
        answer_headers=getattr(request.state, "answer_headers", {}),
        session_affinity=request.headers.get("x-session-affinity", ""),
    )
