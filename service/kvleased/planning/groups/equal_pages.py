"""Own the groups of layers with equal pages: equal layers together, about as many layers in each group."""

from collections.abc import Sequence
from dataclasses import replace

from kvlease.geometry import ceil_div
from kvlease.spec import LayerSpec
from kvleased.planning.groups.merging import comparable, joins_spec, merged


def equal_page_groups(layers: Sequence[LayerSpec]) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return groups of layers of one spec each, in order of first appearance.

    Every group takes as many pages of a block as the largest group has layers. So a group has as many layers as the
    smallest set of equal layers, or as the largest set if that is below 1.5 times the smallest. A set of n layers makes
    k = ceil(n / size) groups, and group i has layers i, i + k, i + 2k and so on, so that each stage of a pipeline gets
    about as many layers of every group.
    """
    buckets = _buckets(layers)
    least, most = min(map(len, buckets)), max(map(len, buckets))
    size = most if 2 * most < 3 * least else least
    counts = ((bucket, ceil_div(len(bucket), size)) for bucket in buckets)
    return tuple(of_one_spec(bucket[i::count]) for bucket, count in counts for i in range(count))


def of_one_spec(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers, each with the spec that stands for all of them.

    Raises:
        InvalidError: no spec stands for all of them (rule specs_not_mergeable, or window_size_conflict).
    """
    spec = merged(layers)
    return tuple(replace(spec, name=layer.name, backend=layer.backend) for layer in layers)


def _buckets(layers: Sequence[LayerSpec]) -> list[list[LayerSpec]]:
    """Return the layers in sets, each of which can have one spec."""
    layers_of: dict[LayerSpec, list[LayerSpec]] = {}
    for layer in layers:
        layers_of.setdefault(layer, []).append(layer)
    specs_of: list[list[LayerSpec]] = []
    buckets: list[list[LayerSpec]] = []
    for spec, equal in layers_of.items():
        seen = comparable(spec)
        home = next((i for i, specs in enumerate(specs_of) if joins_spec(specs, seen)), None)
        if home is None:
            specs_of.append([seen])
            buckets.append(equal)
        else:
            specs_of[home].append(seen)
            buckets[home].extend(equal)
    return buckets
