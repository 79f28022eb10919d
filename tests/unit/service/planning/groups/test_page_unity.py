"""Laws of page unity: pages grow to the largest, by longer blocks if that is exact, and else by padding."""

from itertools import chain

import pytest

from kvlease.errors import InvalidError
from kvlease.spec import LayerSpec
from tests.unit.service.planning.specs import (
    chunk,
    full,
    grouped,
    hidden,
    latent,
    latent_window,
    states,
    times,
    window,
)


def test_smaller_page_takes_a_longer_block_where_that_is_exact() -> None:
    """A page with half the heads gets twice the tokens."""
    groups = grouped(full(), window(num_kv_heads=1))

    assert [group.tokens_per_block for group in groups] == [16, 32]
    assert {group.bytes_per_page for group in groups} == {8192}


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(window(head_size=96), id="window"),
        pytest.param(states(), id="state"),
        pytest.param(latent_window(head_size=96), id="latent-window"),
        pytest.param(latent_window(head_size=96, page_multiple_bytes=1000), id="aligned-window"),
    ],
)
def test_other_pages_are_padded(layer: LayerSpec) -> None:
    """A page that does not divide the largest is padded; a state's page is always padded."""
    groups = grouped(full(num_kv_heads=4), layer)

    assert [group.bytes_per_page for group in groups] == [16384, 16384]
    assert groups[1].tokens_per_block == 16


def test_padding_grows_with_a_longer_block() -> None:
    """If a block gets n times the tokens, its padded page becomes n times as large."""
    groups = grouped(full(), window(num_kv_heads=1, head_size=32, bytes_per_page_padded=4096))

    assert (groups[1].tokens_per_block, groups[1].bytes_per_page) == (32, 8192)


def test_aligned_page_grows_by_any_factor() -> None:
    """A longer block's aligned page may be smaller than as many aligned pages; then it is padded to those."""
    aligned = latent(head_size=584, tokens_per_block=64, page_multiple_bytes=576)

    groups = grouped(aligned, window(bytes_per_state_packed=11700))

    assert [group.bytes_per_page for group in groups] == [374400, 374400]


def test_latent_page_that_does_not_divide_is_refused() -> None:
    """Kernels read latent pages without gaps, so a page that would need padding is refused with both sizes."""
    with pytest.raises(InvalidError) as refusal:
        grouped(latent(head_size=96), window(), latent_window())

    error = refusal.value
    assert (error.rule, error.need, error.available) == ("page_size_not_unifiable", 8192, 1536)


def test_windows_beside_latent_pages_may_keep_every_token_instead() -> None:
    """Latent layers and plain windows can be one group with pages of their own, if windows keep every token."""
    (group,) = grouped(*times(latent(head_size=96), 2), window(), drafts_with_last_layer=True)

    assert [layer.bytes_per_page for layer in group.layers] == [1536, 1536, 8192]
    assert not group.is_drafted


@pytest.mark.parametrize(
    "others",
    [
        pytest.param((chunk(),), id="no-window"),
        pytest.param((window(), chunk()), id="chunk"),
        pytest.param((window(), states()), id="state"),
        pytest.param((window(), hidden()), id="hidden-state"),
    ],
)
def test_latent_page_stays_refused_beside_others(others: tuple[LayerSpec, ...]) -> None:
    """Layers that are not plain windows cannot keep every token, so the latent page is refused."""
    with pytest.raises(InvalidError) as refusal:
        grouped(latent(head_size=96), *others)

    assert refusal.value.rule == "page_size_not_unifiable"


def test_hidden_states_fill_pages_of_the_others() -> None:
    """The block of hidden states is the largest divisor of the others' blocks that fits a page."""
    *_, group = grouped(full(), window(), hidden(num_kv_heads=10))

    assert (group.tokens_per_block, group.bytes_per_page) == (8, 8192)


def test_blocks_grow_until_a_hidden_state_fits() -> None:
    """If one token's hidden state is larger than a page, all other blocks grow, and pages of states stay."""
    layers = (states(bytes_per_page_padded=8192), states("s"), full(), hidden(head_size=9000))

    groups = grouped(*layers)

    pages = sorted({layer.bytes_per_page for layer in chain(*(group.layers for group in groups))})
    assert ({group.tokens_per_block for group in groups}, pages) == ({32, 1}, [16384])
