"""A chat on a pseudo-terminal, and a gateway whose answers depend on the messages."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from tests.tandem_client.stub_gateway import Call, StubGateway, last_event

_ESCAPE_SEQUENCES = re.compile(r"\033\[[0-9;?]*[A-Za-z]|\r")


class TalkingStub(StubGateway):
    """Answers according to the last message; `sent` has the messages of each call."""

    @property
    def sent(self) -> list[list[str]]:
        return [[message["content"] for message in call.body["messages"]] for call in self.calls]

    async def _run(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(Call(request.url.path, dict(request.headers), body))
        question = body["messages"][-1]["content"]
        if question in _REFUSALS:
            status, message, headers = _REFUSALS[question]
            errors = [{"code": 3040 if status == 429 else 5006, "message": message}]
            return JSONResponse({"result": None, "success": False, "errors": errors}, status, headers)
        return StreamingResponse(self._pieces(question, body), media_type="text/event-stream")

    async def _pieces(self, question: str, body: Any) -> AsyncIterator[bytes]:
        try:
            while question == "say nothing":
                yield b": a comment, as gateways send against idle proxies\n\n"
                await asyncio.sleep(0.001)  # the rate of decode; here the server also notices a disconnect
            if question == "think":
                yield _event({"response": "", "reasoning_content": "What did "})
                yield _event({"response": "", "reasoning_content": "they\033[2J say?\n"})
            yield _event({"response": f"({len(body['messages'])}) "})
            while question == "go on for ever":
                yield _event({"response": "and on "})
                await asyncio.sleep(0.001)
            if question == "break off":
                return
            yield _event({"response": f"You said {question}"})
            yield last_event(body)
            yield b"data: [DONE]\n\n"
        finally:
            self.client_left.set()


_REFUSALS: dict[str, tuple[int, str, dict[str, str]]] = {
    "too much": (429, "Capacity temporarily exceeded", {"retry-after": "7"}),
    "too long": (400, "prompt has 2,100 tokens, m takes 2,048 for prompt and answer together; shorten the prompt", {}),
    "no template": (400, "m has no chat template; send a prompt instead", {}),
}


def _event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


class Terminal:
    """A pseudo-terminal that runs the command, and its output without colours."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.raw = b""
        self._master = master
        self._seen = 0

    @property
    def screen(self) -> str:
        return _ESCAPE_SEQUENCES.sub("", self.raw.decode(errors="ignore"))

    def until(self, words: str, nudge: bool = False) -> str:
        """Read until `words` are shown again; the test's timeout ends the wait."""
        while (found := self.screen.find(words, self._seen)) < 0:
            while nudge and not select.select([self._master], [], [], 0.2)[0]:
                self.process.send_signal(signal.SIGWINCH)
            try:
                self.raw += os.read(self._master, 4096)
            except OSError as error:  # Linux's word for the end of a terminal
                raise AssertionError(f"{words!r} was never shown:\n{self.screen}") from error
        before, self._seen = self._seen, found + len(words)
        return self.screen[before : self._seen]

    def send(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def say(self, message: str) -> str:
        """Type a message and return what is shown until the next prompt."""
        self.send(message + "\r")
        self.until(message)
        return self.until("› ").removesuffix("› ").strip().removeprefix("…")

    def interrupt(self, words: str) -> str:
        """Press Ctrl-C at the prompt and read until `words` are shown.

        Python notices a signal that comes between readline's last writing and its next wait only at the signal after
        that one; a window that changes its size is such a signal, and harmless.
        """
        self.send("\x03")
        return self.until(words, nudge=True)

    def exit_code(self) -> int:
        try:
            while data := os.read(self._master, 4096):
                self.raw += data
        except OSError:  # the end
            return self.process.wait(30)
        return self.process.wait(30)


@contextmanager
def chatting(gateway: StubGateway, state: Path, *arguments: str) -> Iterator[Terminal]:
    """Run the command on a pseudo-terminal, where Ctrl-C is a signal, and wait for its prompt."""
    begin = (
        "import os, signal, sys; os.close(os.open(os.ttyname(0), os.O_RDWR));"
        "signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", "tandem_client.cli", "chat", "--url", gateway.url, *arguments]
    master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "XDG_STATE_HOME": str(state), "LC_ALL": "C.UTF-8"}
    with subprocess.Popen(
        [sys.executable, "-c", begin, *command],
        stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    ) as process:  # fmt: skip
        os.close(slave)
        try:
            terminal = Terminal(process, master)
            terminal.until("› ")
            yield terminal
        finally:
            process.kill()
            os.close(master)
