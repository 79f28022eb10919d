"""Laws of groups of equal pages: how many layers a group has, and which."""

import pytest

from kvleased.planning.groups.equal_pages import equal_page_groups
from tests.unit.service.planning.specs import (
    full,
    latent_window,
    times,
    window,
)


@pytest.mark.parametrize(
    ("num_windows", "num_full", "sizes"),
    [
        pytest.param(12, 13, [12, 13], id="below-half-as-many-again-the-largest-rules"),
        pytest.param(30, 20, [15, 15, 20], id="from-there-on-the-smallest-rules"),
        pytest.param(5, 1, [1, 1, 1, 1, 1, 1], id="one-beside-many"),
    ],
)
def test_group_size_is_the_smallest_or_largest_set(
    num_windows: int, num_full: int, sizes: list[int]
) -> None:
    """If the largest set is below 1.5 times the smallest, groups have its size, else the smallest set's."""
    groups = equal_page_groups([*times(window(), num_windows), *times(full(), num_full)])

    assert [len(group) for group in groups] == sizes


def test_groups_take_turns_in_model_order() -> None:
    """Group i of k has layers i, i + k and so on, so that pipeline stages stay even."""
    groups = equal_page_groups([*times(window(), 4), *times(full(), 2)])

    assert [layer.name for layer in groups[1]] == ["window.1", "window.3"]


def test_layers_that_merge_join_the_first_set() -> None:
    """A later spec joins the first set with which it can be merged."""
    layers = [full(), window(), full("b", is_causal=False), full("c", window_tokens=64)]

    groups = equal_page_groups(layers)

    assert [[layer.name for layer in group] for group in groups] == [["full"], ["b"], ["c"], ["window"]]  # fmt: skip


def test_layers_that_record_another_window_are_a_set_of_their_own() -> None:
    """Two recorded windows are no conflict if there are several groups."""
    layers = [window(), full("a", window_tokens=64), full("b", window_tokens=32), full("c")]

    groups = equal_page_groups(layers)

    assert [[layer.name for layer in group] for group in groups] == [["window"], ["a"], ["c"], ["b"]]  # fmt: skip


def test_merged_layers_keep_their_names_and_backends() -> None:
    """Layers of one set keep their own names and backends."""
    layers = [full("a", backend="X"), full("b", backend="Y", is_causal=False)]

    ((first, second),) = equal_page_groups(layers)

    assert first == second
    assert [(first.name, first.backend), (second.name, second.backend)] == [("a", "X"), ("b", "Y")]


def test_latent_windows_of_several_head_sizes_stay_apart() -> None:
    """Layers that keep different bytes are never merged, in whatever order they come."""
    wide = latent_window("wide", head_size=128, tokens_per_block=8)

    groups = equal_page_groups([wide, latent_window()])

    assert [len(group) for group in groups] == [1, 1]
