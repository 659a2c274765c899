"""One load of a tokenizer: a fork of the current generation, which may become the next generation or ends.

Whatever is in a model's files, the worst outcome is the end of the fork, and an InternalError here.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass

from control_plane.generation import ModelDescription
from control_plane.text.vocabulary import Vocabulary, VocabularyData
from control_plane.text_processes.wire import (
    AsyncChannel,
    Load,
    Loaded,
    LoadFailed,
    Message,
    TemplateFile,
    anonymous_file,
    encode,
    read_as,
)
from tandem_runtime.errors import InternalError
from tandem_runtime.tracebacks import message_of

LOAD_CPU_SECONDS = 60
LOAD_MEMORY_BYTES = 2 << 30
_LOAD_SECONDS = 180.0
MAX_VOCABULARY_BYTES = 64 << 20
"""Which the gateway reads itself; 256,000 tokens have 3 MB."""


@dataclass
class Generation:
    """A process that forks text processes, and the tokenizers that it has loaded."""

    control: AsyncChannel
    keys: frozenset[str] = frozenset()
    is_current: bool = True


@dataclass(frozen=True)
class Candidate:
    """A fork that has loaded one tokenizer more than the generation it was forked from."""

    before: Generation
    generation: Generation
    vocabulary: Vocabulary


async def try_load(before: Generation, key: str, model: ModelDescription, forget: tuple[str, ...]) -> Candidate:
    """Load a tokenizer in a fork that does without those of `forget`. Raise InternalError if it cannot be loaded.

    Raise Ended if the fork has ended: by a crash or a bound, or because `before` had ended.
    """
    ours, theirs = socket.socketpair()
    after = AsyncChannel(ours)
    special_tokens = {name: each for name, each in model.tokenizer_config.items() if name.endswith("_token")}
    files = [
        await asyncio.to_thread(anonymous_file, model.tokenizer_json),
        anonymous_file(encode(TemplateFile(special_tokens, model.chat_template))),
        vocabulary := anonymous_file(),
    ]
    is_loaded = False
    try:
        with theirs:
            message = Load(key, model.model_id, LOAD_CPU_SECONDS, LOAD_MEMORY_BYTES, forget)
            before.control.send_descriptors(message, [theirs.fileno(), *files])
        answer = await _answer(after, model.model_id)
        if isinstance(answer, LoadFailed):
            raise InternalError(answer.reason)
        assert isinstance(answer, Loaded), "a load is answered by Loaded or LoadFailed"
        found = _read_vocabulary(model.model_id, vocabulary)
        is_loaded = True
        return Candidate(before, Generation(after, before.keys.difference(forget) | {key}), found)
    finally:
        for file in files:
            os.close(file)
        if not is_loaded:
            after.close()


def crashed(model_id: str) -> InternalError:
    """Return the error of a load whose fork has ended by itself."""
    return InternalError(
        f"the tokenizer.json of {model_id} cannot be loaded: its process ended, by a crash or beyond "
        f"{LOAD_CPU_SECONDS} s of processor time or {LOAD_MEMORY_BYTES >> 20:,} MiB of memory"
    )


def _read_vocabulary(model_id: str, file: int) -> Vocabulary:
    """Raise InternalError for one that this process could not hold, or not read."""
    if (num_bytes := os.fstat(file).st_size) > MAX_VOCABULARY_BYTES:
        raise InternalError(
            f"the vocabulary of {model_id} has {num_bytes:,} bytes, at most {MAX_VOCABULARY_BYTES:,} are read; check "
            "its tokenizer.json"
        )
    try:
        return Vocabulary(read_as(VocabularyData, os.dup(file)))
    except Exception as error:  # the library raises bare Exception
        raise InternalError(f"the vocabulary of {model_id} cannot be read: {message_of(error)}") from error


async def _answer(channel: AsyncChannel, model_id: str) -> Message:
    try:
        async with asyncio.timeout(_LOAD_SECONDS):
            return await channel.receive()
    except TimeoutError as error:
        raise InternalError(f"the tokenizer.json of {model_id} was not loaded within {_LOAD_SECONDS:g} s") from error
