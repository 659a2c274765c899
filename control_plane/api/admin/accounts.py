"""Endpoints that create, show and change accounts, tokens and limits.

Paths and envelope are Cloudflare's where Cloudflare has them: accounts, account tokens, verify, roll.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from control_plane.accounts.authenticator import Authenticator
from control_plane.accounts.identity import Identity
from control_plane.accounts.limits import Limits
from control_plane.accounts.store import LAST_MS, Account, AccountStore
from control_plane.accounts.tokens import SCOPES, Token, now_ms
from control_plane.api.http.body import Body, Checked, check, refuse_extras
from control_plane.api.http.body_reading import read_json_object
from control_plane.api.http.bounds import MAX_SCOPES, MAX_SHOWN_CHARACTERS
from control_plane.api.http.paging import page_of
from tandem_runtime.errors import InvalidRequest

_ACCOUNTS = "/client/v4/accounts"
_TOKENS = f"{_ACCOUNTS}/{{account}}/tokens"


class LimitsBody(Body):
    """An absent field keeps its limit; null removes the limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None


class AccountBody(Body):
    name: str
    limits: LimitsBody | None = None


class AccountChange(Body):
    limits: LimitsBody | None = None
    disabled: bool | None = None


class TokenBody(Body):
    name: str
    scopes: list[str] = Field(default=["inference", "usage"], max_length=MAX_SCOPES, fail_fast=True)
    expires_on: str | None = None


class Administration:
    """The endpoints. The authentication middleware has already checked the token's scope."""

    def __init__(self, store: AccountStore, authenticator: Authenticator) -> None:
        self._store = store
        self._authenticator = authenticator

    def routes(self) -> list[Route]:
        table: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
            ("GET", "/client/v4/user/tokens/verify", self.verify),
            ("GET", _ACCOUNTS, self.list_accounts),
            ("POST", _ACCOUNTS, self.create_account),
            ("GET", f"{_ACCOUNTS}/{{account}}", self.get_account),
            ("PATCH", f"{_ACCOUNTS}/{{account}}", self.change_account),
            ("GET", f"{_TOKENS}/verify", self.verify),
            ("GET", _TOKENS, self.list_tokens),
            ("POST", _TOKENS, self.create_token),
            ("GET", f"{_TOKENS}/{{token}}", self.get_token),
            ("DELETE", f"{_TOKENS}/{{token}}", self.revoke_token),
            ("PUT", f"{_TOKENS}/{{token}}/value", self.roll_token),
        ]
        return [Route(path, endpoint, methods=[method]) for method, path, endpoint in table]

    async def verify(self, request: Request) -> Response:
        """Answer that the request's own token is valid; the middleware refuses invalid ones."""
        token = _identity(request).token
        assert token is not None, "the middleware refuses this path while no account exists"
        status = {"id": token.id, "status": "active", "expires_on": _time(token.expires_ms)}
        message = {"code": 10000, "message": "This API Token is valid and active", "type": None}
        return _envelope(status, messages=[message])

    async def list_accounts(self, request: Request) -> Response:
        identity = _identity(request)
        accounts: Sequence[Account]
        if identity.is_admin:
            accounts = await self._store.all()
        else:
            accounts = [await self._store.get(identity.account)]
        shown, info = page_of(request, accounts)
        return _envelope([_account_json(account) for account in shown], result_info=info)

    async def create_account(self, request: Request) -> Response:
        body = await _checked(request, AccountBody)
        account = await self._store.create(body.name, Limits(**_limits_in(body.limits)))
        return _envelope(_account_json(account))

    async def get_account(self, request: Request) -> Response:
        return _envelope(_account_json(await self._store.get(request.path_params["account"])))

    async def change_account(self, request: Request) -> Response:
        body = await _checked(request, AccountChange)
        account_id = request.path_params["account"]
        account = await self._store.change(account_id, limits=_limits_in(body.limits), disabled=body.disabled)
        self._authenticator.forget()
        return _envelope(_account_json(account))

    async def list_tokens(self, request: Request) -> Response:
        shown, info = page_of(request, await self._store.tokens_of(request.path_params["account"]))
        return _envelope([_token_json(token) for token in shown], result_info=info)

    async def create_token(self, request: Request) -> Response:
        """Create a token. Only this answer shows its secret."""
        body = await _checked(request, TokenBody)
        expires_ms = _milliseconds("expires_on", body.expires_on)
        account_id = request.path_params["account"]
        token, secret = await self._store.create_token(account_id, body.name, body.scopes, expires_ms)
        return _envelope({**_token_json(token), "value": secret})

    async def get_token(self, request: Request) -> Response:
        token = await self._store.token(request.path_params["account"], request.path_params["token"])
        return _envelope(_token_json(token))

    async def revoke_token(self, request: Request) -> Response:
        token = await self._store.revoke(request.path_params["account"], request.path_params["token"])
        self._authenticator.forget()
        return _envelope({"id": token.id})

    async def roll_token(self, request: Request) -> Response:
        """Replace the token's secret and answer with the new one, as Cloudflare does."""
        _, secret = await self._store.roll(request.path_params["account"], request.path_params["token"])
        self._authenticator.forget()
        return _envelope(secret)


async def _checked(request: Request, kind: type[Checked]) -> Checked:
    body = check(kind, await read_json_object(request))
    refuse_extras(body)
    return body


def _limits_in(body: LimitsBody | None) -> dict[str, int | None]:
    """Return the limits that the body has, by their fields in `Limits`."""
    if body is None:
        return {}
    refuse_extras(body, at="limits.")
    return {f"max_{name}": getattr(body, name) for name in body.model_fields_set & LimitsBody.model_fields.keys()}


def _identity(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


def _account_json(account: Account) -> dict[str, Any]:
    limits = {field.name.removeprefix("max_"): getattr(account.limits, field.name) for field in fields(Limits)}
    return {
        "id": account.id,
        "name": account.id,
        "type": "standard",
        "created_on": _time(account.created_ms),
        "disabled": account.disabled_ms is not None,
        "limits": limits,
    }


def _token_json(token: Token) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "status": token.state(now_ms()),
        "scopes": [scope for scope in SCOPES if scope in token.scopes],
        "issued_on": _time(token.created_ms),
        "expires_on": _time(token.expires_ms),
        "last_used_on": _time(token.used_ms),
    }


def _time(milliseconds: int | None) -> str | None:
    if milliseconds is None:
        return None
    return datetime.fromtimestamp(min(milliseconds, LAST_MS) // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _milliseconds(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        shown = text[:MAX_SHOWN_CHARACTERS]
        raise InvalidRequest(f"{name} is {shown!r}; give a time such as 2027-01-31T00:00:00Z", field=name) from error


def _envelope(result: Any, *, messages: list[Any] | None = None, result_info: Any = None) -> Response:
    info = {} if result_info is None else {"result_info": result_info}
    return JSONResponse({"result": result, "success": True, "errors": [], "messages": messages or [], **info})
