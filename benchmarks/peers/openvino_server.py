"""Serves OpenVINO's continuous batching over the small part of HTTP that llama-server speaks too.

python -m benchmarks.peers.openvino_server MODEL --port N --threads N --chunk TOKENS --cache-bytes N --max-num-seqs N

    GET /health             200 once it serves
    POST /completion        {prompt: [ids], n_predict} -> a stream of `data: {"tokens": [...]}`, then `{"stop": true}`

One thread steps the pipeline whenever a request is under way; a client that leaves cancels its request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.openvino_engine import greedy, pipeline, tensor

_HEAD = "HTTP/1.1 200 OK\r\nContent-Type: {}\r\nConnection: close\r\n\r\n"


@dataclass
class _Request:
    """One request under way. The stepping thread owns `handle`."""

    prompt: list[int]
    num_tokens: int
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[list[int]] = field(default_factory=asyncio.Queue)
    """Empty lists mean the end."""
    is_cancelled: bool = False
    handle: Any = None
    num_sent: int = 0

    def add(self, tokens: list[int]) -> None:
        self.loop.call_soon_threadsafe(self.tokens.put_nowait, tokens)


class Stepper:
    """Owns the pipeline; its thread adds, steps, delivers and cancels."""

    def __init__(self, openvino_pipeline: Any) -> None:
        self._pipeline = openvino_pipeline
        self._new: queue.Queue[_Request] = queue.Queue()
        self._running: list[_Request] = []
        self._num_requests = 0

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, request: _Request) -> None:
        """Take a request; from any thread."""
        self._new.put(request)

    def _run(self) -> None:
        while True:
            self._take_new(wait=not self._running)
            self._pipeline.step()
            self._running = [request for request in self._running if self._goes_on(request)]

    def _take_new(self, wait: bool) -> None:
        while wait or not self._new.empty():
            request = self._new.get()
            self._num_requests += 1
            request.handle = self._pipeline.add_request(
                self._num_requests, tensor(request.prompt), greedy(request.num_tokens)
            )
            self._running.append(request)
            wait = False

    def _goes_on(self, request: _Request) -> bool:
        """Deliver what has come for a request; return whether more is to come."""
        if request.is_cancelled:
            request.handle.cancel()
            return False
        while request.handle.can_read():
            tokens = [token for output in request.handle.read().values() for token in output.generated_ids]
            request.num_sent += len(tokens)
            request.add(tokens)
        if request.num_sent < request.num_tokens:
            return True
        request.add([])
        return False


class Server:
    """Reads requests from connections and writes what the stepper delivers."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper

    async def listen(self, port: int) -> asyncio.Server:
        """Serve at that port of the loopback, from now on."""
        return await asyncio.start_server(self._connected, "127.0.0.1", port)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            if head.startswith("GET /health "):
                writer.write((_HEAD.format("application/json") + "{}").encode())
                await writer.drain()
            elif head.startswith("POST /completion "):
                await self._complete(json.loads(await reader.readexactly(_content_length(head))), reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    async def _complete(
        self, asked: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = _Request(asked["prompt"], asked["n_predict"], asyncio.get_running_loop())
        writer.write(_HEAD.format("text/event-stream").encode())
        self._stepper.add(request)
        gone = asyncio.create_task(reader.read())  # returns when the client closes
        try:
            while not gone.done():
                tokens = await _first_of(request.tokens, gone)
                if not tokens:
                    writer.write(b'data: {"stop": true}\n\n')
                    break
                writer.write(f"data: {json.dumps({'tokens': tokens})}\n\n".encode())
                await writer.drain()
            await writer.drain()
        finally:
            request.is_cancelled = True
            gone.cancel()


async def _first_of(tokens: asyncio.Queue[list[int]], gone: asyncio.Task[bytes]) -> list[int]:
    """Return the next tokens; none if the client leaves first."""
    arrival = asyncio.create_task(tokens.get())
    await asyncio.wait({arrival, gone}, return_when=asyncio.FIRST_COMPLETED)
    if arrival.done():
        return arrival.result()
    arrival.cancel()
    return []


def _content_length(head: str) -> int:
    lengths = [line.partition(":")[2] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
    return int(lengths[0])


async def _serve(stepper: Stepper, port: int) -> None:
    async with await Server(stepper).listen(port) as server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    for name in ("port", "threads", "chunk", "cache-bytes", "max-num-seqs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    stepper = Stepper(
        pipeline(options.model, options.threads, options.max_num_seqs, options.cache_bytes, options.chunk)
    )
    stepper.start()
    asyncio.run(_serve(stepper, options.port))


if __name__ == "__main__":
    main()
