"""The gateway's side of its zygote: starts it, loads tokenizers, forks text processes, and replaces what has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from control_plane.generation import ModelDescription
from control_plane.text.vocabulary import Vocabulary, VocabularyData
from control_plane.text_processes.wire import (
    AsyncChannel,
    Begin,
    Ended,
    Load,
    Loaded,
    LoadFailed,
    Message,
    Spawn,
    TemplateFile,
    anonymous_file,
    encode,
    read_as,
)
from tandem_runtime.errors import InternalError, Unavailable
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

LOAD_CPU_SECONDS = 60
LOAD_MEMORY_BYTES = 2 << 30
_LOAD_SECONDS = 180.0
_FAILED_SECONDS = 10.0
"""A file that could not be loaded is not tried again for this long."""
MAX_TOKENIZERS = 32
"""With more, the zygote starts anew, and loads what is still asked for."""
_END_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 10.0
"""Between two starts of a root that ends at once; each pause is twice as long as the one before."""


@dataclass
class Generation:
    """A process that forks text processes, and the tokenizers that it has loaded."""

    control: AsyncChannel
    keys: frozenset[str] = frozenset()
    is_current: bool = True


@dataclass
class _Known:
    """What is known of the tokenizers, over all generations."""

    vocabularies: dict[str, Vocabulary] = field(default_factory=dict)
    failures: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Why a tokenizer could not be loaded, and until when it is not tried again."""


class ZygoteLink:
    """Owns the zygote. `start` before the first request, `close` after the last."""

    def __init__(self, public_texts: Mapping[str, str] | None = None) -> None:
        self._public_texts = dict(public_texts or {})
        self._root: AsyncChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._generation: Generation | None = None
        self._known = _Known()
        self._loading = asyncio.Lock()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._ready = asyncio.Event()
        """Set while there is a generation that forks."""
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        self._tasks = TaskSet()
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The root's process id."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the root by exec, and its first generation. Call on the event loop."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "control_plane.text_processes.zygote", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,
            )
        self._root = AsyncChannel(ours)
        self._generation = self._begin(self._root)
        self._ready.set()
        self._tasks.spawn(self._watch_root(self._root, self._process), name="text-zygote")

    async def close(self) -> None:
        """End the zygote. Text processes end when their own connections are closed."""
        self._is_closed = True
        self._ready.set()  # who waits gets Unavailable
        if self._generation is not None:
            self._generation.control.close()
        if self._root is not None:
            self._root.close()
        for task in self._tasks:
            task.cancel()
        if self._process is not None:
            await asyncio.to_thread(_end, self._process)

    async def spawn(self, *, is_background: bool, max_memory_bytes: int) -> tuple[AsyncChannel, Generation]:
        """Fork a text process; its first message is Hello. Waits while the zygote is being replaced."""
        while True:
            await self._ready.wait()
            generation = self._current()
            ours, theirs = socket.socketpair()
            with theirs:
                try:
                    generation.control.send_descriptors(Spawn(is_background, max_memory_bytes), [theirs.fileno()])
                except Ended:
                    ours.close()
                    self._lost(generation)
                else:
                    return AsyncChannel(ours), generation

    def vocabulary_if_loaded(self, generation: Generation, model: ModelDescription) -> Vocabulary | None:
        """Return the vocabulary of a model, if the text processes of a generation have its tokenizer."""
        return self._known.vocabularies.get(model.identity) if model.identity in generation.keys else None

    async def load(self, model: ModelDescription) -> None:
        """Have a model's tokenizer loaded, so that new text processes have it. Raise InternalError if it cannot be."""
        key = model.identity
        loading = self._loads.get(key)
        if loading is None:
            loading = self._loads[key] = asyncio.create_task(self._load_in_turn(key, model), name="text-tokenizer")
            loading.add_done_callback(lambda _: self._loads.pop(key, None))
        await asyncio.shield(loading)  # a caller that leaves must not end the load for others

    async def _load_in_turn(self, key: str, model: ModelDescription) -> None:
        async with self._loading:
            await self._ready.wait()
            if key in self._current().keys and key in self._known.vocabularies:
                return
            until, reason = self._known.failures.get(key, (0.0, ""))
            if time.monotonic() < until:
                raise InternalError(reason)
            if len(self._current().keys) >= MAX_TOKENIZERS:
                self._known.vocabularies.clear()
                self._lost(self._current())
            started = time.monotonic()
            try:
                await self._load(key, model)
            except InternalError as error:
                self._known.failures[key] = time.monotonic() + _FAILED_SECONDS, error.message
                log.warning("tokenizer_failed", model=model.model_id, error=error.message)
                raise
            self._known.failures.pop(key, None)
            log.info("tokenizer_loaded", model=model.model_id, seconds=round(time.monotonic() - started, 3))

    def _current(self) -> Generation:
        """Return the generation that forks now. Raise Unavailable if the zygote does not run."""
        if self._generation is None or self._is_closed:
            raise Unavailable("the gateway's text processes have ended; try again", retry_after_seconds=1.0)
        return self._generation

    async def _load(self, key: str, model: ModelDescription) -> None:
        before = self._current()
        ours, theirs = socket.socketpair()
        after = AsyncChannel(ours)
        special_tokens = {name: each for name, each in model.tokenizer_config.items() if name.endswith("_token")}
        files = [
            await asyncio.to_thread(anonymous_file, model.tokenizer_json),
            anonymous_file(encode(TemplateFile(special_tokens, model.chat_template))),
            vocabulary := anonymous_file(),
        ]
        is_taken_over = False
        try:
            with theirs:
                message = Load(key, model.model_id, LOAD_CPU_SECONDS, LOAD_MEMORY_BYTES)
                before.control.send_descriptors(message, [theirs.fileno(), *files])
            answer = await _answer(after, model.model_id)
            if isinstance(answer, LoadFailed):
                raise InternalError(answer.reason)
            assert isinstance(answer, Loaded), "a load is answered by Loaded or LoadFailed"
            self._known.vocabularies[key] = Vocabulary(read_as(VocabularyData, os.dup(vocabulary)))
            self._take_over(Generation(after, before.keys | {key}))
            is_taken_over = True
        except Ended:
            raise InternalError(
                f"the tokenizer.json of {model.model_id} cannot be loaded: its process ended, by a crash or beyond "
                f"{LOAD_CPU_SECONDS} s of processor time or {LOAD_MEMORY_BYTES >> 20:,} MiB of memory"
            ) from None
        finally:
            for file in files:
                os.close(file)
            if not is_taken_over:
                after.close()

    def _take_over(self, after: Generation) -> None:
        if self._generation is not None:
            self._retire(self._generation)
        self._generation = after
        self._ready.set()
        self._tasks.spawn(self._watch(after), name="text-generation")

    def _begin(self, root: AsyncChannel) -> Generation:
        ours, theirs = socket.socketpair()
        texts = anonymous_file(encode(self._public_texts))
        try:
            with theirs:
                root.send_descriptors(Begin(), [theirs.fileno(), texts])
        finally:
            os.close(texts)
        generation = Generation(AsyncChannel(ours))
        self._tasks.spawn(self._watch(generation), name="text-generation")
        return generation

    async def _watch(self, generation: Generation) -> None:
        await generation.control.wait_ended()
        if generation.is_current and not self._is_closed:
            self._lost(generation)

    async def _watch_root(self, root: AsyncChannel, process: subprocess.Popen[bytes]) -> None:
        """Start another root when this one dies; its descendants end with their connections."""
        started = time.monotonic()
        await root.wait_ended()
        if self._is_closed:
            return
        log.error("text_zygote_ended", pid=process.pid)
        root.close()
        self._root = None
        if self._generation is not None:
            self._retire(self._generation)
        await asyncio.to_thread(_end, process)
        if time.monotonic() - started > _MAX_PAUSE_SECONDS:
            self._pause_seconds = _FIRST_PAUSE_SECONDS
        await asyncio.sleep(self._pause_seconds)
        self._pause_seconds = min(2 * self._pause_seconds, _MAX_PAUSE_SECONDS)
        self.start()

    def _lost(self, generation: Generation) -> None:
        """Begin anew from the root after a generation has died; tokenizers are loaded as they are asked for."""
        if not generation.is_current:
            return
        self._retire(generation)
        log.warning("text_generation_ended", num_tokenizers=len(generation.keys))
        if self._root is not None:
            with contextlib.suppress(Ended):  # the root has died, too: its watcher starts another
                self._generation = self._begin(self._root)
                self._ready.set()

    def _retire(self, generation: Generation) -> None:
        """Leave a generation without a successor; its text processes end as soon as they have no job."""
        generation.is_current = False
        generation.control.close()
        self._generation = None
        self._ready.clear()


async def _answer(channel: AsyncChannel, model_id: str) -> Message:
    try:
        async with asyncio.timeout(_LOAD_SECONDS):
            return await channel.receive()
    except TimeoutError as error:
        raise InternalError(f"the tokenizer.json of {model_id} was not loaded within {_LOAD_SECONDS:g} s") from error


def _environment() -> dict[str, str]:
    """Return the environment of the zygote: without our settings, some of which are secret, and without threads."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    code = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)  # the same as ours
    return {
        **kept,
        "PYTHONPATH": code,
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for the root's end, which follows that of its connection."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
