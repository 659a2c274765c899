"""Writes a fleet's authority to one file, encrypted with a passphrase, and restores it.

The file: MAGIC, 16 bytes of salt, 12 of nonce, then AES-256-GCM of JSON under scrypt(passphrase, salt). Its JSON holds
the authorities with their private keys, the members and the deny list; not the join tokens, and not the certificates.
"""

from __future__ import annotations

import json
import os
from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from control_plane.fleet_identity import denials as deny_list
from control_plane.fleet_identity.authorities import read_trust
from control_plane.fleet_identity.sealed_key import loaded, private_bytes, seal, unseal
from control_plane.storage.database import Database
from control_plane.storage.tables import authorities, certificates, denials, join_tokens, members
from tandem_runtime.errors import InvalidRequest

MAGIC = b"tandem fleet backup 1\n"
MIN_PASSPHRASE_CHARACTERS = 12
MAX_FILE_BYTES = 256 * 1024 * 1024
_SALT_BYTES = 16
_NONCE_BYTES = 12
_SCRYPT = {"n": 2**17, "r": 8, "p": 1}
"""128 MiB and about 0.4 s a guess (OWASP's advice for scrypt)."""


async def backup(database: Database, secret: bytes, passphrase: str, path: Path) -> str:
    """Write the fleet to a new file of mode 0600; return the fleet's id. Raise InvalidRequest."""
    _check(passphrase)
    content = await database.run(partial(_content, secret=secret, now_ms=database.now_ms()))
    plain = json.dumps(content).encode()
    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    encrypted = AESGCM(_key(passphrase, salt)).encrypt(nonce, plain, MAGIC)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC + salt + nonce + encrypted)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidRequest(f"cannot write the backup to {path}: {error}; name a file that does not exist") from error
    return str(content["fleet"])


async def restore(database: Database, secret: bytes, passphrase: str, path: Path, *, replace: bool = False) -> str:
    """Write a backup's fleet into the database; return its id.

    Raise InvalidRequest for a wrong passphrase or file, and if the database has a fleet already, unless `replace`. The
    deny list only grows: an identity that was revoked after the backup stays so, if the database still knows it.
    """
    content = _read(path, passphrase)
    try:
        work = partial(_restore, content=content, secret=secret, replace=replace, now_ms=database.now_ms())
        await database.run(work)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{path} is not a backup of this version: {error!r}; use the version that made it"
        ) from error
    return str(content["fleet"])


def _content(connection: sa.Connection, *, secret: bytes, now_ms: int) -> dict[str, Any]:
    trust = read_trust(connection, now_ms)
    if trust is None:
        raise InvalidRequest("the database has no fleet, so there is nothing to back up; start a gateway on it")
    rows = []
    for row in connection.execute(sa.select(authorities).order_by(authorities.c.number)).mappings():
        sealed, certificate = row["sealed_key"], x509.load_der_x509_certificate(row["certificate"])
        key = None if sealed is None else _text(private_bytes(unseal(sealed, certificate, secret)))
        rows.append({**row, "certificate": _text(row["certificate"]), "sealed_key": key})
    listed = [
        {**row, "joined_key": _text(row["joined_key"])} for row in connection.execute(sa.select(members)).mappings()
    ]
    denied = [dict(row) for row in connection.execute(sa.select(denials).order_by(denials.c.number)).mappings()]
    return {
        "fleet": trust.fleet,
        "backup_ms": now_ms,
        "authorities": rows,
        "members": listed,
        "denials": denied,
    }


def _restore(
    connection: sa.Connection, *, content: Mapping[str, Any], secret: bytes, replace: bool, now_ms: int
) -> None:
    present = read_trust(connection, now_ms)
    if present is not None and not replace:
        raise InvalidRequest(
            f"the database has the fleet {present.fleet}, and a restore replaces it by {content['fleet']}: every "
            "certificate of the present one would be refused; pass --replace if that is wanted, or set --database-url "
            "to an empty database"
        )
    is_same = present is not None and present.fleet == content["fleet"]
    kept = [dict(row) for row in connection.execute(sa.select(denials)).mappings()] if is_same else []
    for table in (certificates, members, authorities, join_tokens, denials):
        connection.execute(sa.delete(table))
    for row in content["authorities"]:
        connection.execute(sa.insert(authorities).values(_authority_row(row, secret)))
    for row in content["members"]:
        connection.execute(sa.insert(members).values(row | {"joined_key": b64decode(row["joined_key"])}))
    _restore_denials(connection, [*content["denials"], *kept], now_ms)


def _restore_denials(connection: sa.Connection, rows: list[Mapping[str, Any]], now_ms: int) -> None:
    """Number the rows anew, above every number that a process may have heard of."""
    last = max((row["number"] for row in rows), default=0)
    deny_list.skip_numbers(connection, last, now_ms)
    until_ms: dict[str, int] = {}
    for row in rows:
        until_ms[row["identity"]] = max(row["until_ms"], until_ms.get(row["identity"], 0))
    for identity, until in until_ms.items():
        if identity:
            deny_list.add(connection, identity, now_ms, until)


def _authority_row(row: Mapping[str, Any], secret: bytes) -> dict[str, Any]:
    certificate = b64decode(row["certificate"])
    sealed = None
    if row["sealed_key"] is not None:
        key = loaded(b64decode(row["sealed_key"]))
        sealed = seal(key, x509.load_der_x509_certificate(certificate), secret)
    return {**row, "certificate": certificate, "sealed_key": sealed}


def _read(path: Path, passphrase: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"cannot read the backup {path}: {error}; name a file of `tandem fleet backup`") from error
    if not raw.startswith(MAGIC) or len(raw) > MAX_FILE_BYTES:
        raise InvalidRequest(f"{path} is not a backup of a fleet; name a file of `tandem fleet backup`")
    salt, rest = raw[len(MAGIC) :][:_SALT_BYTES], raw[len(MAGIC) + _SALT_BYTES :]
    try:
        plain = AESGCM(_key(passphrase, salt)).decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], MAGIC)
    except (InvalidTag, ValueError) as error:
        raise InvalidRequest(
            f"the passphrase does not open {path}, or the file was changed; try another one"
        ) from error
    content: dict[str, Any] = json.loads(plain)
    return content


def _check(passphrase: str) -> None:
    if len(passphrase) < MIN_PASSPHRASE_CHARACTERS:
        raise InvalidRequest(
            f"the passphrase has {len(passphrase)} characters, must have at least {MIN_PASSPHRASE_CHARACTERS}; who "
            "opens the backup can issue certificates of this fleet"
        )


def _key(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, **_SCRYPT).derive(passphrase.encode())


def _text(value: bytes) -> str:
    return b64encode(value).decode()
