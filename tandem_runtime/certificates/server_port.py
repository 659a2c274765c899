"""Makes credentials of a gRPC port whose certificate may change while the server runs.

gRPC (1.85) frees the old certificate while another thread may begin a handshake with it: `add_handshakers` in its
`ssl_security_connector.cc` gives its lock back before it reads the pointer. A process that shakes hands with several
peers at the moment of a renewal then dies by a signal, or waits for ever for a broken lock. gRPC asks for the
certificate under that lock. So the answer "a new one" is given late: handshakes that began before have their
certificate by then, and no other one can begin.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import grpc

_PAUSE_SECONDS = 0.02
_PAUSES = 5
"""Several pauses, not one: a process that is stopped in one (SIGSTOP) leaves it at once when it goes on."""


def renewed_port_credentials(
    initial: grpc.ServerCertificateConfiguration,
    changed: Callable[[], grpc.ServerCertificateConfiguration | None],
    require_client_authentication: bool,
    sleep: Callable[[float], None] = time.sleep,
) -> grpc.ServerCredentials:
    """Return credentials of one port, which asks `changed` before each handshake: None means no change.

    `changed` is called on threads of gRPC, one at a time. A change holds that port's handshakes up for 0.1 s.
    """
    # The types of grpc leave out that the function may return None: the certificate has not changed.
    return grpc.dynamic_ssl_server_credentials(
        initial,
        given_late(changed, sleep),  # type: ignore[arg-type]
        require_client_authentication=require_client_authentication,
    )


def given_late(
    changed: Callable[[], grpc.ServerCertificateConfiguration | None], sleep: Callable[[float], None]
) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Return a function that waits before it returns a change, so that handshakes begun before have what they need."""

    def changed_or_none() -> grpc.ServerCertificateConfiguration | None:
        configuration = changed()
        if configuration is not None:
            for _ in range(_PAUSES):
                sleep(_PAUSE_SECONDS)
        return configuration

    return changed_or_none
