"""An answer leaves at once; a connection that takes no data is closed."""

from __future__ import annotations

import asyncio
import socket
from contextlib import closing

import pytest

from control_plane.listening import listen
from tandem_runtime.errors import InvalidRequest


async def _listening(reuse_port: bool = False, address: str = "127.0.0.1:0") -> socket.socket:
    return await listen(address, insecure=False, reuse_port=reuse_port, stalled_client_seconds=7.5)


async def test_what_is_written_in_two_parts_does_not_wait_for_an_acknowledgement() -> None:
    with await _accepted() as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux ends connections that take nothing")
async def test_a_connection_is_ended_that_takes_nothing_and_the_kernel_keeps_little_for_it() -> None:
    with await _accepted() as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7500
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 128 * 1024


async def test_a_taken_port_is_refused_with_a_remedy_unless_both_share_it() -> None:
    with closing(await _listening()) as first:
        first.listen()
        address = "{}:{}".format(*first.getsockname())
        with pytest.raises(InvalidRequest, match=f"cannot listen on {address}: .* --reuse-port"):
            await _listening(address=address)
        with pytest.raises(InvalidRequest, match="cannot listen"):
            await _listening(reuse_port=True, address=address)
    with closing(await _listening(reuse_port=True)) as first:
        first.listen()
        (await _listening(reuse_port=True, address="{}:{}".format(*first.getsockname()))).close()


async def _accepted() -> socket.socket:
    """Return asyncio's server side of a connection."""
    bound = await _listening()
    accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(socket.fromfd(writer.get_extra_info("socket").fileno(), socket.AF_INET, socket.SOCK_STREAM))
        writer.close()

    async with await asyncio.start_server(answer, sock=bound):
        _, writer = await asyncio.open_connection(*bound.getsockname())
        connection = await accepted
        writer.close()
    return connection
