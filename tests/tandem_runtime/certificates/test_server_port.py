"""A port gives a new certificate to gRPC only once the handshakes that began with the old one have what they need."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc

from tandem_runtime.certificates.server_port import given_late
from tests.certificates import Authority


def test_a_new_certificate_waits_for_a_handshake_that_began_before() -> None:
    """gRPC's order: it asks under a lock, gives the lock back, and only then reads the certificate that it has."""
    files = Authority().issue(Authority().identity("decode"))
    new = grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.bundle)
    answers = iter([None, new])
    asks, has_asked, has_read, order = threading.Lock(), threading.Event(), threading.Event(), list[str]()

    def sleep(seconds: float) -> None:
        assert seconds > 0
        has_read.wait(30)

    ask = given_late(lambda: next(answers), sleep)

    def first() -> None:
        with asks:
            assert ask() is None
        has_asked.set()
        order.append("the first handshake reads the old certificate")
        has_read.set()

    def second() -> None:
        has_asked.wait(30)
        with asks:
            assert ask() is new
            order.append("gRPC frees the old certificate")

    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(first), threads.submit(second)]:
            done.result(60)
    assert order == ["the first handshake reads the old certificate", "gRPC frees the old certificate"]


def test_no_handshake_waits_while_nothing_has_changed() -> None:
    def sleep(_: float) -> None:
        raise AssertionError("nothing has changed")

    assert given_late(lambda: None, sleep)() is None
