"""Compiles grammars in a thread, and keeps them for later requests.

The thread compiles one grammar after the other, from when the first request with it is added; answers continue
meanwhile. Each grammar is compiled once, for all requests with it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from tandem_engine.execution.grammar.matcher import Compile, GrammarFailed, MakeMatcher, Matcher
from tandem_engine.grammar import Grammar

_MAX_GRAMMARS = 64
"""Compiled grammars that are kept; the least recently used one is dropped first."""
_MAX_UNFINISHED = 32
"""Grammars that are compiled ahead; compilation of further ones starts when their request would sample."""


class CompiledGrammars:
    """One thread adds requests and asks what is ready, one computes steps (perhaps the same one), another compiles."""

    def __init__(self, guide: Callable[[], Compile]) -> None:
        """`guide` is called at the first grammar; it raises GrammarFailed if grammars are not possible."""
        self._guide = guide
        self._compile: Compile | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._grammars: OrderedDict[Grammar, Future[MakeMatcher]] = OrderedDict()
        self._lock = Lock()  # of `_grammars` and `_thread`

    def is_ready(self, grammar: Grammar) -> bool:
        """Return whether `matcher` would not wait; if it would, start the compilation now or soon."""
        with self._lock:
            if grammar not in self._grammars and self._num_unfinished >= _MAX_UNFINISHED:
                return False
            return self._future(grammar).done()

    def matcher(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of a grammar; raises GrammarFailed."""
        with self._lock:
            future = self._future(grammar)
        try:
            make = future.result()
        except GrammarFailed as error:  # each request gets its own exception
            raise GrammarFailed(str(error)) from error
        return make()

    @property
    def _num_unfinished(self) -> int:
        return sum(not future.done() for future in self._grammars.values())

    def _future(self, grammar: Grammar) -> Future[MakeMatcher]:
        if grammar not in self._grammars:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._grammars[grammar] = self._thread.submit(self._compiled, grammar)
            if len(self._grammars) > _MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(grammar)
        return self._grammars[grammar]

    def _compiled(self, grammar: Grammar) -> MakeMatcher:
        self._compile = self._compile or self._guide()
        return self._compile(grammar)


def no_guide() -> Compile:
    """Raise GrammarFailed: the default for runners without grammars."""
    raise GrammarFailed("this runner has no support for grammars")
