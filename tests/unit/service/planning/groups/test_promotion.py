"""Laws of promotion: in a model that must be one group, windows keep every token."""

import pytest

from kvlease.errors import InvalidError
from kvlease.spec import MLA, LayerSpec
from tests.unit.service.planning.specs import (
    chunk,
    full,
    grouped,
    latent,
    latent_window,
    states,
    window,
)


def test_windows_are_promoted_beside_full_attention() -> None:
    """A promoted window is full attention that records its window, with the full layers' blocks."""
    (group,) = grouped(full(), window(tokens_per_block=32, retained_tokens=3), one_group=True)

    assert group.layers == (full(window_tokens=128),) * 2


def test_chunks_are_promoted_beside_full_attention() -> None:
    """A promoted chunk is full attention that records the chunk."""
    (group,) = grouped(chunk(), full(), one_group=True)

    assert group.spec == full(chunk_tokens=64)


def test_latent_windows_are_promoted_to_latent_attention() -> None:
    """A promoted latent window has all fields of a latent layer, so the model can be planned."""
    (group,) = grouped(latent(head_size=96), latent_window(is_replayed=True), one_group=True)

    assert group.layers[1] == latent(window_tokens=128)
    assert isinstance(group.layers[1], MLA)


def test_windows_keep_their_blocks_where_full_layers_disagree() -> None:
    """If full layers have different blocks, a window has none to take over, and promotion fails."""
    with pytest.raises(InvalidError) as refusal:
        grouped(full(), full("b", tokens_per_block=32), window(), one_group=True)

    assert refusal.value.rule == "promotion_failed"


def test_padding_grows_with_a_promoted_block() -> None:
    """Padding for a smaller block's content grows with the promoted block."""
    padded = window(tokens_per_block=8, bytes_per_page_padded=5000)

    (group,) = grouped(full(), padded, one_group=True)

    assert [layer.bytes_per_page for layer in group.layers] == [8192, 8192]


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((window(), window("b", window_tokens=64)), id="nothing-keeps-all"),
        pytest.param((full(), states()), id="states"),
    ],
)
def test_layers_without_a_common_table_are_refused(layers: tuple[LayerSpec, ...]) -> None:
    """The refusal names the setting to change."""
    with pytest.raises(InvalidError) as refusal:
        grouped(*layers, one_group=True)

    assert (refusal.value.rule, refusal.value.resource) == ("promotion_failed", "one_group")


def test_replicated_attention_is_promoted_apart() -> None:
    """Layers that every context rank keeps whole cannot share a table with layers that are split."""
    replicated = (window(is_context_sharded=False), full("b", is_context_sharded=False))

    groups = grouped(full(), full("c"), *replicated, one_group=True)

    assert [group.layer_names for group in groups] == [("full", "c"), ("window", "b")]
