"""The zygote: forks text processes that share its tokenizers copy-on-write.

`python -m control_plane.text_processes.zygote DESCRIPTOR` is the root. A gateway starts it by exec, so it has no
thread, no event loop and no gRPC channel, and forking it is safe. It forks the first generation, adopts what its
descendants leave behind, and ends with the gateway.

A generation forks text processes. To load a tokenizer, it forks the next generation, which loads it and takes over:

    root --> generation 0 --> generation 1 (a) --> generation 2 (a, b)
                                  |                    |
                              text processes       text processes

So loading delays nobody, and a file that crashes its reader, or takes too much of time or memory, ends only a fork. The
next generation also does without the tokenizers that the gateway no longer needs.
"""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import NoReturn

from control_plane.text.prepared import Preparation
from control_plane.text.public_prefixes import PublicPrefixes
from control_plane.text.template import ChatTemplate
from control_plane.text.tokenizer import TextTokenizer, load_tokenizer
from control_plane.text.tools.template_traits import traits_of
from control_plane.text_processes import jobs, limits
from control_plane.text_processes.wire import (
    Begin,
    Channel,
    Ended,
    Load,
    Loaded,
    LoadFailed,
    Spawn,
    TemplateFile,
    encode,
    read_as,
    read_file,
    write_file,
)
from tandem_machine.priority import run_in_background
from tandem_runtime.errors import TandemError
from tandem_runtime.tracebacks import message_of

_PR_SET_CHILD_SUBREAPER = 36
_TEMPLATE_SECONDS = 2.0
"""Of processor time for a chat of one word; templates take some milliseconds."""


def main(descriptor: int) -> None:
    """Run the root: fork a first generation whenever the gateway asks for one."""
    limits.forget_signals()
    if sys.platform == "linux":  # descendants whose parent has ended become children of the root, and are reaped
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    root = Channel(socket.socket(fileno=descriptor))
    gc.collect()
    gc.freeze()
    try:
        while True:
            begin, _, (control, texts) = root.receive()
            assert isinstance(begin, Begin), "the root only begins generations"
            if os.fork() == 0:
                _leave(partial(_begin, control, texts))
            os.close(control)
            os.close(texts)
    except Ended:
        pass


def _begin(control: int, texts: int) -> None:
    public_texts = read_as(dict[str, str], texts)
    limits.keep_only(control)
    _Generation(control, {}, public_texts).serve()


class _Generation:
    """Forks text processes with one set of tokenizers, until the next generation has taken over."""

    def __init__(self, control: int, tokenizers: dict[str, TextTokenizer], public_texts: dict[str, str]) -> None:
        self._channel = Channel(socket.socket(fileno=control))
        self._tokenizers = tokenizers
        self._public_texts = public_texts
        self._preparation = Preparation(public_prefixes=PublicPrefixes(public_texts) if public_texts else None)

    def serve(self) -> None:
        try:
            while True:
                message, _, descriptors = self._channel.receive()
                self._fork(message, descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
        except Ended:
            pass

    def _fork(self, message: object, descriptors: list[int]) -> None:
        try:
            is_child = os.fork() == 0
        except OSError:  # no process or memory left: the gateway sees the connection end
            return
        if not is_child:
            return
        if isinstance(message, Spawn):
            _leave(partial(self._serve_jobs, message, *descriptors))
        assert isinstance(message, Load), "a generation spawns and loads"
        _leave(partial(self._succeed, message, *descriptors))

    def _serve_jobs(self, spawn: Spawn, connection: int) -> None:
        limits.keep_only(connection)
        limits.die_first()
        if spawn.is_background:
            run_in_background()
        limits.allow_memory(spawn.max_memory_bytes)
        jobs.serve(socket.socket(fileno=connection), self._tokenizers, self._preparation)

    def _succeed(self, load: Load, control: int, tokenizer_json: int, template: int, vocabulary: int) -> None:
        """Load a tokenizer and become the next generation."""
        self._channel.connection.close()
        successor = _Generation(control, self._tokenizers, self._public_texts)
        for key in load.forget:
            self._tokenizers.pop(key, None)
        limits.allow_cpu(load.max_cpu_seconds)
        limits.allow_memory(load.max_memory_bytes)
        try:
            file = read_as(TemplateFile, template)
            tokenizer = load_tokenizer(load.model_id, read_file(tokenizer_json), file.special_tokens)
            write_file(vocabulary, encode(tokenizer.vocabulary_data))
            self._tokenizers[load.key] = _warm(tokenizer, file.chat_template)
        except MemoryError:
            successor.report(LoadFailed(f"the tokenizer or chat template of {load.model_id} needs too much memory"))
            return
        except limits.TookTooLong:
            successor.report(
                LoadFailed(
                    f"the chat template of {load.model_id} did not render one word within {_TEMPLATE_SECONDS:g} s of "
                    "processor time; put the model's own template in its folder and restart its workers"
                )
            )
            return
        except TandemError as error:
            successor.report(LoadFailed(error.message))
            return
        except Exception as error:  # noqa: BLE001 - whatever a file may cause
            successor.report(LoadFailed(f"the files of {load.model_id} cannot be used: {message_of(error)}"))
            return
        os.close(vocabulary)
        limits.allow_cpu(None)
        limits.allow_memory(None)
        gc.collect()
        gc.freeze()
        successor.report(Loaded())
        successor.serve()

    def report(self, message: Loaded | LoadFailed) -> None:
        self._channel.send(message)


def _warm(tokenizer: TextTokenizer, chat_template: str) -> TextTokenizer:
    """Compute what text processes would each compute at their first job: they share it."""
    _ = tokenizer.max_token_bytes
    tokenizer.encode_prompt(" ".join(tokenizer.control_ids) + " warm")  # loads the tokenizer of users' texts, too
    if chat_template:
        try:
            with limits.within_cpu(_TEMPLATE_SECONDS):
                ChatTemplate(chat_template, tokenizer.special_tokens).render([{"role": "user", "content": "warm"}])
                traits_of(chat_template, tokenizer.special_tokens)
        except TandemError:
            pass  # a request that uses the template gets the error
    return tokenizer


def _leave(run: Callable[[], None]) -> NoReturn:
    """Run a forked process's own part, then end it without what the exec'ed process would do at its end."""
    status = 1
    try:
        run()
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()  # our own mistake: what users send cannot cause it
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
