"""Helpers for tests of KV connectors: a link to a real KV service, handles and requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from tandem.v1 import control_plane_pb2 as cp
from tandem.v1 import types_pb2 as pb
from tandem_runtime.kv.layout import layout_digest
from tandem_worker.kv_link import KvLink
from tandem_worker.model_card import kv_layout
from tandem_worker.requests import ActiveRequest, GatewayStream
from tests.kv_transfer_svc.host import Host
from tests.kv_transfer_svc.layout import SIGNER
from tests.kv_transfer_svc.writer import Writer
from tests.tandem_worker.scripted_engine import LAYOUT

NUM_TOKENS = 64


class FollowedLink(KvLink):
    """A link to the host that a test sets."""

    def __init__(self, host: Host | None, on_change: Callable[[], None] = lambda: None) -> None:
        super().__init__("worker-1", lease_seconds=10.0)
        self.host = host
        self.follow(self._found, on_change)

    def move(self, host: Host | None) -> None:
        """Follow another KV service, as after a restart; None: there is none."""
        self.host = host
        self._wake.set()

    def _found(self) -> cp.KvServiceAddress | None:
        host = self.host
        if host is None:
            return None
        return cp.KvServiceAddress(address=host.address, incarnation=host.incarnation, socket=host.socket)


def a_handle(
    writer: Writer, num_readers: int = 1, seconds: float = 60.0, prefill: str = "", num_blocks: int = 4
) -> pb.KvHandle:
    """Return a signed handle that the worker `prefill` fills; by default, the writer fills it."""
    handle = writer.handle(num_blocks=num_blocks, num_readers=num_readers, seconds=seconds)
    handle.prefill_incarnation = prefill or writer.incarnation
    handle.layout_digest = layout_digest(kv_layout(LAYOUT))
    return SIGNER.sign(handle)


def a_request(handle: pb.KvHandle, name: str = "r", seconds: float = 60.0, **fields: Any) -> ActiveRequest:
    submit = pb.Submit(
        request_id=name,
        token_ids=range(NUM_TOKENS),
        num_prompt_tokens=NUM_TOKENS,
        handle=handle,
        deadline_unix_ms=int((time.time() + seconds) * 1000),
        **fields,
    )
    return ActiveRequest(submit, GatewayStream())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the condition depends on another process
            await asyncio.sleep(0.005)
