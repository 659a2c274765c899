"""Tests which layers share a block table, and that every layer has its own place in a block."""

from __future__ import annotations

import pytest
import torch

from tandem_engine.execution.kv_cache import KVGeometry, PagedKVCache
from tandem_engine.execution.kv_groups import LayerGroup, choose_groups
from tandem_engine.layout import GroupInfo


def every(num_layers: int, n: int, window: int) -> list[int | None]:
    """Return windows of which every n-th layer has none."""
    return [None if layer % n == n - 1 else window for layer in range(num_layers)]


def test_models_of_one_kind_of_layer_have_one_group() -> None:
    assert choose_groups([None] * 4) == ()
    assert choose_groups([16] * 4) == ()
    assert choose_groups([]) == ()


def test_layers_that_see_all_come_first_and_the_others_in_groups_as_large() -> None:
    assert choose_groups([8, None, 8, None]) == (LayerGroup((1, 3)), LayerGroup((0, 2), 8))
    assert choose_groups([8, 8, None, 8]) == (LayerGroup((2,)), *(LayerGroup((layer,), 8) for layer in (0, 1, 3)))
    assert choose_groups([4, None, 8, None])[1] == LayerGroup((0, 2), 8), "the widest window is the group's"


@pytest.mark.parametrize(
    ("num_layers", "n", "sizes"),
    [
        (42, 2, [21, 21]),  # Gemma 2 9B
        (34, 6, [5, 5, 5, 5, 5, 5, 4]),  # Gemma 3 4B
        (62, 6, [10, 10, 10, 10, 10, 10, 2]),  # Gemma 3 27B
        (32, 32, [1, 5, 5, 5, 5, 5, 5, 1]),
    ],
)
def test_groups_are_few_and_equally_large(num_layers: int, n: int, sizes: list[int]) -> None:
    groups = choose_groups(every(num_layers, n, 1024))
    assert [len(group.layers) for group in groups] == sizes
    assert sorted(layer for group in groups for layer in group.layers) == list(range(num_layers))


def test_what_gives_little_back_is_left_in_one_group() -> None:
    assert choose_groups([*[None] * 9, 16]) == (), "blocks would be nine layers large, for one with a window"
    assert choose_groups([8, None], longest_context=8) == ()
    assert choose_groups([8, None], longest_context=9) != ()


def test_layers_of_all_groups_lie_apart_in_one_pool() -> None:
    windows = every(5, 3, 8)
    geometry = KVGeometry(5, 2, 4, 4, torch.float32, groups=choose_groups(windows))
    assert geometry.places == ((1, 0), (2, 0), (0, 0), (3, 0), (4, 0))
    assert (geometry.layers_per_block, geometry.num_groups) == (1, 5)
    assert geometry.bytes_per_block == 2 * 2 * 4 * 4 * 4
    assert geometry.layout().groups == [GroupInfo([2]), *(GroupInfo([layer], 8) for layer in (0, 1, 3, 4))]
    cache = PagedKVCache(geometry, 3, torch.device("cpu"))
    assert (cache.pool.num_layers, len(cache.pool.places)) == (1, 5)
    assert KVGeometry(5, 2, 4, 4, torch.float32).layout().groups == []
