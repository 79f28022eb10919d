"""Laws of merging: which layers can have one spec, and which can share one table."""

from dataclasses import replace

import pytest

from kvlease.errors import InvalidError
from kvlease.spec import LayerSpec, RetainedWindow, RingState, SinkAttention
from kvleased.planning.groups.merging import merged, share_table
from tests.unit.service.planning.specs import (
    chunk,
    full,
    hidden,
    latent,
    latent_window,
    states,
    window,
)

_FULL = {"tokens_per_block": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "float16"}
SINK = SinkAttention(name="sink", sink_tokens=4, **_FULL)  # type: ignore[arg-type]  # by name
RETAINED = RetainedWindow(name="retained", retained_window_tokens=64, **_FULL)  # type: ignore[arg-type]
RING = RingState(name="ring", tokens_per_block=8, num_kv_heads=1, head_size=64, dtype="float32")


@pytest.mark.parametrize(
    ("specs", "one"),
    [
        pytest.param((window(), window("b")), window(), id="equal-windows"),
        pytest.param((full(), SINK), full(), id="full-then-sink-is-full"),
        pytest.param((SINK, full()), SINK, id="sink-then-full-is-sink"),
        pytest.param((full(), full("b", is_causal=False)), full(is_causal=False), id="any-causal"),
        pytest.param(
            (full(), full("b", window_tokens=64)), full(window_tokens=64), id="recorded-window"
        ),
        pytest.param((RETAINED, replace(RETAINED, name="b")), RETAINED, id="retained-windows"),
        pytest.param(
            (latent(), latent("b", decodes_several_tokens=True)),
            latent(decodes_several_tokens=True),
            id="any-decodes-several-tokens",
        ),
        pytest.param(
            (latent(page_multiple_bytes=576),),
            latent(bytes_per_page_padded=1152),
            id="multiple-becomes-padding",
        ),
        pytest.param(
            (latent(page_multiple_bytes=512),), latent(), id="multiple-that-changes-nothing"
        ),
        pytest.param(
            (latent_window(quantisation="fp8_per_tensor"), latent_window("b")),
            latent_window(),
            id="latent-windows-forget-their-quantisation",
        ),
        pytest.param(
            (latent_window(quantisation="int8_per_token_head"),),
            latent_window(bytes_per_state_packed=72),
            id="but-not-its-bytes",
        ),
        pytest.param(
            (latent_window(quantisation="nvfp4"),),
            latent_window(bytes_per_state_packed=36, num_head_slots=2),
            id="nor-its-slots",
        ),
    ],
)
def test_alike_layers_have_one_spec(specs: tuple[LayerSpec, ...], one: LayerSpec) -> None:
    """The merged spec is the first layer's, with what any of the layers records."""
    assert merged(specs) == one


@pytest.mark.parametrize(
    ("first", "other", "field"),
    [
        pytest.param(full(), window(), "kind", id="window"),
        pytest.param(full(), latent(), "kind", id="latent"),
        pytest.param(latent(), full(), "kind", id="latent-first"),
        pytest.param(RETAINED, full(), "kind", id="retained-window"),
        pytest.param(window(), latent_window(), "kind", id="latent-window"),
        pytest.param(full(), full("b", num_kv_heads=4), "num_kv_heads", id="heads"),
        pytest.param(full(), full("b", tokens_per_block=32), "tokens_per_block", id="blocks"),
        pytest.param(latent(), latent("b", role="indexer"), "role", id="roles"),
        pytest.param(
            latent(window_tokens=64), latent("b", window_tokens=128), "window_tokens", id="latent-windows"
        ),
        pytest.param(
            full(window_tokens=64), full("b", chunk_tokens=64), "chunk_tokens", id="window-and-chunk"
        ),
        pytest.param(latent_window(), latent_window("b", head_size=128), "head_size", id="head-sizes"),
        pytest.param(window(), window("b", window_tokens=64), "window_tokens", id="windows"),
        pytest.param(RING, replace(RING, head_size=8), "head_size", id="rings"),
    ],
)  # fmt: skip
def test_layers_that_differ_have_no_spec(first: LayerSpec, other: LayerSpec, field: str) -> None:
    """The refusal names the field that differs."""
    with pytest.raises(InvalidError) as refusal:
        merged((first, other))

    assert (refusal.value.rule, refusal.value.resource) == ("specs_not_mergeable", field)


def test_two_recorded_windows_are_a_conflict() -> None:
    """Layers that keep all tokens cannot be merged with two recorded windows."""
    with pytest.raises(InvalidError) as refusal:
        merged((full(window_tokens=64), full("b", window_tokens=128, num_kv_heads=4)))

    assert refusal.value.rule == "window_size_conflict"


def test_retained_windows_of_two_sizes_have_no_spec() -> None:
    """Layers with different retained windows cannot be merged."""
    with pytest.raises(InvalidError):
        merged((RETAINED, replace(RETAINED, retained_window_tokens=128)))


@pytest.mark.parametrize(
    ("specs", "shares"),
    [
        pytest.param((full(), latent(), SINK, RETAINED, hidden()), True, id="all-keep-every-token"),
        pytest.param((full(), full("b", num_kv_heads=8)), True, id="pages-differ"),
        pytest.param((full(), full("b", tokens_per_block=32)), False, id="blocks-differ"),
        pytest.param((full(), full("b", is_context_sharded=False)), False, id="ranks-differ"),
        pytest.param((full(), window()), False, id="full-and-window"),
        pytest.param((window(), window("b", head_size=8)), True, id="windows"),
        pytest.param((window(), window("b", window_tokens=64)), False, id="windows-differ"),
        pytest.param((window(), latent_window()), True, id="latent-window-joins-plain"),
        pytest.param((latent_window(), window()), False, id="plain-window-joins-no-latent"),
        pytest.param((window(), latent_window(window_tokens=64)), False, id="latent-differs"),
        pytest.param((latent_window(), latent_window(is_replayed=True)), False, id="replayed"),
        pytest.param((chunk(), chunk("b", head_size=8)), True, id="chunks"),
        pytest.param((chunk(), chunk("b", chunk_tokens=32)), False, id="chunks-differ"),
        pytest.param((states(), states("b", shapes=((1, 2048),))), True, id="states-of-a-page"),
        pytest.param((states(), states("b", shapes=((1, 1024),))), False, id="states-of-two"),
        pytest.param((RING, replace(RING, head_size=8)), True, id="rings"),
    ],
)
def test_layers_share_a_table_if_blocks_live_alike(
    specs: tuple[LayerSpec, ...], shares: bool
) -> None:
    """Layers share a table if their blocks cover the same tokens for the same time."""
    assert share_table(specs) is shares
