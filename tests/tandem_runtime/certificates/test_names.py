"""An identity has one spelling, and a certificate has one identity."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from tandem_runtime.certificates.names import ROLES, Identity, identity_of, parse_certificate
from tests.certificates import Authority

FLEET, ID = "0123456789abcdef", "fedcba9876543210"


@pytest.mark.parametrize("role", ROLES)
def test_an_identity_reads_its_own_uri(role: str) -> None:
    identity = Identity(FLEET, role, ID)  # type: ignore[arg-type]
    assert identity.uri == f"spiffe://{FLEET}/{role}/{ID}"
    assert identity.dns_names == (f"{ID}.{role}.tandem.internal", f"{role}.{FLEET}.tandem.internal")
    assert Identity.parse(identity.uri) == identity


@pytest.mark.parametrize(
    "uri",
    [
        "",
        f"spiffe://{FLEET}/decode/{ID}/",
        f"spiffe://{FLEET}/decode/{ID}\n",
        f"spiffe://{FLEET}/decode/{ID}?x",
        f"spiffe://{FLEET}//decode/{ID}",
        f"spiffe://{FLEET}/Decode/{ID}",
        f"spiffe://{FLEET}/operator/{ID}",
        f"spiffe://{FLEET}/decode/{ID.upper()}",
        f"spiffe://{FLEET}/decode/{ID}0",
        f"spiffe://{FLEET}x/decode/{ID}",
        f"SPIFFE://{FLEET}/decode/{ID}",
        f"https://{FLEET}/decode/{ID}",
        f"spiffe://{FLEET}/decode/{'١' * 16}",
        "spiffe://" + "a" * 100_000,
    ],
)
def test_any_other_spelling_is_refused(uri: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Identity.parse(uri)


@pytest.mark.parametrize(("fleet", "role", "id"), [("x", "kv", ID), (FLEET, "kv", "x"), (FLEET, "king", ID)])
def test_an_identity_refuses_nonsense_as_it_is_built(fleet: str, role: str, id: str) -> None:
    with pytest.raises(ValueError, match=r"16 hex digits|the roles are"):
        Identity(fleet, role, id)  # type: ignore[arg-type]


def test_a_certificate_has_exactly_one_uri() -> None:
    authority = Authority()
    identity = authority.identity("kv")
    good = authority.issue(identity)
    assert identity_of(good.certificate) == identity
    assert identity_of(parse_certificate(good.certificate).public_bytes(Encoding.DER)) == identity
    for uris in ([], [identity.uri, authority.identity("gateway").uri]):
        with pytest.raises(ValueError, match="exactly one"):
            identity_of(authority.issue(identity, uris=uris).certificate)
    with pytest.raises(ValueError, match="no subject alternative name"):
        identity_of(authority.bundle)
    with pytest.raises(ValueError):
        identity_of(b"no certificate")
