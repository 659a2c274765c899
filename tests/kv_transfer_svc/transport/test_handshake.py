"""Only KV services of the fleet open links, and for a while those of release 0.2 beside the new ones."""

from __future__ import annotations

import hmac
import time
from dataclasses import replace

import pytest

from kv_transfer_svc.transport.handshake import LinkHandshake, link_request
from tandem_runtime.errors import Unauthenticated, Unavailable
from tandem_runtime.kv.keys import KvKeys
from tests.kv_transfer_svc.layout import KEYS

ADDRESS = "10.0.0.2:8650"
MAC_KEY = b"the handle key of release 0.2"
BOTH = replace(KEYS, mac_key=MAC_KEY)
OLD = KvKeys(mac_key=MAC_KEY)
"""What a service of release 0.2 has."""


def handshake(keys: KvKeys, macs_until: float = 0.0) -> LinkHandshake:
    made = LinkHandshake("holder", lambda: keys, lambda: 0.0, macs_until)
    made.address = ADDRESS
    return made


def test_a_service_with_the_link_key_gets_a_token() -> None:
    assert handshake(KEYS).answer(link_request("reader", ADDRESS, KEYS)).token


def test_a_worker_has_no_key_that_opens_a_link() -> None:
    """It gets the public keys of handles only."""
    with pytest.raises(Unavailable, match="no key for links"):
        link_request("worker", ADDRESS, KvKeys(KEYS.public_keys))
    guessed = KvKeys(KEYS.public_keys, link_key=KEYS.public_keys[0])
    with pytest.raises(Unauthenticated, match="wrong MAC"):
        handshake(KEYS).answer(link_request("worker", ADDRESS, guessed))


def test_a_service_that_has_not_registered_answers_nobody() -> None:
    with pytest.raises(Unavailable, match="not registered"):
        handshake(KvKeys()).answer(link_request("reader", ADDRESS, KEYS))


def test_a_service_of_release_0_2_opens_links_until_the_set_time_only() -> None:
    request = link_request("old reader", ADDRESS, OLD)
    assert request.link_mac == b""
    assert handshake(BOTH, macs_until=time.time() + 60).answer(request).token
    for keys, until in ((BOTH, 0.0), (BOTH, time.time() - 1), (KEYS, time.time() + 60)):
        with pytest.raises(Unauthenticated, match="--hmac-handles-until"):
            handshake(keys, until).answer(request)


def test_a_new_service_opens_links_to_services_of_release_0_2() -> None:
    request = link_request("reader", ADDRESS, BOTH)
    signed = f"link\0reader\0{ADDRESS}".encode()  # as release 0.2 computes it
    assert request.mac == hmac.digest(MAC_KEY, signed, "sha256")[:16]


def test_the_key_of_handles_in_release_0_2_is_no_link_key() -> None:
    request = link_request("reader", ADDRESS, replace(KEYS, link_key=MAC_KEY))
    with pytest.raises(Unauthenticated):
        handshake(BOTH, macs_until=time.time() + 60).answer(request)
