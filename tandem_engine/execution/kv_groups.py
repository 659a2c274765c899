"""Chooses the groups of layers that share a block table.

All layers of a model share one table, unless some layers have a window and others have none: then layers with a window
free the blocks behind it, and the others keep theirs. One pool serves all groups, so all blocks have one size:

    layers            0 1 2 3 4 5 6 7 8 9 10 11        w w w w w F w w w w w F: every sixth has no window
    group 0           F: 5 11                          the layers without a window
    groups 1 to 5     w: 0 1 | 2 3 | 4 6 | 7 8 | 9 10  the same number of layers each, the last group may have fewer

Where few layers have no window, blocks are larger than group 0 needs, which limits the number of groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_MOST_WINDOW_GROUPS = 7
_MOST_PADDED = 1.25
"""Most bytes of the blocks of all groups together, as a multiple of one block of all layers."""


@dataclass(frozen=True)
class LayerGroup:
    layers: tuple[int, ...]
    window: int | None = None
    """The widest window of its layers; None: a layer attends to all tokens before."""


def choose_groups(windows: Sequence[int | None], longest_context: int | None = None) -> tuple[LayerGroup, ...]:
    """Return the groups of layers with these windows, the group without a window first; empty: one shared block table.

    The result depends only on the model, so all its workers have the same block layout. `longest_context` is the
    model's own limit in tokens: a window of that length frees no block.
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
