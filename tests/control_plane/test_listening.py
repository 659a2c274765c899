"""Does an answer leave at once?"""

from __future__ import annotations

import asyncio
import socket

from control_plane.gateway import _listen


async def test_what_is_written_in_two_parts_does_not_wait_for_an_acknowledgement() -> None:
    bound = await _listen("127.0.0.1:0", insecure=False)
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(answer, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        assert await accepted == 1
        writer.close()
