"""The gateway's side of its zygote: starts it, loads tokenizers, forks text processes, and replaces what has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from control_plane.generation import ModelDescription
from control_plane.kept_bytes import DEFAULT_BYTES, KeptBytes
from control_plane.pauses import Pauses
from control_plane.text.vocabulary import Vocabulary
from control_plane.text_processes.tokenizer_load import Candidate, Generation, crashed, try_load
from control_plane.text_processes.wire import AsyncChannel, Begin, Ended, Spawn, anonymous_file, encode
from tandem_runtime.errors import InternalError, Unavailable
from tandem_runtime.log import get_logger
from tandem_runtime.tasks import TaskSet

log = get_logger(__name__)

_FAILED_SECONDS = 10.0
_MAX_FAILED_SECONDS = 320.0
"""A file that could not be loaded is not tried again for this long, twice as long after each failure: a load may take a
minute, and other models wait for it."""
_MAX_LOADS = 2
"""Forks at a time that try a tokenizer: a file that takes a minute until it fails must not delay all others."""
_MAX_TRIES = 3
"""Of one load, if the generation that it was forked from has ended meanwhile."""
_END_SECONDS = 5.0
_FIRST_PAUSE_SECONDS = 0.1
_MAX_PAUSE_SECONDS = 10.0
"""Between two starts of a root that ends at once; each pause is twice as long as the one before."""


class ZygoteLink:
    """Owns the zygote. `start` before the first request, `close` after the last."""

    def __init__(
        self,
        public_texts: Mapping[str, str] | None = None,
        max_gone_bytes: int = DEFAULT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_gone_bytes`: of tokenizer files of models that are not served any more, and stay loaded."""
        self._public_texts = dict(public_texts or {})
        self._root: AsyncChannel | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._generation: Generation | None = None
        self._vocabularies: dict[str, Vocabulary] = {}
        """Of the tokenizers of all generations, by text key."""
        self._failures: Pauses[str] = Pauses(clock)
        self._kept: KeptBytes[str] = KeptBytes(max_gone_bytes)
        self._served: Callable[[], Container[str]] = frozenset
        self._trying = asyncio.Semaphore(_MAX_LOADS)
        self._taking_over = asyncio.Lock()
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

    def keep(self, served: Callable[[], Container[str]]) -> None:
        """Keep the tokenizers of these text keys, whatever they are at a time. What others may keep is bounded."""
        self._served = served

    @property
    def keys(self) -> frozenset[str]:
        """The text keys of the tokenizers that are loaded."""
        return frozenset() if self._generation is None else self._generation.keys

    def is_loaded(self, model: ModelDescription) -> bool:
        return model.text_key in self.keys and model.text_key in self._vocabularies

    def vocabulary_if_loaded(self, generation: Generation, model: ModelDescription) -> Vocabulary | None:
        """Return the vocabulary of a model, if the text processes of a generation have its tokenizer."""
        key = model.text_key
        vocabulary = self._vocabularies.get(key) if key in generation.keys else None
        if vocabulary is not None:
            self._kept.use(key)
        return vocabulary

    async def load(self, model: ModelDescription) -> None:
        """Have a model's tokenizer loaded, so that new text processes have it. Raise InternalError if it cannot be."""
        key = model.text_key
        self._failures.raise_if_paused(key)
        loading = self._loads.get(key)
        if loading is None:
            loading = self._loads[key] = asyncio.create_task(self._load(key, model), name="text-tokenizer")
            loading.add_done_callback(lambda _: self._loads.pop(key, None))
        await asyncio.shield(loading)  # a caller that leaves must not end the load for others

    async def _load(self, key: str, model: ModelDescription) -> None:
        async with self._trying:
            await self._ready.wait()
            if key in self._current().keys and key in self._vocabularies:
                return
            self._failures.raise_if_paused(key)
            started = time.monotonic()
            try:
                await self._take_over(key, model, await self._try(key, model))
            except InternalError as error:
                self._failures.failed(key, error, _FAILED_SECONDS, _MAX_FAILED_SECONDS)
                log.warning("tokenizer_failed", model=model.model_id, error=error.message)
                raise
            self._failures.forget(key)
            log.info("tokenizer_loaded", model=model.model_id, seconds=round(time.monotonic() - started, 3))

    async def _try(self, key: str, model: ModelDescription) -> Candidate:
        """Load a tokenizer in a fork of the current generation. Raise InternalError, Unavailable."""
        for _ in range(_MAX_TRIES):
            await self._ready.wait()
            before = self._current()
            try:
                return await try_load(before, key, model, self._drop_what_is_gone(before))
            except Ended:
                if before.is_current:
                    break
        raise crashed(model.model_id)

    async def _take_over(self, key: str, model: ModelDescription, candidate: Candidate) -> None:
        """Make a candidate the current generation. It is loaded again if another one took over meanwhile."""
        async with self._taking_over:
            while not candidate.before.is_current:
                candidate.generation.control.close()
                candidate = await self._try(key, model)
            self._vocabularies[key] = candidate.vocabulary
            self._kept.put(key, len(model.tokenizer_json))
            self._retire(candidate.before)
            self._generation = candidate.generation
            self._ready.set()
            self._tasks.spawn(self._watch(candidate.generation), name="text-generation")

    def _current(self) -> Generation:
        """Return the generation that forks now. Raise Unavailable if the zygote does not run."""
        if self._generation is None or self._is_closed:
            raise Unavailable("the gateway's text processes have ended; try again", retry_after_seconds=1.0)
        return self._generation

    def _drop_what_is_gone(self, generation: Generation) -> tuple[str, ...]:
        """Return which tokenizers the next generation does without."""
        for key in self._kept.excess(self._served()):
            self._vocabularies.pop(key, None)
        return tuple(key for key in generation.keys if key not in self._kept)

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
