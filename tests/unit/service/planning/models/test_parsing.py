"""Laws of reading a config.json: a model inside a model stands for the whole, and malformed configs are refused."""

import json
import subprocess
import sys

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import ParallelInputs, PlanInputs
from kvlease.spec import AttentionSpec
from kvleased.planning import plan_or_explain
from kvleased.planning.models import layers_of
from kvleased.planning.models.parsing import Config, parsed
from tests.unit.service.planning.models.configs import LLAMA, changed, config_text, layers


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        pytest.param("{", "not the text", id="no JSON"),
        pytest.param("[" * 100_000, "not the text", id="nested beyond reason"),
        pytest.param("[]", "must be a JSON object", id="no object"),
        pytest.param(" " * (2**20 + 1), "characters", id="too long"),
        pytest.param(changed(LLAMA, torch_dtype=None), "kv_dtype", id="no dtype"),
        pytest.param(changed(LLAMA, torch_dtype=5), "kv_dtype", id="dtype of a wrong type"),
        pytest.param(changed(LLAMA, torch_dtype="complex64"), "complex64", id="unknown dtype"),
        pytest.param(
            changed(LLAMA, hidden_size=4097),
            "hidden_size over num_attention_heads",
            id="heads do not divide",
        ),
        pytest.param(
            changed(LLAMA, num_attention_heads="32"), "num_attention_heads", id="text for a number"
        ),
        pytest.param(changed(LLAMA, num_hidden_layers=10**12), "num_hidden_layers", id="too deep"),
        pytest.param(
            changed(LLAMA, num_key_value_heads=-1), "num_key_value_heads", id="negative heads"
        ),
        pytest.param(changed(LLAMA, layer_types=7), "layer_types", id="layer types that are none"),
        pytest.param(
            changed(LLAMA, layer_types=["full_attention"]),
            "1 layers, but num_hidden_layers is 32",
            id="too few layer types",
        ),
        pytest.param(changed(LLAMA, sliding_window=[1, 2]), "sliding_window", id="two windows"),
        pytest.param(
            changed(LLAMA, text_config={"hidden_size": 1}),
            "num_attention_heads",
            id="a model inside that says nothing",
        ),
        pytest.param(
            changed(LLAMA, model_type="mpt", attn_config=3), "attn_config", id="no object inside"
        ),
    ],
)
def test_malformed_config_is_refused(text: str, complaint: str) -> None:
    """Any text that is no usable config is refused with the reason."""
    with pytest.raises(InvalidError, match=complaint):
        layers(text)


def test_missing_object_is_named() -> None:
    """A config that lacks an object which others have is refused with the object's name."""
    with pytest.raises(InvalidError, match="linear_attn_config"):
        Config(fields={}).inner("linear_attn_config")


@pytest.mark.parametrize("name", ["text_config", "language_config", "llm_config", "thinker_config"])
def test_model_inside_a_model_stands_for_the_whole(name: str) -> None:
    """A multimodal model's decoder is planned, with the dtype from the whole config."""
    inner = {field: value for field, value in LLAMA.items() if field != "torch_dtype"}
    whole = {"model_type": "some_vlm", "torch_dtype": "float16", "hidden_size": 1, name: inner}

    found = layers(json.dumps(whole))

    assert found == layers(changed(LLAMA, torch_dtype="float16"))


def test_model_inside_two_models_is_found() -> None:
    """The text model of a thinker is found, as it is what keeps K and V."""
    whole = {"model_type": "omni", "thinker_config": {"text_config": LLAMA}}

    assert layers(json.dumps(whole)) == layers(json.dumps(LLAMA))


def test_inner_model_has_the_name_that_the_whole_implies() -> None:
    """A text_config without model_type has the type that the whole model always has inside."""
    inner = {"num_hidden_layers": 12, "hidden_size": 2560, "sliding_window": 1024}
    named = inner | {"model_type": "gemma3_text"}
    whole = {"model_type": "gemma3", "dtype": "bfloat16"}

    found = layers(json.dumps(whole | {"text_config": inner}))

    assert found == layers(json.dumps(whole | {"text_config": named}))


def test_defaults_of_inner_models_are_not_those_of_whole_ones() -> None:
    """A text_config may leave out its class's defaults; a whole config that leaves them out is refused."""
    inner = {"model_type": "llama", "torch_dtype": "float16"}

    assert len(layers(json.dumps({"text_config": inner}))) == 32
    with pytest.raises(InvalidError, match="num_attention_heads"):
        layers(json.dumps(inner))


@pytest.mark.parametrize(
    ("outer", "inner", "field"),
    [
        pytest.param(
            {"model_type": "gemma3"},
            {"model_type": "gemma3_text", "hidden_size": 2560},
            "text_config.num_hidden_layers",
            id="depth",
        ),
        pytest.param(
            {"model_type": "llava"},
            {"hidden_size": 5120, "num_attention_heads": 40},
            "text_config.num_hidden_layers",
            id="depth of another size",
        ),
    ],
)
def test_shape_is_not_left_to_a_class_that_is_of_another_one(
    outer: dict[str, object], inner: dict[str, object], field: str
) -> None:
    """Depth, heads and widths must come from the config; the refusal has the whole path of a missing field."""
    with pytest.raises(InvalidError, match=f"the field '{field}' is missing or null") as refusal:
        layers(json.dumps(outer | {"text_config": inner, "dtype": "bfloat16"}))

    assert (refusal.value.rule, refusal.value.resource) == ("missing_field", field)


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        pytest.param("gemma3", "text_config", id="gemma 3"),
        pytest.param("deepseek_vl_v2", "language_config", id="deepseek vl"),
    ],
)
def test_model_inside_that_is_missing_is_named(model_type: str, field: str) -> None:
    """If a model lacks the inner model that it always has, the refusal says where that should be."""
    with pytest.raises(InvalidError, match=f"the field '{field}' is missing or null"):
        layers(json.dumps({"model_type": model_type, "dtype": "bfloat16"}))


def test_class_of_the_text_model_alone_is_known() -> None:
    """The class Gemma3ForCausalLM means the text model of Gemma 3."""
    named = config_text("gemma3-1b")

    assert layers(config_text("gemma3-1b", model_type=None)) == layers(named)


def test_byte_order_mark_is_no_part_of_a_config() -> None:
    """A byte order mark before the text, which some editors write, is skipped."""
    assert layers("\ufeff" + json.dumps(LLAMA)) == layers(json.dumps(LLAMA))


def test_wrong_type_is_refused_with_the_value() -> None:
    """The refusal has the field, its value, and the type that it should have."""
    with pytest.raises(InvalidError, match='is "32", but it must be an integer from 1 to 4096'):
        layers(changed(LLAMA, num_hidden_layers="32"))


def test_switches_count_as_no_number() -> None:
    """A field that is false counts as left out; a field that is true is refused as a number."""
    assert Config(fields={"sliding_window": False}).optional_count("sliding_window") is None
    with pytest.raises(InvalidError, match="must be an integer"):
        Config(fields={"sliding_window": True}).optional_count("sliding_window")


def test_layers_that_are_only_listed_are_counted() -> None:
    """A config that lists its layers need not say how many there are."""
    assert parsed('{"layers_block_type": ["mamba", "mlp"]}').num_layers == 2


@pytest.mark.parametrize(
    ("changes", "kv_dtype", "dtype"),
    [
        pytest.param({}, "", "bfloat16", id="the model's"),
        pytest.param({"dtype": "float32"}, "", "float32", id="newer name of the field"),
        pytest.param({"torch_dtype": "torch.float16"}, "", "float16", id="as torch prints it"),
        pytest.param({}, "float8_e4m3fn", "float8_e4m3fn", id="the cache's own"),
        pytest.param({"torch_dtype": None}, "bfloat16", "bfloat16", id="only the cache's"),
        pytest.param({"torch_dtype": None}, "fp8", "float8_e4m3fn", id="only the cache's, fp8"),
    ],
)
def test_dtype_is_the_models_unless_given(
    changes: dict[str, object], kv_dtype: str, dtype: str
) -> None:
    """The cache has the model's element type unless another is given."""
    layer = layers(changed(LLAMA, **changes), kv_dtype)[0]

    assert isinstance(layer, AttentionSpec)
    assert layer.dtype == dtype


@pytest.mark.parametrize(
    ("kv_dtype", "quantisation", "bytes_per_token"),
    [
        pytest.param("float32", "none", 8 * 256 * 4, id="float32"),
        pytest.param("fp8", "fp8_per_tensor", 8 * 256, id="fp8"),
        pytest.param("fp8_e5m2", "fp8_per_tensor", 8 * 256, id="fp8 of the other kind"),
        pytest.param("fp8_per_token_head", "fp8_per_token_head", 8 * 264, id="fp8 with scales"),
        pytest.param("int8", "int8_per_token_head", 8 * 264, id="int8"),
        pytest.param("int4", "int4_per_token_head", 8 * 136, id="int4"),
        pytest.param("nvfp4", "nvfp4", 16 * 72, id="nvfp4"),
    ],
)
def test_cache_types_take_the_bytes_that_they_are_known_for(
    kv_dtype: str, quantisation: str, bytes_per_token: int
) -> None:
    """Each name of a cache type has its quantisation, with the bytes of the golden vectors' layers."""
    layer = layers(json.dumps(LLAMA), kv_dtype)[0]

    assert isinstance(layer, AttentionSpec)
    assert layer.quantisation == quantisation
    assert layer.bytes_per_page == 16 * bytes_per_token


@pytest.mark.parametrize(
    ("kv_dtype", "rule"),
    [
        pytest.param("fp3", "unknown_kv_dtype", id="no type"),
        pytest.param("fp8_ds_mla", "kv_dtype_not_for_model", id="a type of latents"),
    ],
)
def test_cache_types_that_heads_cannot_have_are_refused(kv_dtype: str, rule: str) -> None:
    """A cache type that does not exist, or is made for latents, is refused."""
    with pytest.raises(InvalidError, match=kv_dtype) as refusal:
        layers(json.dumps(LLAMA), kv_dtype)

    assert (refusal.value.rule, refusal.value.resource) == (rule, "kv_dtype")


@pytest.mark.parametrize(
    ("ranks", "num_kv_heads"),
    [
        pytest.param(1, 8, id="one rank"),
        pytest.param(4, 2, id="heads are shared"),
        pytest.param(8, 1, id="a head a rank"),
        pytest.param(32, 1, id="heads are copied"),
    ],
)
def test_heads_are_shared_by_ranks(ranks: int, num_kv_heads: int) -> None:
    """Ranks share heads evenly; if there are more ranks than heads, each rank keeps one head."""
    layer = layers(json.dumps(LLAMA), ranks=ranks)[0]

    assert isinstance(layer, AttentionSpec)
    assert (layer.num_kv_heads, layer.tensor_shards_max) == (num_kv_heads, 8)


@pytest.mark.parametrize(
    ("ranks", "nearest"),
    [
        pytest.param(3, (2, 4), id="neither even"),
        pytest.param(12, (4, 8), id="nor copied evenly"),
    ],
)
def test_ranks_that_do_not_divide_heads_are_refused(ranks: int, nearest: tuple[int, int]) -> None:
    """A split that gives ranks different parts is refused with the nearest numbers that do not."""
    wanted = " or ".join(f"tensor_ranks={number}" for number in nearest)
    with pytest.raises(InvalidError, match=wanted) as refusal:
        layers(json.dumps(LLAMA), ranks=ranks)

    assert refusal.value.rule == "ranks_do_not_divide"
    assert (refusal.value.need, refusal.value.limit) == (ranks, 8)


@pytest.mark.parametrize(
    ("text", "ranks", "num_heads"),
    [
        pytest.param(
            changed(LLAMA, hidden_size=896, num_attention_heads=14, num_key_value_heads=2),
            4,
            14,
            id="copied heads of K and V",
        ),
        pytest.param(config_text("deepseek-v3"), 3, 128, id="latents"),
    ],
)
def test_ranks_that_do_not_divide_heads_of_q_are_refused(
    text: str, ranks: int, num_heads: int
) -> None:
    """No engine splits attention unevenly, even if every rank would keep the same of K and V."""
    inputs = PlanInputs(
        model_config=text,
        tokens_per_block=64,
        device_bytes=2**33,
        parallel=ParallelInputs(tensor_ranks=ranks),
    )

    with pytest.raises(InvalidError, match=f"tensor_ranks must divide {num_heads}") as refusal:
        plan_or_explain(inputs)

    assert refusal.value.rule == "ranks_do_not_divide"
    assert "tensor_ranks=2" in refusal.value.remedies


def test_reading_a_config_loads_neither_torch_nor_transformers() -> None:
    """The daemon plans from configs, so reading one must not load torch."""
    code = (
        "import sys; from kvleased.planning.models import layers_of; "
        "layers_of(sys.argv[1]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    ended = subprocess.run([sys.executable, "-c", code, config_text("qwen3-next-80b")], check=False)

    assert ended.returncode == 0


def test_defaults_are_one_rank_and_blocks_of_16() -> None:
    """By default a model is planned for one rank, in blocks of 16 tokens."""
    assert layers_of(json.dumps(LLAMA)) == layers(json.dumps(LLAMA), ranks=1, tokens=16)
