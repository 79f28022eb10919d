"""Laws of packed groups: pages of any size share a block, and groups are cut to take about as many bytes."""

from kvleased.planning.groups.packed_groups import packed_groups
from tests.unit.service.planning.specs import (
    full,
    grouped,
    hidden,
    latent,
    latent_window,
    names,
    states,
    times,
    window,
)


def sizes(*groups: tuple[object, ...]) -> list[int]:
    """Return how many layers each group has."""
    return [len(group) for group in groups]


def test_no_layers_make_no_packed_groups() -> None:
    """Without layers there are no groups."""
    assert packed_groups(()) == ()


def test_balanced_bucket_rules_how_others_are_cut() -> None:
    """Latent layers stay together with their indexes, and windows are cut to groups with as many repeats."""
    pairs = [*times(latent(), 2), *times(latent("index", head_size=32), 2)]

    groups = packed_groups([*pairs, *times(latent_window(), 6)])

    assert sizes(*groups) == [2 + 2, 2, 2, 2]
    assert [layer.name for layer in groups[1]] == ["latent_window.0", "latent_window.3"]


def test_longer_group_is_taken_where_fewer_repeats_are_missing() -> None:
    """Of the possible sizes, the one with the fewest missing repeats is taken, and among those the largest."""
    pairs = [*times(latent(), 2), *times(latent("index", head_size=32), 2)]

    groups = packed_groups([*pairs, *times(latent_window(), 4)])

    assert sizes(*groups) == [4, 2, 2]


def test_largest_size_wins_where_as_many_repeats_are_missing() -> None:
    """If two groups of two and one group of three both miss one repeat, the larger group is taken."""
    pairs = [*times(latent(), 2), *times(latent("index", head_size=32), 2)]

    groups = packed_groups([*pairs, *times(latent_window(), 3)])

    assert sizes(*groups) == [4, 3]


def test_longest_bucket_of_several_pages_stays_whole() -> None:
    """If a bucket has several page sizes, its repeats are the fewest that a group may have."""
    pairs = [latent(), latent("index", head_size=32)]
    windows = [*times(window(), 3), *times(window("small", num_kv_heads=1), 3)]

    assert sizes(*packed_groups([*pairs, *windows])) == [2, 6]


def test_windows_are_cut_to_the_anchor_where_nothing_is_balanced() -> None:
    """A group of windows takes no more bytes of a block than the largest group that cannot be cut."""
    groups = packed_groups([*times(full(), 2), *times(window(num_kv_heads=1), 9)])

    assert sizes(*groups) == [2, 3, 3, 3]
    assert [layer.name for layer in groups[1]] == ["window.0", "window.3", "window.6"]


def test_states_are_cut_to_single_layers_beside_a_small_anchor() -> None:
    """A state takes few blocks of a request, so that it may have many groups."""
    groups = packed_groups([*times(states(shapes=((4, 4096),)), 3), *times(full(), 2)])

    assert sizes(*groups) == [1, 1, 1, 2]


def test_windows_of_several_pages_are_all_placed() -> None:
    """A bucket with fewer repeats than groups is cut between all of them, and no layer is lost."""
    windows = [*times(window(), 3), window("small", num_kv_heads=1)]

    groups = packed_groups([latent(), *windows])

    assert sizes(*groups) == [1, 2, 1, 1]


def test_full_bucket_of_uneven_pages_stays_whole() -> None:
    """A bucket without repeats cannot be cut."""
    layers = [*times(full(), 3), full("small", num_kv_heads=1), window(head_size=8)]

    assert sizes(*packed_groups(layers)) == [4, 1]


def test_hidden_states_follow_alone() -> None:
    """Each layer of hidden states is a group with a page of its own."""
    layers = (full(), window(num_kv_heads=1), *times(hidden(), 2))

    groups = grouped(*layers, layout="BLHNC")

    assert names(groups) == [["full"], ["window"], ["hidden.0"], ["hidden.1"]]
    assert groups[2].bytes_per_page == 1024
