"""Reads and changes accounts and tokens in the database."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Generic, TypeVar

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.accounts.errors import AlreadyThere, NoSuchThing
from control_plane.accounts.limits import NO_LIMITS, Limits
from control_plane.accounts.tokens import SCOPES, Scope, Token, checked_scopes, digest_of, new_secret, now_ms
from control_plane.storage.database import Database
from control_plane.storage.tables import accounts, tokens
from tandem_runtime.errors import InternalError, InvalidRequest, TandemError
from tandem_runtime.log import get_logger
from tandem_runtime.tracebacks import message_of

log = get_logger(__name__)

T = TypeVar("T")

_MAX_TOGETHER = 256
_ACCOUNT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_NAME_CHARACTERS = 128
_MINUTE_MS = 60_000
LAST_MS = 253_402_300_799_999
"""The last millisecond of the year 9999 in UTC, the latest time that can be formatted."""


@dataclass(frozen=True)
class Account:
    id: str
    created_ms: int
    disabled_ms: int | None = None
    limits: Limits = NO_LIMITS


@dataclass(frozen=True)
class Holder:
    """A token and its account."""

    token: Token
    account: Account


class AccountStore:
    """Accounts and tokens in the database. All methods raise Unavailable while it cannot be reached."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lookup = Lookup(self._find_all)

    # ------------------------------------------------------------------------------------------------ accounts

    async def create(self, account_id: str, limits: Limits = NO_LIMITS) -> Account:
        """Create an account. Its id never changes: cached blocks are salted with it. Raise AlreadyThere."""
        if not _ACCOUNT.fullmatch(account_id):
            raise InvalidRequest(
                f"{account_id!r} is not a name for an account; use up to 64 letters, digits, dots, dashes and "
                "underscores, starting with a letter or digit",
                field="name",
            )
        made = Account(account_id, now_ms(), limits=limits)
        try:
            async with self._database.begin() as connection:
                values = {"id": account_id, "created_ms": made.created_ms, **vars(limits)}
                await connection.execute(sa.insert(accounts).values(values))
        except IntegrityError as error:
            raise AlreadyThere(f"account {account_id} already exists; choose another name", field="name") from error
        return made

    async def all(self) -> list[Account]:
        async with self._database.each() as connection:
            rows = (await connection.execute(sa.select(accounts).order_by(accounts.c.id))).mappings()
            return [_account(row) for row in rows]

    async def get(self, account_id: str) -> Account:
        """Return an account. Raise NoSuchThing."""
        wanted = sa.select(accounts).where(accounts.c.id == account_id)
        row = await self._database.run(lambda connection: connection.execute(wanted).mappings().first(), single=True)
        if row is None:
            raise _no_account(account_id)
        return _account(row)

    async def exists_any(self) -> bool:
        any_one = sa.select(accounts.c.id).limit(1)
        row = await self._database.run(lambda connection: connection.execute(any_one).first(), single=True)
        return row is not None

    async def change(
        self, account_id: str, *, limits: Mapping[str, int | None] | None = None, disabled: bool | None = None
    ) -> Account:
        """Change some limits of an account, by their fields in `Limits`, or disable or enable it. Raise NoSuchThing.

        One statement changes the named columns only, so that two changes of different limits at once keep both.
        """
        values: dict[str, Any] = dict(limits or {})
        Limits(**values)  # raises InvalidRequest for a value that is no limit
        if disabled is not None:
            values["disabled_ms"] = now_ms() if disabled else None
        if values:
            async with self._database.begin() as connection:
                await connection.execute(sa.update(accounts).where(accounts.c.id == account_id).values(values))
        return await self.get(account_id)

    # -------------------------------------------------------------------------------------------------- tokens

    async def create_token(
        self, account_id: str, name: str, scopes: Iterable[str], expires_ms: int | None = None
    ) -> tuple[Token, str]:
        """Create a token. Return it and its secret, which is not stored. Raise NoSuchThing for an unknown account."""
        scopes_held = check_token(name, scopes, expires_ms)
        secret = new_secret()
        made = Token(uuid.uuid4().hex, account_id, name, scopes_held, now_ms(), expires_ms)
        values = {**vars(made), "scopes": _join(made.scopes), "digest": digest_of(secret)}
        async with self._database.begin() as connection:
            if await connection.scalar(sa.select(accounts.c.id).where(accounts.c.id == account_id)) is None:
                raise _no_account(account_id)
            await connection.execute(sa.insert(tokens).values(values))
        return made, secret

    async def tokens_of(self, account_id: str) -> list[Token]:
        async with self._database.each() as connection:
            wanted = sa.select(tokens).where(tokens.c.account == account_id).order_by(tokens.c.created_ms, tokens.c.id)
            return [_token(row) for row in (await connection.execute(wanted)).mappings()]

    async def token(self, account_id: str, token_id: str) -> Token:
        """Return a token of an account. Raise NoSuchThing."""
        async with self._database.each() as connection:
            row = (await connection.execute(sa.select(tokens).where(_is(account_id, token_id)))).mappings().first()
        if row is None:
            raise NoSuchThing(f"account {account_id} has no token {token_id}; list its tokens", field="token")
        return _token(row)

    async def revoke(self, account_id: str, token_id: str) -> Token:
        """Revoke a token permanently; repeating it changes nothing. Raise NoSuchThing."""
        async with self._database.begin() as connection:
            is_it = _is(account_id, token_id) & tokens.c.revoked_ms.is_(None)
            await connection.execute(sa.update(tokens).where(is_it).values(revoked_ms=now_ms()))
        return await self.token(account_id, token_id)

    async def roll(self, account_id: str, token_id: str) -> tuple[Token, str]:
        """Replace a token's secret. Raise NoSuchThing, or InvalidRequest if the token was revoked."""
        token, secret = await self.token(account_id, token_id), new_secret()
        async with self._database.begin() as connection:
            is_it = _is(account_id, token_id) & tokens.c.revoked_ms.is_(None)
            rolled = await connection.execute(sa.update(tokens).where(is_it).values(digest=digest_of(secret)))
        if rolled.rowcount != 1:
            raise InvalidRequest(f"token {token_id} was revoked; create a new one", field="token")
        return token, secret

    async def find(self, digest: bytes) -> Holder | None:
        """Return the holder of the token with this digest, also if it is revoked or expired."""
        return await self._lookup.find(digest)

    async def _find_all(self, digests: Sequence[bytes]) -> dict[bytes, Holder]:
        both = sa.select(tokens, *(column.label(f"account_{column.name}") for column in accounts.c)).join_from(
            tokens, accounts
        )
        wanted = both.where(tokens.c.digest.in_(digests))
        rows = await self._database.run(lambda connection: connection.execute(wanted).mappings().all(), single=True)
        return {row["digest"]: _holder(row) for row in rows}

    async def used(self, used_ms: Mapping[str, int]) -> None:
        """Save when tokens (by id) were last used, to the minute."""
        async with self._database.begin() as connection:
            for token_id, moment_ms in sorted(used_ms.items()):
                minute_ms = moment_ms - moment_ms % _MINUTE_MS
                is_older = tokens.c.used_ms.is_(None) | (tokens.c.used_ms < minute_ms)
                change = sa.update(tokens).where((tokens.c.id == token_id) & is_older)
                await connection.execute(change.values(used_ms=minute_ms))


def check_token(name: str, scopes: Iterable[str], expires_ms: int | None) -> frozenset[Scope]:
    """Check the values of a new token and return its scopes. Raise InvalidRequest."""
    if not 0 < len(name) <= _MAX_NAME_CHARACTERS:
        raise InvalidRequest(f"name has {len(name)} characters, must have 1 to {_MAX_NAME_CHARACTERS}", field="name")
    if expires_ms is not None and expires_ms <= now_ms():
        raise InvalidRequest("expires_on is in the past; send a future time, or none", field="expires_on")
    if expires_ms is not None and expires_ms > LAST_MS:
        raise InvalidRequest("expires_on is after the year 9999; send an earlier time, or none", field="expires_on")
    return checked_scopes(scopes)


def _is(account_id: str, token_id: str) -> sa.ColumnElement[bool]:
    return (tokens.c.account == account_id) & (tokens.c.id == token_id)


def _no_account(account_id: str) -> NoSuchThing:
    return NoSuchThing(f"there is no account {account_id}; create it with `tandem account create`", field="account")


def _join(scopes: frozenset[Scope]) -> str:
    return " ".join(scope for scope in SCOPES if scope in scopes)


def _account(row: Mapping[Any, Any]) -> Account:
    limits = Limits(**{field.name: row[field.name] for field in fields(Limits)})
    return Account(row["id"], row["created_ms"], row["disabled_ms"], limits)


def _holder(row: Mapping[Any, Any]) -> Holder:
    return Holder(_token(row), _account({column.name: row[f"account_{column.name}"] for column in accounts.c}))


def _token(row: Mapping[Any, Any]) -> Token:
    scopes = frozenset(scope for scope in SCOPES if scope in row["scopes"].split(" "))
    times = {name: row[name] for name in ("created_ms", "expires_ms", "revoked_ms", "used_ms")}
    return Token(row["id"], row["account"], row["name"], scopes, **times)


class Lookup(Generic[T]):
    """Finds values by digest in batches: one read serves all calls that arrive during the read before it.

    A call never gets a value from a read that began before the call. For one event loop.
    """

    def __init__(self, read: Callable[[Sequence[bytes]], Awaitable[Mapping[bytes, T]]]) -> None:
        self._read = read
        self._wanted: dict[bytes, asyncio.Future[T | None]] = {}
        self._reader: asyncio.Task[None] | None = None

    async def find(self, digest: bytes) -> T | None:
        """Return the value with this digest, or None. Raise what the read raises."""
        found = self._wanted.get(digest)
        if found is None:
            found = self._wanted[digest] = asyncio.get_running_loop().create_future()
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_all())
        return await asyncio.shield(found)

    async def _read_all(self) -> None:
        try:
            while self._wanted:
                batch = {digest: self._wanted.pop(digest) for digest in list(islice(self._wanted, _MAX_TOGETHER))}
                await self._answer(batch)
        finally:
            self._reader = None

    async def _answer(self, batch: Mapping[bytes, asyncio.Future[T | None]]) -> None:
        try:
            holders = await self._read(list(batch))
        except TandemError as error:
            _fail(batch, error)
        except Exception as unexpected:
            log.exception("account_lookup_failed")
            _fail(batch, InternalError(f"the database could not be read: {message_of(unexpected)}"))
        else:
            for digest, found in batch.items():
                found.set_result(holders.get(digest))


def _fail(batch: Mapping[bytes, asyncio.Future[T | None]], error: TandemError) -> None:
    for found in batch.values():
        found.set_exception(error)
        found.exception()  # marks it as retrieved: the waiting request may be gone
