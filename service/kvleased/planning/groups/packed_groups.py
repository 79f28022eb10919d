"""Own the groups of layers whose pages differ, where all pages of a block lie together and may have any bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from kvlease.geometry import ceil_div, floor_div
from kvlease.spec import LayerSpec, RingState, SlidingWindow, SlidingWindowMLA, StateSpace
from kvleased.planning.groups.merging import joins_table


def packed_groups(layers: Sequence[LayerSpec]) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return groups of layers, each sharing a table, cut so that every group takes about as many bytes of a block.

    Layers that can share a table are one bucket. A bucket with equally many layers of each page size repeats one layer
    of each, and can be cut between repeats; see `_repeats_per_group`. Buckets of states, which take few blocks, are cut
    further, until their groups are no larger than the largest group of another bucket; see `_cut`.
    """
    if not layers:
        return ()
    buckets = _buckets(layers)
    repeats = _repeats_per_group(buckets)
    counts = _cut(buckets, repeats)
    return tuple(
        group for bucket, count in zip(buckets, counts, strict=True) for group in bucket.cut(count)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """Layers that can share a table."""

    layers: tuple[LayerSpec, ...]
    by_page: dict[int, list[LayerSpec]]
    """The layers of each page size, in order of first appearance."""

    @property
    def repeats(self) -> int:
        """The most layers that any page size has."""
        return max(map(len, self.by_page.values()))

    @property
    def is_balanced(self) -> bool:
        """Whether all page sizes have equally many layers."""
        return len({len(layers) for layers in self.by_page.values()}) == 1

    def bytes_cut(self, num_groups: int) -> int:
        """Return the bytes that each of so many groups takes of a block."""
        return sum(
            ceil_div(len(layers), num_groups) * page for page, layers in self.by_page.items()
        )

    def cut(self, num_groups: int) -> tuple[tuple[LayerSpec, ...], ...]:
        """Return so many groups, or fewer if repeats are fewer; group i has repeats i, i + n, i + 2n and so on."""
        if num_groups == 1:
            return (self.layers,)
        repeats = [
            [layer for layer in repeat if layer is not None]
            for repeat in zip_longest(*self.by_page.values())
        ]
        return tuple(
            tuple(layer for repeat in repeats[i::num_groups] for layer in repeat)
            for i in range(min(num_groups, len(repeats)))
        )


def _buckets(layers: Sequence[LayerSpec]) -> list[_Bucket]:
    """Return the layers in buckets, each layer in the first one whose table it can share."""
    bucket_of: dict[LayerSpec, int] = {}
    firsts: list[LayerSpec] = []
    members: list[list[LayerSpec]] = []
    for layer in layers:
        if layer not in bucket_of:
            bucket_of[layer] = _home(layer, firsts)
        if bucket_of[layer] == len(firsts):
            firsts.append(layer)
            members.append([])
        members[bucket_of[layer]].append(layer)
    return [_Bucket(layers=tuple(bucket), by_page=_by_page(bucket)) for bucket in members]


def _home(layer: LayerSpec, firsts: Sequence[LayerSpec]) -> int:
    """Return the number of the first bucket that a layer can join; if there is none, the number of buckets."""
    return next((i for i, first in enumerate(firsts) if joins_table(first, layer)), len(firsts))


def _by_page(layers: Sequence[LayerSpec]) -> dict[int, list[LayerSpec]]:
    by_page: dict[int, list[LayerSpec]] = {}
    for layer in layers:
        by_page.setdefault(layer.bytes_per_page, []).append(layer)
    return by_page


def _repeats_per_group(buckets: Sequence[_Bucket]) -> int | None:
    """Return the most repeats that a group has; None if no balanced bucket has several page sizes.

    The least is the number of repeats of the longest such bucket, because those belong together; the most is that of
    the longest balanced bucket. Between the two, the choice leaves the fewest repeats missing in last groups, and of
    several choices it is the largest.
    """
    balanced = [bucket for bucket in buckets if bucket.is_balanced]
    least = max((bucket.repeats for bucket in balanced if len(bucket.by_page) > 1), default=0)
    if not least:
        return None
    most = max(bucket.repeats for bucket in balanced)
    return min(
        range(most, least - 1, -1),
        key=lambda size: sum(-bucket.repeats % size for bucket in balanced),
    )


def _cut(buckets: Sequence[_Bucket], repeats_per_group: int | None) -> list[int]:
    """Return the number of groups that each bucket is cut into.

    The anchor is the largest group that cannot be avoided: state buckets count as cut to single layers. Then each state
    bucket is cut into enough groups to keep every one within the anchor's bytes.
    """
    counts = [
        ceil_div(bucket.repeats, repeats_per_group)
        if repeats_per_group and bucket.is_balanced
        else 1
        for bucket in buckets
    ]
    are_states = [_is_state(bucket, repeats_per_group) for bucket in buckets]
    anchor_bytes = max(
        bucket.bytes_cut(len(bucket.layers) if is_state else count)
        for bucket, count, is_state in zip(buckets, counts, are_states, strict=True)
    )
    return [
        max(count, _groups_within(bucket, anchor_bytes)) if is_state else count
        for bucket, count, is_state in zip(buckets, counts, are_states, strict=True)
    ]


def _is_state(bucket: _Bucket, repeats_per_group: int | None) -> bool:
    """Tell whether a request takes few blocks of a bucket, however long the request is."""
    first = bucket.layers[0]
    if isinstance(first, SlidingWindow | SlidingWindowMLA):
        return repeats_per_group is None
    return isinstance(first, StateSpace | RingState)


def _groups_within(bucket: _Bucket, anchor_bytes: int) -> int:
    """Return how many groups keep a state bucket's layers within the anchor's bytes."""
    layers_per_group = max(1, floor_div(anchor_bytes, bucket.layers[0].bytes_per_page))
    return ceil_div(len(bucket.layers), layers_per_group)
