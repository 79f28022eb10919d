"""Laws of packed groups: pages of any bytes in a block, cut so that groups take about as many."""

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
    """There is nothing to cut."""
    assert packed_groups(()) == ()


def test_balanced_bucket_rules_how_others_are_cut() -> None:
    """Latent layers with an index each stay together; windows are cut to as many repeats a group."""
    pairs = [*times(latent(), 2), *times(latent("index", head_size=32), 2)]

    groups = packed_groups([*pairs, *times(latent_window(), 6)])

    assert sizes(*groups) == [2 + 2, 2, 2, 2]
    assert [layer.name for layer in groups[1]] == ["latent_window.0", "latent_window.3"]


def test_longer_group_is_taken_where_fewer_repeats_are_missing() -> None:
    """Among the possible sizes the one with the fewest missing repeats wins, and then the largest."""
    pairs = [*times(latent(), 2), *times(latent("index", head_size=32), 2)]

    groups = packed_groups([*pairs, *times(latent_window(), 4)])

    assert sizes(*groups) == [4, 2, 2]


def test_largest_size_wins_where_as_many_repeats_are_missing() -> None:
    """Two groups of two or one of three: both miss one repeat."""
    pairs = [*times(latent(), 2), *times(latent("index", head_size=32), 2)]

    groups = packed_groups([*pairs, *times(latent_window(), 3)])

    assert sizes(*groups) == [4, 3]


def test_longest_bucket_of_several_pages_stays_whole() -> None:
    """The repeats of one bucket with several page sizes are the least that a group may have."""
    pairs = [latent(), latent("index", head_size=32)]
    windows = [*times(window(), 3), *times(window("small", num_kv_heads=1), 3)]

    assert sizes(*packed_groups([*pairs, *windows])) == [2, 6]


def test_windows_are_cut_to_the_anchor_where_nothing_is_balanced() -> None:
    """A group of windows takes no more bytes of a block than the largest group that must be."""
    groups = packed_groups([*times(full(), 2), *times(window(num_kv_heads=1), 9)])

    assert sizes(*groups) == [2, 3, 3, 3]
    assert [layer.name for layer in groups[1]] == ["window.0", "window.3", "window.6"]


def test_states_are_cut_to_single_layers_beside_a_small_anchor() -> None:
    """A state takes few blocks of a request, so that its groups may be many."""
    groups = packed_groups([*times(states(shapes=((4, 4096),)), 3), *times(full(), 2)])

    assert sizes(*groups) == [1, 1, 1, 2]


def test_windows_of_several_pages_are_all_placed() -> None:
    """Where a bucket has fewer repeats than groups, it is cut between all of them and no layer is lost."""
    windows = [*times(window(), 3), window("small", num_kv_heads=1)]

    groups = packed_groups([latent(), *windows])

    assert sizes(*groups) == [1, 2, 1, 1]


def test_full_bucket_of_uneven_pages_stays_whole() -> None:
    """Without repeats there is nowhere to cut."""
    layers = [*times(full(), 3), full("small", num_kv_heads=1), window(head_size=8)]

    assert sizes(*packed_groups(layers)) == [4, 1]


def test_hidden_states_follow_alone() -> None:
    """Each layer of hidden states is a group with its own page."""
    layers = (full(), window(num_kv_heads=1), *times(hidden(), 2))

    groups = grouped(*layers, layout="BLHNC")

    assert names(groups) == [["full"], ["window"], ["hidden.0"], ["hidden.1"]]
    assert groups[2].bytes_per_page == 1024
