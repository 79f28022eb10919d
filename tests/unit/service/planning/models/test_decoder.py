"""Laws of plain decoders: attention over all tokens, windows and chunks is planned, and the rest refused."""

import json
import tracemalloc
from collections import Counter
from typing import Any

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import PlanInputs
from kvlease.spec import AttentionSpec, FullAttention, SlidingWindow
from kvleased.planning import plan
from kvleased.planning.models.known_types import TYPES_OF_FAMILY
from tests.unit.service.planning.models.configs import LLAMA, changed, config_text, layers


def text(**changes: object) -> str:
    """Return the text of a Llama config with some fields changed; None takes a field away."""
    return changed(LLAMA, **changes)


def test_llama_8b_is_planned_to_known_numbers() -> None:
    """Llama 3 8B keeps 128 KiB a token: 32 layers * 8 heads * (128 + 128) * 2 bytes; 8 GiB hold 4096 blocks."""
    layout = plan(PlanInputs(model_config=text(), tokens_per_block=16, device_bytes=8 * 2**30))

    assert layout.bytes_per_block == 2 * 2**20
    assert layout.num_blocks == 4096
    assert layout.longest_request_tokens == 65536


@pytest.mark.parametrize(
    ("changes", "num_kv_heads", "head_size"),
    [
        pytest.param({"num_key_value_heads": None}, 32, 128, id="as many K heads as heads"),
        pytest.param({"head_dim": 64}, 8, 64, id="head size of its own"),
        pytest.param(
            {"hidden_size": None, "head_dim": 64}, 8, 64, id="head size instead of hidden size"
        ),
        pytest.param(
            {"sliding_window": 4096, "use_sliding_window": False}, 8, 128, id="window off"
        ),
        pytest.param(
            {"sliding_window": 4096, "max_position_embeddings": 4096}, 8, 128, id="idle window"
        ),
        pytest.param({"layer_types": ["full_attention"] * 32}, 8, 128, id="all layers full"),
        pytest.param({"model_type": None}, 8, 128, id="a class instead of the name"),
    ],
)
def test_ways_to_say_full_attention_are_understood(
    changes: dict[str, object], num_kv_heads: int, head_size: int
) -> None:
    """A config's missing fields have the format's defaults, and a window that never cuts is none."""
    layer = layers(text(**changes))[0]

    assert isinstance(layer, FullAttention)
    assert (layer.num_kv_heads, layer.head_size, layer.head_size_v) == (
        num_kv_heads,
        head_size,
        head_size,
    )


def test_values_may_have_heads_of_their_own() -> None:
    """If the config has v_head_dim, V has that many elements."""
    layer = layers(text(v_head_dim=64))[0]

    assert isinstance(layer, FullAttention)
    assert (layer.head_size, layer.head_size_v) == (128, 64)


@pytest.mark.parametrize(
    ("fixture", "num_sliding", "window_tokens"),
    [
        pytest.param("mistral-7b-v0.1", 32, 4096, id="mistral: all layers"),
        pytest.param("mixtral-8x7b", 0, None, id="mixtral: none"),
        pytest.param("phi-3-mini-4k", 32, 2047, id="phi-3: all layers"),
        pytest.param("phi-4", 0, None, id="phi-4: none"),
        pytest.param("starcoder2-15b", 40, 4096, id="starcoder2: all layers"),
        pytest.param("qwen2.5-7b", 0, None, id="qwen2.5: switched off"),
        pytest.param("qwen3-30b-a3b", 0, None, id="qwen3 moe: none"),
        pytest.param("gemma2-9b", 21, 4096, id="gemma 2: every other"),
        pytest.param("gemma3-1b", 22, 512, id="gemma 3: five of six"),
        pytest.param("gemma3n-e4b", 16, 512, id="gemma 3n: without those that share"),
        pytest.param("command-r7b", 24, 4096, id="cohere 2: three of four"),
        pytest.param("olmo3-7b", 24, 4096, id="olmo 3: listed"),
    ],
)
def test_windows_are_where_the_architecture_has_them(
    fixture: str, num_sliding: int, window_tokens: int | None
) -> None:
    """The architecture or the config's list decides which layers keep a window, and the config how long it is."""
    sliding = [item for item in layers(config_text(fixture)) if isinstance(item, SlidingWindow)]

    assert len(sliding) == num_sliding
    assert {layer.window_tokens for layer in sliding} == ({window_tokens} - {None})


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        pytest.param(
            {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 3},
            "FFFS",
            id="qwen2: from a layer on",
        ),
        pytest.param(
            {"model_type": "qwen2", "use_sliding_window": True}, "SSSS", id="qwen2: from the first"
        ),
        pytest.param({"model_type": "qwen2"}, "FFFF", id="qwen2: off unless said"),
        pytest.param(
            {"model_type": "exaone4", "sliding_window_pattern": "LLG"}, "SSFS", id="letters"
        ),
        pytest.param({"model_type": "olmo3", "sliding_window_pattern": 2}, "SFSF", id="period"),
        pytest.param({"layer_types": ["local", "global", "attention", "local"]}, "SFFS", id="list"),
    ],
)
def test_ways_to_say_windows_are_understood(config: dict[str, Any], kinds: str) -> None:
    """The layers that keep a window are those that the config names in its own words."""
    found = layers(
        text(num_hidden_layers=4, sliding_window=64, max_position_embeddings=128, **config)
    )

    assert "".join("S" if isinstance(item, SlidingWindow) else "F" for item in found) == kinds


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        pytest.param("mistral", "SSSS", id="mistral"),
        pytest.param("ministral", "SSSS", id="ministral"),
        pytest.param("cohere2", "SSSF", id="cohere2"),
        pytest.param("exaone4", "SSSF", id="exaone4"),
        pytest.param("olmo3", "SSSF", id="olmo3"),
    ],
)
def test_window_that_a_config_leaves_out_is_that_of_its_class(model_type: str, kinds: str) -> None:
    """A missing window is the class's 4096 tokens, as when a config inside another leaves it out; null is none."""
    left_out = text(model_type=model_type, num_hidden_layers=4)
    none = json.dumps(json.loads(left_out) | {"sliding_window": None})

    found = layers(left_out)

    assert "".join("S" if isinstance(item, SlidingWindow) else "F" for item in found) == kinds
    windows = {item.window_tokens for item in found if isinstance(item, SlidingWindow)}
    assert windows == {4096}
    assert {type(item) for item in layers(none)} == {FullAttention}


def test_long_pattern_of_windows_takes_no_more_memory_than_its_letters() -> None:
    """Only as many letters as layers count; a pattern repeated for every layer would take all memory."""
    config = text(
        model_type="exaone4",
        num_hidden_layers=256,
        sliding_window=64,
        sliding_window_pattern="L" * 2**17,
    )

    tracemalloc.start()
    try:
        found = layers(config)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert {type(layer) for layer in found} == {SlidingWindow}
    assert most_bytes < 64 * 2**20


@pytest.mark.parametrize(
    ("fixture", "num_layers", "num_kv_heads", "head_size"),
    [
        pytest.param("gpt2", 12, 12, 64, id="gpt-2"),
        pytest.param("gpt-neox-20b", 44, 64, 96, id="gpt-neox"),
        pytest.param("opt-6.7b", 32, 32, 128, id="opt"),
        pytest.param("phi-2", 32, 32, 80, id="phi"),
        pytest.param("falcon-7b", 32, 1, 64, id="falcon with one head"),
        pytest.param("falcon-40b", 60, 8, 64, id="falcon's new decoder"),
        pytest.param("starcoder", 40, 1, 128, id="starcoder"),
        pytest.param("mpt-7b", 32, 32, 128, id="mpt"),
        pytest.param("dbrx", 40, 8, 128, id="dbrx"),
        pytest.param("chatglm3-6b", 28, 2, 128, id="chatglm"),
        pytest.param("olmo2-7b", 32, 32, 128, id="olmo 2"),
        pytest.param("glm4-9b", 40, 2, 128, id="glm 4"),
        pytest.param("glm4.5-air", 46, 8, 128, id="glm 4 moe"),
        pytest.param("ernie4.5-21b", 28, 4, 128, id="ernie 4.5"),
        pytest.param("seed-oss-36b", 64, 8, 128, id="seed-oss"),
        pytest.param("minimax-m2", 62, 8, 128, id="minimax m2"),
        pytest.param("llava-1.5-7b", 32, 32, 128, id="llama's defaults inside of llava"),
    ],
)
def test_decoders_have_the_heads_of_their_architecture(
    fixture: str, num_layers: int, num_kv_heads: int, head_size: int
) -> None:
    """Every layer keeps K and V of all tokens, with the model's heads."""
    found = Counter(layers(config_text(fixture), "bfloat16"))

    expected = FullAttention(
        name="any",
        tokens_per_block=16,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        head_size_v=head_size,
        dtype="bfloat16",
        tensor_shards_max=num_kv_heads,
    )
    assert found == {expected: num_layers}


@pytest.mark.parametrize(
    ("fixture", "changes", "num_kv_heads"),
    [
        pytest.param(
            "falcon-7b", {"num_attention_heads": 142, "multi_query": False}, 142, id="falcon"
        ),
        pytest.param("starcoder", {"multi_query": False}, 48, id="starcoder"),
        pytest.param("mpt-7b", {"attn_config": None}, 32, id="mpt without attn_config"),
        pytest.param("chatglm3-6b", {"multi_query_attention": False}, 32, id="chatglm"),
    ],
)
def test_heads_that_are_not_shared_are_as_many_as_heads(
    fixture: str, changes: dict[str, Any], num_kv_heads: int
) -> None:
    """If an architecture's own switch is off, there are as many heads of K and V as of Q."""
    layer = layers(config_text(fixture, **changes))[0]

    assert isinstance(layer, FullAttention)
    assert layer.num_kv_heads == num_kv_heads


def test_gemma4_has_heads_of_two_sizes() -> None:
    """Layers that see all tokens have larger heads, and fewer of them if K stands for V."""
    config = {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "num_kv_shared_layers": 1,
    }

    same = layers(changed(config))
    fewer = layers(changed(config, attention_k_eq_v=True))

    assert [_heads(layer) for layer in same] == [(4, 256)] * 5 + [(4, 512)] + [(4, 256)]
    assert [_heads(layer) for layer in fewer] == [(4, 256)] * 5 + [(2, 512)] + [(4, 256)]


def test_gemma4_says_heads_layer_by_layer_as_well() -> None:
    """per_layer_config, as Transformers writes it, goes before what published configs say of all layers."""
    config = {
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "per_layer_config": {
            "05": {"head_dim": 384, "num_key_value_heads": 2},
            "3": {},
            "6": "beyond the last layer",
            "0" * 5000: {"head_dim": 128},
        },
    }

    assert [_heads(layer) for layer in layers(changed(config))] == [(4, 256)] * 5 + [(2, 384)]


def test_layers_that_share_leave_at_least_one_that_keeps() -> None:
    """A config with as many sharing layers as layers is refused."""
    with pytest.raises(InvalidError, match="num_kv_shared_layers") as refusal:
        layers(
            changed(LLAMA, model_type="gemma3n_text", num_hidden_layers=5, num_kv_shared_layers=5)
        )

    assert refusal.value.rule == "contradictory_field"


def test_llama4_keeps_all_tokens_where_positions_are_not_rotary() -> None:
    """A list of rotary layers goes before the rule of every fourth, and must be as long as the model is deep."""
    config = {
        "model_type": "llama4_text",
        "dtype": "bfloat16",
        "num_hidden_layers": 4,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }

    listed = layers(changed(config, no_rope_layers=[0, 1, 1, 0]))
    with pytest.raises(InvalidError, match="3 layers, but num_hidden_layers is 4"):
        layers(changed(config, no_rope_layers=[1, 1, 0]))

    assert [layer.kind for layer in listed] == [
        "full_attention",
        "chunked_local",
        "chunked_local",
        "full_attention",
    ]


@pytest.mark.parametrize(
    ("changes", "meaning"),
    [
        pytest.param({"sliding_window": 4096}, "sliding_window", id="sliding window"),
        pytest.param(
            {"sliding_window": 4096, "max_position_embeddings": 8192},
            "sliding_window",
            id="window that cuts",
        ),
        pytest.param({"layer_types": ["full_attention", "mamba"] * 16}, "mamba", id="layer types"),
        pytest.param({"kv_lora_rank": 512}, "latent", id="MLA"),
        pytest.param({"attention_chunk_size": 8192}, "chunked", id="chunks"),
        pytest.param({"mamba_d_state": 16}, "state-space", id="mamba"),
        pytest.param({"lru_width": 2560}, "recurrent", id="recurrent"),
        pytest.param({"is_encoder_decoder": True}, "encoder-decoder", id="encoder-decoder"),
        pytest.param({"type_vocab_size": 2}, "encoder", id="encoder"),
        pytest.param({"model_type": "totally-new"}, "'totally-new'", id="unknown name"),
        pytest.param({"model_type": None, "architectures": None}, "is missing", id="no name"),
        pytest.param(
            {"model_type": None, "architectures": ["NewForCausalLM"]},
            "NewForCausalLM",
            id="unknown class",
        ),
    ],
)
def test_other_models_are_refused_with_a_way_out(changes: dict[str, object], meaning: str) -> None:
    """A model that is not plain attention is refused by name, and the refusal says how to give layers by hand."""
    with pytest.raises(InvalidError, match=meaning) as refusal:
        layers(text(**changes))

    assert refusal.value.rule == "unknown_architecture"
    assert "--specs FILE (docs/specs.md" in refusal.value.message
    assert "PlanInputs(layers=(FullAttention(" in refusal.value.message
    assert '[{"kind": "full_attention"' in refusal.value.message


def test_unknown_name_is_refused_with_the_nearest_ones() -> None:
    """An unknown name is refused with the known names that are most like it."""
    with pytest.raises(InvalidError, match="set model_type to that type, such as qwen3 or"):
        layers(text(model_type="quen3"))


@pytest.mark.parametrize("name", ["mllama_text_model", "robertson", "clipp"])
def test_encoders_are_never_among_the_nearest_names(name: str) -> None:
    """What is to be planned keeps something; with an encoder's name it would be refused again."""
    with pytest.raises(InvalidError) as refusal:
        layers(text(model_type=name))

    named = refusal.value.message.split("such as ")[1].split(";")[0].split(" or ")
    assert not set(named) & set(TYPES_OF_FAMILY["encoder"])


def test_class_stands_for_the_name() -> None:
    """A config without model_type goes by its class."""
    config = config_text("dbrx")

    assert layers(config_text("dbrx", model_type=None), "bfloat16") == layers(config, "bfloat16")


@pytest.mark.parametrize(
    ("fixture", "changes", "field"),
    [
        pytest.param("llama3-8b", {"num_key_value_heads": 0}, "num_key_value_heads", id="llama"),
        pytest.param("llama3-8b", {"head_dim": 0}, "head_dim", id="head size"),
        pytest.param(
            "mpt-7b", {"attn_config": {"kv_n_heads": 0}}, "attn_config.kv_n_heads", id="mpt"
        ),
    ],
)
def test_no_heads_are_not_as_good_as_none_given(
    fixture: str, changes: dict[str, Any], field: str
) -> None:
    """A number of heads of 0 is refused with the field, its value and both bounds."""
    with pytest.raises(InvalidError, match="is 0, but it must be from 1 to") as refusal:
        layers(config_text(fixture, **changes))

    assert (refusal.value.rule, refusal.value.resource) == ("contradictory_field", field)
    assert refusal.value.need == 0


@pytest.mark.parametrize(
    ("fixture", "changes", "field"),
    [
        pytest.param(
            "mistral-7b-v0.1", {"num_key_value_heads": None}, "num_key_value_heads", id="mistral"
        ),
        pytest.param("dbrx", {"attn_config": {}}, "attn_config.kv_n_heads", id="dbrx"),
        pytest.param("dbrx", {"attn_config": None}, "attn_config", id="dbrx without any"),
    ],
)
def test_heads_that_the_class_has_of_its_own_must_be_said(
    fixture: str, changes: dict[str, Any], field: str
) -> None:
    """If the class has a number of its own, a config without heads of K and V is refused."""
    with pytest.raises(InvalidError) as refusal:
        layers(config_text(fixture, **changes))

    assert (refusal.value.rule, refusal.value.resource) == ("missing_field", field)


def test_window_of_null_is_not_the_class_default() -> None:
    """A window of null means no window, so a list of layers with windows is refused."""
    config = json.loads(config_text("gpt-oss-20b")) | {"sliding_window": None}
    listed = json.dumps(config)
    unlisted = json.dumps({name: item for name, item in config.items() if name != "layer_types"})

    with pytest.raises(InvalidError, match="'sliding_window'"):
        layers(listed)

    assert {layer.kind for layer in layers(unlisted)} == {"full_attention"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("num_hidden_layers", id="layers"),
        pytest.param("hidden_size", id="sizes"),
        pytest.param("num_attention_heads", id="heads"),
    ],
)
def test_missing_fields_are_named(name: str) -> None:
    """A field that the decoder needs and the config lacks is named, with a way out."""
    with pytest.raises(InvalidError, match=name) as refusal:
        layers(text(**{name: None}))

    assert (refusal.value.rule, refusal.value.resource) == ("missing_field", name)
    assert "PlanInputs(layers=(FullAttention(" in refusal.value.message


def test_chunks_are_as_the_list_says() -> None:
    """A layer that the list calls chunked keeps the config's own chunk."""
    found = layers(
        changed(
            LLAMA,
            model_type="llama4_text",
            num_hidden_layers=2,
            no_rope_layers=[1, 0],
            attention_chunk_size=512,
        )
    )

    assert [getattr(layer, "chunk_tokens", None) for layer in found] == [512, None]


def _heads(layer: object) -> tuple[int, int]:
    assert isinstance(layer, AttentionSpec)
    return layer.num_kv_heads, layer.head_size
