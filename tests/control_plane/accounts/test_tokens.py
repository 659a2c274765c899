"""A token is a secret that only its owner has."""

from __future__ import annotations

import hashlib

import pytest

from control_plane.accounts.tokens import Token, checked_scopes, digest_of, new_secret
from tandem_runtime.errors import InvalidRequest


def token(**fields: object) -> Token:
    values: dict[str, object] = {"id": "t", "account": "me", "name": "n", "scopes": frozenset(), "created_ms": 0}
    return Token(**{**values, **fields})  # type: ignore[arg-type]


def test_secrets_are_long_different_and_found_by_their_hash() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        assert secret.startswith("tdm_") and len(secret) == 47
        assert digest_of(secret) == hashlib.sha256(secret.encode()).digest()


@pytest.mark.parametrize("text", ["", "tdm_", "tdm_short", "sk-" + "a" * 44, "tdm_" + "é" * 43, "tdm_" + "a" * 44])
def test_what_cannot_be_a_token_has_no_digest(text: str) -> None:
    assert digest_of(text) is None


def test_a_token_is_active_until_it_expires_or_is_revoked() -> None:
    assert token().state(10**15) == "active"
    assert [token(expires_ms=100).state(now) for now in (99, 100)] == ["active", "expired"]
    assert token(expires_ms=100, revoked_ms=50).state(99) == "revoked"


def test_admin_may_everything_the_others_what_they_say() -> None:
    assert token(scopes=frozenset({"admin"})).may("inference")
    assert token(scopes=frozenset({"usage"})).may("usage")
    assert not token(scopes=frozenset({"usage"})).may("inference")


def test_unknown_scopes_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="has root, write; choose from inference, usage, admin"):
        checked_scopes(["write", "inference", "root"])
    with pytest.raises(InvalidRequest, match="has none"):
        checked_scopes([])
