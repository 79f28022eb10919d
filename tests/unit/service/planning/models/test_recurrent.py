"""Laws of recurrent layers: states have their architecture's shapes, shared by ranks, in pages like attention's."""

import json
from collections import Counter
from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import EngineInputs
from kvlease.spec import StateSpace
from kvleased.planning.models import layers_of
from tests.unit.service.planning.models.configs import config_text, layers

MINIMAX_KINDS = (["linear_attention"] * 7 + ["full_attention"]) * 10


def states_of(text: str, ranks: int = 1) -> list[StateSpace]:
    """Return the recurrent layers of a config."""
    return [layer for layer in layers(text, ranks=ranks) if isinstance(layer, StateSpace)]


@pytest.mark.parametrize(
    ("fixture", "ranks", "num_states", "num_attention", "shapes"),
    [
        pytest.param("jamba-v0.1", 1, 28, 4, ((3, 8192), (8192, 16)), id="jamba"),
        pytest.param("jamba-v0.1", 2, 28, 4, ((3, 4096), (4096, 16)), id="jamba tp2"),
        pytest.param("mamba-2.8b", 1, 64, 0, ((3, 5120), (5120, 16)), id="mamba"),
        pytest.param("falcon-mamba-7b", 2, 64, 0, ((3, 4096), (4096, 16)), id="falcon-mamba tp2"),
        pytest.param(
            "mamba-codestral-7b", 1, 64, 0, ((3, 10240), (128, 64, 128)), id="mamba 2, 8 groups"
        ),
        pytest.param(
            "mamba-codestral-7b", 4, 64, 0, ((3, 2560), (32, 64, 128)), id="groups are shared"
        ),
        pytest.param(
            "mamba-codestral-7b", 16, 64, 0, ((3, 768), (8, 64, 128)), id="groups are copied"
        ),
        pytest.param("bamba-9b", 1, 29, 3, ((3, 8448), (128, 64, 128)), id="bamba"),
        pytest.param("bamba-9b", 2, 29, 3, ((3, 4352), (64, 64, 128)), id="bamba tp2"),
        pytest.param("nemotron-h-8b", 1, 24, 4, ((3, 10240), (128, 64, 128)), id="nemotron-h"),
        pytest.param("falcon-h1-7b", 1, 44, 44, ((3, 3584), (24, 128, 256)), id="falcon-h1"),
        pytest.param("zamba2-2.7b", 1, 54, 9, ((3, 5248), (80, 64, 64)), id="zamba2"),
        pytest.param(
            "granite-4.0-h-small", 1, 36, 4, ((3, 8448), (128, 64, 128)), id="granite hybrid"
        ),
        pytest.param("qwen3-next-80b", 2, 36, 12, ((3, 4096), (16, 128, 128)), id="qwen3-next tp2"),
        pytest.param("kimi-linear-48b", 4, 20, 7, ((3, 3072), (8, 128, 128)), id="kimi tp4"),
        pytest.param("minimax-text-01", 8, 70, 10, ((8, 128, 128),), id="minimax tp8"),
        pytest.param("lfm2-1.2b", 2, 10, 6, ((2, 1024),), id="lfm2 tp2"),
    ],
)
def test_states_have_the_shapes_of_their_architecture(
    fixture: str,
    ranks: int,
    num_states: int,
    num_attention: int,
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    """As many layers keep a state as the config says, with the shapes of one rank."""
    found = layers(config_text(fixture), ranks=ranks)

    states = Counter(layer.shapes for layer in found if isinstance(layer, StateSpace))
    assert states == {shapes: num_states}
    assert len(found) - num_states == num_attention


@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize(
    "fixture",
    ["jamba-v0.1", "bamba-9b", "zamba2-2.7b", "falcon-h1-7b", "lfm2-1.2b", "minimax-text-01"],
)
def test_pages_of_all_layers_are_equal(fixture: str, mode: str) -> None:
    """A hybrid model's layers share one pool, as the block grows until attention's page holds a state."""
    found = layers(config_text(fixture), mode=mode)

    assert len({layer.bytes_per_page for layer in found}) == 1
    assert (len({layer.tokens_per_block for layer in found}) == 1) == (mode != "none")


def test_block_of_a_newest_state_is_the_longest_request() -> None:
    """If only the newest state is kept, a block is longer than any request, and no prefix is found by it."""
    assert {state.tokens_per_block for state in states_of(config_text("jamba-v0.1"))} == {262144}
    assert {state.tokens_per_block for state in states_of(config_text("mamba-2.8b"))} == {2**20}


@pytest.mark.parametrize(
    ("fixture", "first_shape", "num_speculative_blocks"),
    [
        pytest.param("qwen3-next-80b", (5, 8192), 2, id="gated delta net"),
        pytest.param("bamba-9b", (5, 8448), 2, id="mamba 2"),
        pytest.param("jamba-v0.1", (3, 8192), 0, id="mamba 1 takes nothing back"),
    ],
)
def test_speculative_tokens_have_states_of_their_own(
    fixture: str, first_shape: tuple[int, ...], num_speculative_blocks: int
) -> None:
    """Each token that may be taken back lengthens the convolution's input and takes one more block."""
    found = layers_of(config_text(fixture), engine=EngineInputs(lookahead_tokens=2))

    state = next(layer for layer in found if isinstance(layer, StateSpace))
    assert state.shapes[0] == first_shape
    assert state.num_speculative_blocks == num_speculative_blocks


@pytest.mark.parametrize(
    ("changes", "dtypes"),
    [
        pytest.param({}, ("bfloat16", "bfloat16"), id="the model's"),
        pytest.param({"mamba_ssm_dtype": "float32"}, ("bfloat16", "float32"), id="its own"),
        pytest.param({"mamba_ssm_dtype": "auto"}, ("bfloat16", "bfloat16"), id="auto"),
    ],
)
def test_states_have_the_element_type_that_the_config_says(
    changes: dict[str, Any], dtypes: tuple[str, str]
) -> None:
    """A config may keep states in a wider type than the rest of the model."""
    state = states_of(config_text("qwen3-next-80b", **changes))[0]

    assert state.dtypes == dtypes


@pytest.mark.parametrize(
    ("fixture", "changes"),
    [
        pytest.param("falcon-h1-7b", {"mamba_d_head": "auto"}, id="head size auto"),
        pytest.param("bamba-9b", {"mamba_d_head": None}, id="no head size"),
        pytest.param("zamba2-2.7b", {"attention_head_dim": None}, id="twice the width"),
        pytest.param("zamba2-2.7b", {"mamba_headdim": None}, id="zamba's heads"),
        pytest.param("mamba-codestral-7b", {"head_dim": None}, id="mamba 2's heads"),
        pytest.param("falcon-mamba-7b", {"intermediate_size": None, "expand": 2}, id="width"),
        pytest.param("minimax-text-01", {"layer_types": MINIMAX_KINDS}, id="list"),
        pytest.param("lfm2-1.2b", {"layer_types": None}, id="places of attention"),
        pytest.param("lfm2-1.2b", {"conv_dim": None}, id="width of the convolution"),
        pytest.param("qwen3-next-80b", {"full_attention_interval": None}, id="interval"),
        pytest.param(
            "kimi-linear-48b",
            {
                "linear_attn_config": None,
                "linear_num_heads": 32,
                "linear_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                "layer_types": [
                    "full_attention" if place in (4, 8, 12, 16, 20, 24, 27) else "linear_attention"
                    for place in range(1, 28)
                ],
            },
            id="kimi in the words of transformers",
        ),
    ],
)  # fmt: skip
def test_other_ways_to_say_the_same_give_the_same(fixture: str, changes: dict[str, Any]) -> None:
    """A config that leaves a field to its class's rule gives the same layers as published ones that have it."""
    assert layers(config_text(fixture, **changes)) == layers(config_text(fixture))


def test_nemotron_pattern_and_list_say_the_same() -> None:
    """A pattern of letters and a list of words give the same layers; feed-forward layers keep nothing."""
    words = {"M": "mamba", "*": "attention", "-": "mlp"}
    pattern = json.loads(config_text("nemotron-h-8b"))["hybrid_override_pattern"]
    listed = config_text(
        "nemotron-h-8b",
        hybrid_override_pattern=None,
        num_hidden_layers=None,
        layers_block_type=[words[letter] for letter in pattern],
    )

    assert layers(listed) == layers(config_text("nemotron-h-8b"))


def test_kimi_without_its_linear_attention_is_told_where_that_belongs() -> None:
    """The refusal names the field that published configs have for it."""
    with pytest.raises(InvalidError, match="the field 'linear_attn_config' is missing or null"):
        layers(config_text("kimi-linear-48b", linear_attn_config=None))


def test_granite_without_mamba_needs_no_shape_of_it() -> None:
    """A Granite hybrid with attention in all layers is planned like a plain model."""
    text = config_text("granite-4.0-h-small", layer_types=["attention"] * 40, mamba_n_heads=None)

    assert {layer.kind for layer in layers(text)} == {"full_attention"}


@pytest.mark.parametrize(
    ("fixture", "changes", "complaint", "rule"),
    [
        pytest.param(
            "nemotron-h-8b",
            {"hybrid_override_pattern": "MX"},
            "letters",
            "contradictory_field",
            id="a letter",
        ),
        pytest.param(
            "nemotron-h-8b",
            {"hybrid_override_pattern": "M*"},
            "2 layers, but num_hidden_layers is 52",
            "contradictory_field",
            id="too short a pattern",
        ),
        pytest.param(
            "granite-4.0-h-small",
            {"layer_types": ["conv"] * 40},
            "has conv",
            "unknown_architecture",
            id="a kind that Granite has not",
        ),
        pytest.param(
            "granite-4.0-h-small",
            {"layer_types": None},
            "layer_types",
            "missing_field",
            id="granite without a list",
        ),
        pytest.param(
            "zamba2-2.7b",
            {"layers_block_type": None},
            "layers_block_type",
            "missing_field",
            id="zamba without a list",
        ),
        pytest.param(
            "minimax-text-01",
            {"attn_type_list": None},
            "attn_type_list",
            "missing_field",
            id="minimax without a list",
        ),
        pytest.param(
            "minimax-text-01",
            {"attn_type_list": [0, 1]},
            "2 layers, but num_hidden_layers is 80",
            "contradictory_field",
            id="minimax with too short a list",
        ),
        pytest.param(
            "lfm2-1.2b",
            {"layer_types": None, "full_attn_idxs": None},
            "layer_types",
            "missing_field",
            id="lfm2 without a list",
        ),
        pytest.param(
            "qwen3-next-80b",
            {"layer_types": ["sliding_attention"] * 48},
            "sliding_attention",
            "unknown_architecture",
            id="a kind that qwen3-next has not",
        ),
    ],
)
def test_lists_of_layers_that_contradict_are_refused(
    fixture: str, changes: dict[str, Any], complaint: str, rule: str
) -> None:
    """A list that is missing, too short or of unknown kinds is refused with its content."""
    with pytest.raises(InvalidError, match=complaint) as refusal:
        layers(config_text(fixture, **changes))

    assert refusal.value.rule == rule


@pytest.mark.parametrize(
    ("fixture", "ranks", "complaint"),
    [
        pytest.param("mamba-2.8b", 3, "inner width", id="mamba 1's width"),
        pytest.param("bamba-9b", 3, "heads of Mamba", id="mamba 2's heads"),
        pytest.param("qwen3-next-80b", 32, "K heads of linear", id="delta net's heads"),
        pytest.param("minimax-text-01", 3, "heads of linear", id="lightning's heads"),
        pytest.param("lfm2-1.2b", 3, "convolution", id="the convolution"),
    ],
)
def test_ranks_that_do_not_divide_a_state_are_refused(
    fixture: str, ranks: int, complaint: str
) -> None:
    """A dimension of a state that ranks cannot share evenly is named."""
    with pytest.raises(InvalidError, match=complaint) as refusal:
        layers(config_text(fixture), ranks=ranks)

    assert refusal.value.rule == "ranks_do_not_divide"


def test_more_groups_than_ranks_are_shared_evenly() -> None:
    """Six groups on four ranks are refused, as ranks would have different parts."""
    with pytest.raises(InvalidError, match="groups of Mamba: 6"):
        layers(config_text("mamba-codestral-7b", n_groups=6), ranks=4)
