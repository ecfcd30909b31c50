"""How layers become KV groups, and what a cache of a given size holds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stallfree_worker.model.errors import ModelLoadError
from stallfree_worker.model.kv_cache import KVCacheShape
from stallfree_worker.model.kv_groups import group_layers

GEMMA_270M = ([512] * 5 + [None]) * 3


def test_b12_gemma_3_270m_has_one_full_group_and_five_sliding_ones_of_three_layers() -> None:
    layers = group_layers(GEMMA_270M)
    assert [group.window_tokens for group in layers.groups] == [None, 512, 512, 512, 512, 512]
    assert layers.layers_per_group == 3
    assert [(place.group, place.place) for place in layers.places[5::6]] == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "num_groups", "layers_per_group"),
    [(4, 22, 7, 4), (12, 13, 2, 13), (0, 32, 1, 32), (32, 0, 1, 32), (1, 1, 2, 1), (5, 29, 7, 5)],
)
def test_the_size_of_a_group_leaves_the_fewest_places_empty(
    num_full: int, num_sliding: int, num_groups: int, layers_per_group: int
) -> None:
    layers = group_layers([None] * num_full + [128] * num_sliding)
    assert (len(layers.groups), layers.layers_per_group) == (num_groups, layers_per_group)


@given(windows=st.lists(st.sampled_from([None, 4, 8]), min_size=1, max_size=30))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_window(windows: list[int | None]) -> None:
    layers = group_layers(windows)
    assert [layers.groups[place.group].window_tokens for place in layers.places] == windows
    places = [(place.group, place.place) for place in layers.places]
    assert len(set(places)) == len(windows)
    assert max(place for _, place in places) < layers.layers_per_group
    sizes = Counter(windows).values()
    assert len(layers.groups) * layers.layers_per_group < len(windows) + len(sizes) * layers.layers_per_group


def test_b01_the_cache_size_counts_the_groups_and_its_error_names_both_figures() -> None:
    shape = KVCacheShape(
        layers=group_layers(GEMMA_270M), block_size=16, num_kv_heads=1, head_dim=256, dtype=torch.bfloat16
    )
    assert shape.block_bytes == 3 * 16 * 2 * 256 * 2
    assert shape.blocks_within(100 * shape.block_bytes, most_useful_tokens=10**6) == 98
    assert shape.blocks_within(100 * shape.block_bytes, most_useful_tokens=33) == 18
    assert shape.blocks_within(8 * shape.block_bytes, most_useful_tokens=33) == 6
    with pytest.raises(ModelLoadError, match=rf"{7 * shape.block_bytes} bytes.* {8 * shape.block_bytes}.*8 blocks"):
        shape.blocks_within(7 * shape.block_bytes, most_useful_tokens=33)
