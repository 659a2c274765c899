"""A text process: prepares one body after the other, and ends when its gateway does."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
import traceback
from collections.abc import Mapping

from control_plane.text.prepared import ParsedBody, Preparation
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text_processes import limits
from control_plane.text_processes.bodies import parse
from control_plane.text_processes.wire import MEMORY, Channel, Done, Drop, Ended, Failed, Hello, Named, Run, Use
from tandem_runtime.errors import TandemError

_MAX_GROWTH_BYTES = 64 << 20
"""A process that has grown by more ends after its job: memory that was used once is seldom given back."""
_HALF_A_PAIR = "the body has half of a surrogate pair (U+D800 to U+DFFF); send the whole character, or leave it out"
_TOO_DEEP = "the body is nested too deeply; make it flatter"


def serve(connection: socket.socket, tokenizers: Mapping[str, TextTokenizer], preparation: Preparation) -> None:
    """Answer jobs until the gateway closes the connection, or this process has grown."""
    with contextlib.suppress(Ended):
        _TextProcess(Channel(connection), tokenizers, preparation).serve()


class _TextProcess:
    def __init__(self, channel: Channel, tokenizers: Mapping[str, TextTokenizer], preparation: Preparation) -> None:
        self._channel = channel
        self._tokenizers = tokenizers
        self._preparation = preparation
        self._data_bytes = limits.data_bytes()

    def serve(self) -> None:
        gc.freeze()
        gc.disable()  # between jobs only: a collection in the midst of a large body would look at all of it
        self._channel.send(Hello(os.getpid()))
        while True:
            run, raw, _ = self._channel.receive()
            assert isinstance(run, Run), "a job begins with Run"
            limits.allow_cpu(run.max_cpu_seconds)
            answer = self._answer(run, raw)
            del raw
            if answer is not None:
                self._send(answer)
                if answer.is_last:
                    return
            del answer
            gc.collect()

    def _answer(self, run: Run, raw: bytes) -> Done | Failed | None:
        """Return the last message of a job; None if the gateway dropped the job."""
        try:
            return self._prepare(run, raw)
        except Ended:
            raise
        except TandemError as error:
            return self._failed(type(error).__name__, error.message, error.field)
        except MemoryError:
            return Failed(MEMORY, "", cpu_seconds=time.process_time(), is_last=True)
        except RecursionError:
            return self._failed("InvalidRequest", _TOO_DEEP)
        except UnicodeEncodeError:
            return self._failed("InvalidRequest", _HALF_A_PAIR)
        except Exception as error:  # noqa: BLE001 - the gateway logs it, without its text
            frames = traceback.extract_tb(error.__traceback__)[-8:]
            return Failed(
                "",
                "",
                cpu_seconds=time.process_time(),
                is_last=True,
                exception=type(error).__name__,
                frames=tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames),
            )

    def _prepare(self, run: Run, raw: bytes) -> Done | None:
        parsed: ParsedBody = parse(run.job, raw)
        del raw
        self._channel.send(Named(parsed.asked))
        answer, _, _ = self._channel.receive()
        if isinstance(answer, Drop):
            return None
        assert isinstance(answer, Use), "Named is answered by Use or Drop"
        body = self._preparation.body(parsed, answer.model, self._tokenizers[answer.key], run.job.salt)
        return Done(body, time.process_time(), self._has_grown())

    def _send(self, answer: Done | Failed) -> None:
        try:
            self._channel.send(answer)
        except UnicodeEncodeError:
            self._channel.send(self._failed("InvalidRequest", _HALF_A_PAIR))

    def _failed(self, kind: str, message: str, field: str = "") -> Failed:
        return Failed(kind, message, field, time.process_time(), self._has_grown())

    def _has_grown(self) -> bool:
        return limits.data_bytes() - self._data_bytes > _MAX_GROWTH_BYTES
