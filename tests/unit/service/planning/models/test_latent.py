"""Laws of latent attention: each rank keeps one vector a token, packed as the family's kernels read it."""

import json
from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.spec import MLA, SlidingWindowMLA
from tests.unit.service.planning.models.configs import config_text, layers


@pytest.mark.parametrize(
    ("fixture", "num_layers"),
    [
        pytest.param("deepseek-v2-lite", 27, id="deepseek v2"),
        pytest.param("deepseek-v3", 61, id="deepseek v3"),
        pytest.param("kimi-k2", 61, id="kimi k2"),
    ],
)
def test_latent_is_the_same_on_every_rank(fixture: str, num_layers: int) -> None:
    """A latent has 512 elements and 64 rotary ones of 2 bytes, whatever the number of ranks."""
    one, eight = layers(config_text(fixture)), layers(config_text(fixture), ranks=8)

    assert one == eight
    assert [layer.bytes_per_page for layer in one] == [16 * 576 * 2] * num_layers


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_token", "packed_format"),
    [
        pytest.param("bfloat16", 1152, "", id="plain"),
        pytest.param("fp8", 576, "fp8", id="fp8"),
        pytest.param("fp8_ds_mla", 656, "fp8_ds_mla", id="packed in fp8"),
        pytest.param("nvfp4_ds_mla", 352, "nvfp4_ds_mla", id="packed in nvfp4"),
    ],
)
def test_latent_takes_the_bytes_of_its_packing(
    kv_dtype: str, bytes_per_token: int, packed_format: str
) -> None:
    """Each cache type of latents has its own bytes per token."""
    layer = layers(config_text("deepseek-v3"), kv_dtype)[0]

    assert isinstance(layer, MLA)
    assert layer.bytes_per_page == 16 * bytes_per_token
    assert layer.packed_format == packed_format


@pytest.mark.parametrize(
    ("fixture", "kv_dtype", "changes"),
    [
        pytest.param("deepseek-v3", "int8", {}, id="a type of heads"),
        pytest.param("deepseek-v3", "fp8_ds_mla", {"kv_lora_rank": 256}, id="another latent"),
        pytest.param("deepseek-v4-flash", "nvfp4_ds_mla", {}, id="a packing of others"),
        pytest.param("deepseek-v4-flash", "fp8_e5m2", {}, id="a type without kernels"),
    ],
)
def test_cache_types_that_latents_cannot_have_are_refused(
    fixture: str, kv_dtype: str, changes: dict[str, Any]
) -> None:
    """A cache type that is not made for the model's latents is refused."""
    with pytest.raises(InvalidError, match=kv_dtype) as refusal:
        layers(config_text(fixture, **changes), kv_dtype)

    assert refusal.value.rule == "kv_dtype_not_for_model"


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_token"),
    [
        pytest.param("", 656, id="as published"),
        pytest.param("fp8", 656, id="fp8"),
        pytest.param("bfloat16", 1152, id="plain"),
        pytest.param("nvfp4_ds_mla", 352, id="nvfp4"),
    ],
)
def test_sparse_attention_has_an_indexer_beside_it(kv_dtype: str, bytes_per_token: int) -> None:
    """V3.2 keeps latents and 132 bytes a token for the indexer's key, in blocks of at least 64."""
    attention, indexer = layers(config_text("deepseek-v3.2"), kv_dtype)[:2]

    assert isinstance(indexer, MLA)
    assert indexer.role == "indexer"
    assert (attention.tokens_per_block, indexer.tokens_per_block) == (64, 64)
    assert attention.bytes_per_page == 64 * bytes_per_token
    assert indexer.bytes_per_page == 64 * 132


@pytest.mark.parametrize(
    ("changes", "leading"),
    [
        pytest.param({}, [0, 1, 2, 3, 4, 5, 6, 7], id="all layers"),
        pytest.param({"index_topk_freq": 4}, [0, 1, 5], id="every so many"),
        pytest.param(
            {"index_topk_freq": 4, "index_skip_topk_offset": 4}, [0, 1, 2, 3, 7], id="later on"
        ),
        pytest.param({"indexer_types": ["full"] + ["shared"] * 7}, [0], id="listed"),
    ],
)
def test_layers_that_reuse_a_selection_have_no_indexer(
    changes: dict[str, Any], leading: list[int]
) -> None:
    """Only a layer that selects tokens itself keeps the keys for that."""
    text = config_text("deepseek-v3.2", model_type="glm_moe_dsa", num_hidden_layers=8, **changes)

    found = layers(text)

    attention = [layer for layer in found if isinstance(layer, MLA) and layer.role != "indexer"]
    indexers = [layer.name for layer in found if layer.name.endswith(".indexer")]
    assert indexers == [f"model.layers.{place}.self_attn.indexer" for place in leading]
    assert [place for place, item in enumerate(attention) if item.leads_index_group] == leading


def test_plain_deepseek_v4_has_pages_of_multiples_of_512() -> None:
    """In bfloat16 nothing is packed: 512 elements of 2 bytes, in pages of multiples of 512 bytes."""
    found = layers(config_text("deepseek-v4-flash"), "bfloat16")

    windows = [layer for layer in found if layer.name.endswith("swa_cache")]
    assert {layer.bytes_per_page for layer in windows} == {64 * 1024}
    assert all(isinstance(item, MLA | SlidingWindowMLA) for item in found)
    assert {getattr(layer, "page_multiple_bytes", None) for layer in found} == {512}


def test_deepseek_v4_understands_both_ways_to_say_compression() -> None:
    """A config with kinds of layer and one with ratios give the same layers."""
    kinds = {
        0: "sliding_attention",
        4: "compressed_sparse_attention",
        128: "heavily_compressed_attention",
    }
    text = config_text("deepseek-v4-flash")
    ratios = json.loads(text)["compress_ratios"][:43]

    by_kind = config_text(
        "deepseek-v4-flash", compress_ratios=None, layer_types=[kinds[ratio] for ratio in ratios]
    )

    assert layers(by_kind) == layers(text)


@pytest.mark.parametrize(
    ("changes", "complaint", "rule"),
    [
        pytest.param(
            {"compress_ratios": [0, 4]}, "2 layers", "contradictory_field", id="too few ratios"
        ),
        pytest.param(
            {"compress_ratios": [16] * 43},
            "the known values are 0, 4, 128",
            "contradictory_field",
            id="ratio",
        ),
        pytest.param(
            {"layer_types": ["mamba"] * 43}, "mamba", "unknown_architecture", id="another kind"
        ),
        pytest.param({"head_dim": 256}, "heads of 512", "contradictory_field", id="another head"),
    ],
)
def test_deepseek_v4_that_is_not_known_is_refused(
    changes: dict[str, Any], complaint: str, rule: str
) -> None:
    """Another compression or another head is refused with the known ones."""
    with pytest.raises(InvalidError, match=complaint) as refusal:
        layers(config_text("deepseek-v4-flash", **changes))

    assert refusal.value.rule == rule
