"""Which layers share a block table: layers that look back equally far, in groups of one size.

Blocks of all groups are equal in bytes, so that one pool serves them all, as in vLLM's hybrid KV cache: a block holds
the keys and values of `layers_per_group` layers of whichever group owns it. Used by `kv_cache`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from stallfree_worker.engine.step import KVGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlace:
    """Where the keys and values of one layer are."""

    group: int
    place: int
    """Which of the group's layers it is, from 0 to `layers_per_group - 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedLayers:
    groups: tuple[KVGroup, ...]
    """Those without a window first, and then by window."""
    layers_per_group: int
    places: tuple[LayerPlace, ...]
    """One for every layer of the model."""


def group_layers(windows: Sequence[int | None]) -> GroupedLayers:
    """`windows` tells of every layer how far it looks back.

    A group is as large as the layers of one kind are many: of that kind which leaves the fewest places of groups
    empty; larger kinds are split. Gemma 3 270M, with 3 full and 15 sliding layers, has 1 + 5 groups of 3.
    """
    layers_by_window: dict[int | None, list[int]] = defaultdict(list)
    for layer, window in enumerate(windows):
        layers_by_window[window].append(layer)
    counts = [len(layers) for layers in layers_by_window.values()]
    size = min(
        counts, key=lambda candidate: (sum([ceil(count / candidate) for count in counts]) * candidate, -candidate)
    )
    groups: list[KVGroup] = []
    place_by_layer: dict[int, LayerPlace] = {}
    for window in sorted(layers_by_window, key=lambda window: window or 0):
        layers = layers_by_window[window]
        for index, layer in enumerate(layers):
            if index % size == 0:
                groups.append(KVGroup(window_tokens=window, num_layers=min(size, len(layers) - index)))
            place_by_layer[layer] = LayerPlace(group=len(groups) - 1, place=index % size)
    places = tuple([place_by_layer[layer] for layer in range(len(windows))])
    return GroupedLayers(groups=tuple(groups), layers_per_group=size, places=places)
