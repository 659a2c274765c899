"""Loads the control plane's secret, and derives the keys for KV handles and for links between KV services."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from tandem_runtime.errors import InvalidRequest
from tandem_runtime.kv.keys import KvKeys
from tandem_runtime.kv.signatures import HandleSigner

_NUM_BYTES = 32


def load_secret(configured: str, state_dir: Path) -> bytes:
    """Return the configured secret (hex), else the secret of this state directory, made once with mode 0600.

    Raises InvalidRequest if a secret is not hex of at least 32 bytes, or cannot be stored.
    """
    if configured:
        return _parse(configured, "the setting `secret`")
    path = state_dir / "secret"
    try:
        if not path.exists():
            _make(path)
        text = path.read_text().strip()
    except OSError as error:
        raise InvalidRequest(f"cannot store the secret in {path}: {error}; set --state-dir or --secret") from error
    return _parse(text, str(path))


def handle_signer(secret: bytes, macs_until: float = 0.0) -> HandleSigner:
    """Return what signs KV handles, the same in every gateway with this secret.

    Until `macs_until` (seconds since the epoch) handles also carry the MAC that KV services of release 0.2 verify.
    """
    return HandleSigner(_derived(secret, b"tandem kv handle signature"), _mac_key(secret), macs_until)


def kv_keys(secret: bytes) -> KvKeys:
    """Return the keys that KV services get when they register. The signing key is not among them."""
    return KvKeys((handle_signer(secret).public_key,), _derived(secret, b"tandem kv link"), _mac_key(secret))


def _mac_key(secret: bytes) -> bytes:
    return _derived(secret, b"tandem kv handle")


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, purpose, hashlib.sha256)


def _make(path: Path) -> None:
    """Write a new secret; two processes that start at once end up with the same secret."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".secret-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(_NUM_BYTES))
    try:
        os.link(draft, path)  # fails if the other process was first
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _parse(text: str, source: str) -> bytes:
    try:
        secret = bytes.fromhex(text)
    except ValueError as error:
        raise InvalidRequest(f"{source} is not hexadecimal; make one with `openssl rand -hex 32`") from error
    if len(secret) < _NUM_BYTES:
        raise InvalidRequest(
            f"{source} has {len(secret)} bytes, needs {_NUM_BYTES}; make one with `openssl rand -hex 32`"
        )
    return secret
