"""A text process: prepares one body after the other, and ends when its gateway does."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import time
import traceback
from collections.abc import Mapping

from control_plane.text.prepared import Asked, Preparation
from control_plane.text.tokenizer import TextTokenizer
from control_plane.text_processes import limits
from control_plane.text_processes.bodies import parse
from control_plane.text_processes.wire import MEMORY, Channel, Done, Drop, Ended, Failed, Hello, Named, Run, Use
from tandem_machine.own_memory import OwnMemory
from tandem_runtime.errors import TandemError

_MAX_GROWTH_BYTES = 64 << 20
"""A process that has grown by more ends after its job: memory that was used once is seldom given back."""
_MAX_UNCOLLECTED = 20_000
"""Objects that are made before a collection of garbage: a short chat makes some hundreds."""
_MAX_TOLD = 256
"""Names of models that a process keeps."""
_HALF_A_PAIR = "the body has half of a surrogate pair (U+D800 to U+DFFF); send the whole character, or leave it out"
_NO_MEMORY = "memory allocation"
"""In the panic of the tokenizer's regular expressions."""
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
        self._memory = OwnMemory()
        self._data_bytes = self._memory.data_bytes()
        self._told: dict[str, Use] = {}
        """By the caller's name for a model: the last answer to Named."""
        self._assumed: Asked | None = None
        """Of the current job."""

    def serve(self) -> None:
        gc.freeze()
        gc.disable()  # between jobs only: a collection in the midst of a large body would look at all of it
        self._channel.send(Hello(os.getpid()))
        while True:
            run, raw, _ = self._channel.receive()
            assert isinstance(run, Run), "a job begins with Run"
            limits.allow_cpu(run.max_cpu_seconds)
            limits.allow_memory(run.max_memory_bytes, self._memory.data_bytes())
            answer = self._answer(run, raw)
            del raw
            if answer is not None:
                self._send(answer)
                if answer.is_last:
                    return
            del answer
            if gc.get_count()[0] > _MAX_UNCOLLECTED:
                gc.collect()
            limits.allow_memory(None)  # the gateway bounds the next body

    def _answer(self, run: Run, raw: bytes) -> Done | Failed | None:
        """Return the last message of a job; None if the gateway dropped the job."""
        try:
            return self._prepare(run, raw)
        except Ended:
            raise
        except TandemError as error:
            return self._failed(type(error).__name__, error.message, error.field)
        except MemoryError:
            return self._out_of_memory()
        except RecursionError:
            return self._failed("InvalidRequest", _TOO_DEEP)
        except UnicodeEncodeError:
            return self._failed("InvalidRequest", _HALF_A_PAIR)
        except Exception as error:  # noqa: BLE001 - the gateway logs it, without its text
            return self._unexpected(error)
        except BaseException as error:  # noqa: BLE001 - a panic of a library in Rust is no Exception
            return self._out_of_memory() if _NO_MEMORY in str(error) else self._unexpected(error)

    def _out_of_memory(self) -> Failed:
        return Failed(MEMORY, "", cpu_seconds=time.process_time(), is_last=True)

    def _unexpected(self, error: BaseException) -> Failed:
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        return Failed(
            "",
            "",
            cpu_seconds=time.process_time(),
            is_last=True,
            assumed=self._assumed,
            exception=type(error).__name__,
            frames=tuple(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames),
        )

    def _prepare(self, run: Run, raw: bytes) -> Done | None:
        self._assumed = None
        parsed = parse(run.job, raw)
        del raw
        asked = parsed.asked
        use = self._told.get(asked.model) if run.may_assume else None
        if use is not None:
            self._assumed = asked
        elif (use := self._ask(asked)) is None:
            return None
        body = self._preparation.body(parsed, use.model, self._tokenizers[use.key], run.job.salt)
        return Done(body, time.process_time(), self._has_grown(), self._assumed)

    def _ask(self, asked: Asked) -> Use | None:
        """Return the gateway's answer to a name; None if it dropped the job."""
        self._channel.send(Named(asked))
        answer, _, _ = self._channel.receive()
        self._told.pop(asked.model, None)
        if isinstance(answer, Drop):
            return None
        assert isinstance(answer, Use), "Named is answered by Use or Drop"
        self._told[asked.model] = answer
        if len(self._told) > _MAX_TOLD:
            del self._told[next(iter(self._told))]
        return answer

    def _send(self, answer: Done | Failed) -> None:
        try:
            self._channel.send(answer)
        except UnicodeEncodeError:
            self._channel.send(self._failed("InvalidRequest", _HALF_A_PAIR))

    def _failed(self, kind: str, message: str, field: str = "") -> Failed:
        return Failed(kind, message, field, time.process_time(), self._has_grown(), self._assumed)

    def _has_grown(self) -> bool:
        return self._memory.data_bytes() - self._data_bytes > _MAX_GROWTH_BYTES
