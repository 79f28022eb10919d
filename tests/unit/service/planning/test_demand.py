"""Laws of demand: how many blocks one request takes for each kind of layer, and how long its table row is."""

from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.spec import CrossAttention, EncoderOnly, LayerSpec, RingState
from kvleased.planning.demand import Demand, blocks_per_request, ranks_sharing, table_blocks
from tests.unit.service.planning.specs import (
    chunk,
    full,
    hidden,
    latent,
    latent_window,
    states,
    window,
)

CROSS = CrossAttention(
    name="cross", tokens_per_block=16, num_kv_heads=2, head_size=64, dtype="float16"
)
ENCODER = EncoderOnly(
    name="encoder", tokens_per_block=16, num_kv_heads=2, head_size=64, dtype="float16"
)
RING = RingState(name="ring", tokens_per_block=8, num_kv_heads=1, head_size=64, dtype="float32")
STATES = states(num_speculative_blocks=3, num_checkpoint_blocks=1)


def demand(**changes: Any) -> Demand:
    """Return the demand of a request of 1000 tokens, with 100 in flight and 40 tokens of an encoder."""
    fields: dict[str, Any] = {"num_tokens": 1000, "in_flight_tokens": 100, "encoder_tokens": 40}
    return Demand(**{**fields, **changes})


@pytest.mark.parametrize(
    ("spec", "changes", "blocks", "entries"),
    [
        pytest.param(full(), {}, 63, 63, id="every-token"),
        pytest.param(latent(), {"context_ranks": 4}, 16, 16, id="tokens-shared-by-ranks"),
        pytest.param(hidden(), {}, 63, 63, id="hidden-state"),
        pytest.param(window(), {}, 16, 63, id="window-may-start-inside-a-block"),
        pytest.param(window(retained_tokens=14), {}, 17, 63, id="window-with-retained-tokens"),
        pytest.param(latent_window(), {"num_tokens": 20}, 3, 2, id="window-beyond-the-request"),
        pytest.param(
            window(is_context_sharded=False), {"context_ranks": 2}, 16, 63, id="window-on-each-rank"
        ),
        pytest.param(chunk(), {}, 11, 63, id="chunk-with-tokens-in-flight"),
        pytest.param(chunk(), {"num_tokens": 20}, 2, 2, id="chunk-beyond-the-request"),
        pytest.param(CROSS, {}, 3, 63, id="cross-attention-by-the-encoder"),
        pytest.param(ENCODER, {}, 0, 63, id="encoder-only"),
        pytest.param(RING, {}, 1, 1, id="ring"),
        pytest.param(STATES, {}, 4, 4, id="current-state"),
        pytest.param(STATES, {"state_mode": "align"}, 6, 66, id="states-at-block-ends"),
        pytest.param(STATES, {"state_mode": "all"}, 66, 66, id="all-states"),
    ],
)
def test_request_takes_blocks_by_kind(
    spec: LayerSpec, changes: dict[str, Any], blocks: int, entries: int
) -> None:
    """Each kind of layer has its own formula for blocks, and for entries of a row."""
    asked = demand(**changes)

    assert (blocks_per_request(spec, asked), table_blocks(spec, asked)) == (blocks, entries)


def test_sharded_window_on_several_ranks_is_refused() -> None:
    """A window that several context ranks share is refused."""
    with pytest.raises(InvalidError) as refusal:
        blocks_per_request(window(), demand(context_ranks=2))

    assert (refusal.value.rule, refusal.value.need) == ("dcp_sliding_window", 2)


def test_ranks_share_only_sharded_layers() -> None:
    """Context ranks share only layers that are split; other layers are whole on each rank."""
    assert [ranks_sharing(spec, 4) for spec in (full(), states())] == [4, 1]
