"""Which layers share a block table?

All of a model, unless some of its layers have a window and others have not: then the former give back the blocks behind
it, and the latter keep theirs. One pool serves them all, so a block is as large for every group:

    layers            0 1 2 3 4 5 6 7 8 9 10 11        w w w w w F w w w w w F: every sixth sees all
    group 0           F: 5 11                          as many as do not have a window
    groups 1 to 5     w: 0 1 | 2 3 | 4 6 | 7 8 | 9 10  of as many layers each, the last one of fewer if need be

Where few layers see all, blocks are larger than they need, so that there are not too many groups to keep book of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_WINDOW_GROUPS = 7
_MOST_PADDED = 1.25
"""What all groups' blocks may take together, as a multiple of what one block of all layers would."""


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    window: int | None = None
    """The widest of its layers'; None: a layer attends to all tokens before it."""


def choose_groups(windows: Sequence[int | None], longest_context: int | None = None) -> tuple[LayerGroup, ...]:
    """Return the groups of layers with these windows, those without first; none: all layers share one block table.

    It depends on the model alone, so that all workers that serve it lay out their blocks alike. `longest_context` is
    what the model was made for, in tokens: a window as long gives nothing back.
    """
    full = [layer for layer, window in enumerate(windows) if window is None]
    windowed = [layer for layer, window in enumerate(windows) if window is not None]
    if not full or not windowed:
        return ()
    widest = max(window for window in windows if window is not None)
    size = max(len(full), -(-len(windowed) // _MOST_WINDOW_GROUPS))
    starts = range(0, len(windowed), size)
    is_worth_it = size * (1 + len(starts)) <= _MOST_PADDED * len(windows)
    if not is_worth_it or (longest_context is not None and widest >= longest_context):
        return ()
    return (LayerGroup(tuple(full)), *(LayerGroup(tuple(windowed[start : start + size]), widest) for start in starts))
