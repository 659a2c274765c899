"""In which ways may other KV services fetch bytes from here, and who may ask?"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

from kv_transfer_svc.transport.tokens import TOKEN_SECONDS, Tokens
from tandem.v1 import kv_transfer_pb2 as kv
from tandem_runtime.errors import Unauthenticated, Unavailable
from tandem_runtime.kv.mac import MAC_BYTES


class LinkOffer:
    """What `OpenLink` answers. Ways other than gRPC are offered from when their address is set here."""

    def __init__(self, incarnation: str, handle_key: Callable[[], bytes], clock: Callable[[], float]) -> None:
        self.host_id = ""
        self.kv_socket = ""
        self.tcp_address = ""
        self.tokens = Tokens(incarnation, clock)
        self._incarnation = incarnation
        self._handle_key = handle_key

    def answer(self, request: kv.OpenLinkRequest) -> kv.OpenLinkReply:
        """Raises Unauthenticated unless a KV service of this fleet asks."""
        if not hmac.compare_digest(_mac(request, self._handle_key()), request.mac):
            raise Unauthenticated(
                f"incarnation {request.incarnation} asks for a link with a wrong MAC: do all KV services share one "
                "handle key?",
                field="mac",
            )
        return kv.OpenLinkReply(
            incarnation=self._incarnation,
            host_id=self.host_id,
            kv_socket=self.kv_socket,
            tcp_address=self.tcp_address,
            token=self.tokens.new(),
            token_ms=int(TOKEN_SECONDS * 1000),
        )


def link_request(incarnation: str, holder_address: str, handle_key: bytes) -> kv.OpenLinkRequest:
    """Return what a reader asks the service at `holder_address`."""
    request = kv.OpenLinkRequest(incarnation=incarnation, holder_address=holder_address)
    request.mac = _mac(request, handle_key)
    return request


def _mac(request: kv.OpenLinkRequest, key: bytes) -> bytes:
    if not key:
        raise Unavailable("this KV service has yet to register with a control plane: it has no handle key for links")
    text = f"link\0{request.incarnation}\0{request.holder_address}"
    return hmac.digest(key, text.encode(), hashlib.sha256().name)[:MAC_BYTES]
