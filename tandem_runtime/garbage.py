"""Keeps garbage collections short: a service's event loop stands still for as long as one takes."""

from __future__ import annotations

import gc
import sys

_GENERATIONAL = (1_000, 1, 4_000)
"""Of new objects before a collection of the youngest; of such collections before one of the next generation; of those
before a full one. After ten of the youngest, one of the next generation takes 37 to 45 ms with 256 prompts at once and
1,000 workers; after one it takes 12 to 24, and all together take less. A full one takes 34 to 71 ms then, and finds
next to nothing, since requests leave no cycles: this is one in minutes of a busy gateway."""
_INCREMENTAL = (1_000, 10, 4_000)
"""From Python 3.14 on a collection looks at a part of the old objects too; the second number is how small a part."""
_MAX_GROWTH = 1.5
"""Excluded objects, as a multiple of those that were there when all were looked at."""
_COUNTED_EVERY = 8
"""So many full collections: to count the excluded objects is a walk over all of them."""


def forget_what_is_loaded() -> None:
    """Exclude all objects of this moment from garbage collection: imports live as long as the process.

    A collection over them takes 40 to 150 ms, in which no stream would progress.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(_INCREMENTAL if sys.version_info >= (3, 14) else _GENERATIONAL))


def look_once_at_what_lives() -> None:
    """From now on let full collections exclude whatever they have found to live from the later ones.

    At a gateway with 1,000 workers a full collection takes 265 ms, and nearly all that it looks at lives as long as the
    workers. The first full collection excludes what is there without a look: that is what the process began with. An
    excluded object is freed when its last reference goes, as ever. What has become a cycle without references stays
    until the excluded objects are 1.5 times those of the beginning: then the next full collection looks at all.
    """
    gc.callbacks.append(_Exclusion())


class _Exclusion:
    """A callback of the collector."""

    def __init__(self) -> None:
        self._num_full = 0
        self._max_excluded = 0.0
        """0: count the excluded objects after this collection, and bound their growth."""

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            if self._num_full == 0:
                gc.freeze()
            elif self._num_full % _COUNTED_EVERY == 0 and gc.get_freeze_count() > self._max_excluded:
                self._max_excluded = 0.0
                gc.unfreeze()
            return
        self._num_full += 1
        gc.freeze()
        if not self._max_excluded:
            self._max_excluded = _MAX_GROWTH * gc.get_freeze_count()
