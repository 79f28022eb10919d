"""Laws of models in golden vectors: a config gives exactly the vector's layers."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvlease.spec import AttentionSpec, FullAttention, LayerSpec, StateSpace
from tests.golden.words import spec_of
from tests.unit.service.planning.models.configs import FIXTURES, config_text, layers

VECTORS = FIXTURES.parents[1] / "golden" / "vectors"

TINY: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_hidden_layers": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "deepseek_v4": {
        "num_hidden_layers": 6,
        "head_dim": 512,
        "index_head_dim": 128,
        "sliding_window": 128,
        "compress_ratios": [0, 0, 4, 128, 4, 128],
    },
    "gemma3_text": {
        "num_hidden_layers": 12,
        "hidden_size": 64,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": 256,
    },
    "mamba2": {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_heads": 8,
        "head_dim": 32,
        "state_size": 64,
        "n_groups": 1,
        "max_position_embeddings": 1024,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*M",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 32,
        "n_groups": 2,
        "ssm_state_size": 64,
    },
    "qwen3": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


def vector(vector_id: str, suite: str = "planning") -> dict[str, Any]:
    """Return one golden vector."""
    found: list[dict[str, Any]] = json.loads((VECTORS / f"{suite}.json").read_text())["vectors"]
    return next(item for item in found if item["id"] == vector_id)


def vector_layers(vector_id: str) -> list[LayerSpec]:
    """Return the layers that all ranks of a vector keep: those of the first stage, then those of the next."""
    given = vector(vector_id)["input"]
    workers = given["workers"]
    stages = workers if given["config"]["pipeline_parallel_size"] > 1 else workers[:1]
    return [
        spec_of(given["specs"][spec], name) for stage in stages for name, spec in stage["layers"]
    ]


def plain(specs: Sequence[LayerSpec]) -> list[LayerSpec]:
    """Return specs with every derived number written out, so that equal layers compare as equal."""
    return [_plain(spec) for spec in specs]


def _plain(spec: LayerSpec) -> LayerSpec:
    if spec.block_stride_multiple == 1:
        spec = replace(spec, block_stride_multiple_tokens=None, block_stride_multiple_bytes=None)
    spec = replace(spec, bytes_per_page_padded=spec.bytes_per_page)
    if isinstance(spec, StateSpace):
        return replace(spec, num_checkpoint_blocks=0, checkpoint_multiple_tokens=None)
    assert isinstance(spec, AttentionSpec)
    if getattr(spec, "packed_format", "") == "auto":
        spec = replace(spec, packed_format="")  # type: ignore[call-arg]  # only latent kinds have it
    return replace(
        spec,
        head_size_v=spec.value_head_size,
        num_head_slots=spec.head_slots,
        bytes_per_state_packed=spec.bytes_per_state,
        tensor_shards_max=None,
    )


@pytest.mark.parametrize(
    ("fixture", "vector_id", "kv_dtype", "ranks", "mode", "tokens"),
    [
        pytest.param("llama3-8b", "plan-026", "", 2, "none", 16, id="llama3-8b tp2"),
        pytest.param("qwen3-0.6b", "plan-030", "", 1, "none", 16, id="qwen3-0.6b"),
        pytest.param("qwen3-0.6b", "plan-033", "", 1, "none", 128, id="qwen3-0.6b blocks of 128"),
        pytest.param("llama3-8b", "plan-034", "fp8", 1, "none", 16, id="llama fp8"),
        pytest.param("gemma3-4b", "plan-045", "", 1, "none", 16, id="gemma3-4b"),
        pytest.param("gemma3-27b", "plan-049", "", 4, "none", 16, id="gemma3-27b tp4"),
        pytest.param("gpt-oss-20b", "plan-053", "", 1, "none", 16, id="gpt-oss-20b"),
        pytest.param("llama4-scout", "plan-082", "", 1, "none", 16, id="llama4-scout"),
        pytest.param("deepseek-v3", "plan-087", "fp8", 4, "none", 64, id="deepseek-v3 tp4"),
        pytest.param("deepseek-v4-flash", "plan-099", "", 1, "none", 256, id="deepseek-v4"),
        pytest.param("deepseek-v4-flash", "plan-100", "fp8", 4, "none", 16, id="deepseek-v4 tp4"),
        pytest.param("qwen3-next-80b", "plan-110", "", 1, "none", 16, id="qwen3-next none"),
        pytest.param("qwen3-next-80b", "plan-111", "", 1, "align", 16, id="qwen3-next align"),
        pytest.param("qwen3-next-80b", "plan-114", "", 4, "none", 16, id="qwen3-next tp4 none"),
        pytest.param("qwen3-next-80b", "plan-115", "", 4, "align", 16, id="qwen3-next tp4 align"),
    ],
)
def test_config_gives_the_layers_of_its_vector(
    fixture: str, vector_id: str, kv_dtype: str, ranks: int, mode: str, tokens: int
) -> None:
    """A published config gives the vector's layers, in its order."""
    found = layers(config_text(fixture), kv_dtype, ranks=ranks, mode=mode, tokens=tokens)

    assert plain(found) == plain(vector_layers(vector_id))


@pytest.mark.parametrize(
    ("fixture", "vector_id", "mode", "tokens"),
    [
        pytest.param("deepseek-v3.2", "plan-090", "none", 16, id="deepseek-v3.2"),
        pytest.param("kimi-linear-48b", "plan-124", "align", 64, id="kimi-linear"),
        pytest.param("whisper-large-v3", "plan-125", "none", 16, id="whisper-large"),
    ],
)
def test_config_gives_the_layers_of_a_vector_that_sorts_them(
    fixture: str, vector_id: str, mode: str, tokens: int
) -> None:
    """A published config gives as many layers of each kind as a vector that lists one kind after the other."""
    found = layers(config_text(fixture), mode=mode, tokens=tokens)

    assert Counter(plain(found)) == Counter(plain(vector_layers(vector_id)))


@pytest.mark.parametrize(
    ("model_type", "vector_id", "mode", "tokens"),
    [
        pytest.param("deepseek_v2", "plan-181", "none", 128, id="deepseek v2"),
        pytest.param("deepseek_v4", "plan-184", "none", 256, id="deepseek v4"),
        pytest.param("gemma3_text", "plan-186", "none", 128, id="gemma3"),
        pytest.param("mamba2", "plan-190", "none", 128, id="mamba2"),
        pytest.param("nemotron_h", "plan-191", "align", 128, id="nemotron-h"),
        pytest.param("qwen3", "plan-192", "none", 32, id="qwen3"),
    ],
)
def test_small_config_gives_the_layers_of_a_real_engine(
    model_type: str, vector_id: str, mode: str, tokens: int
) -> None:
    """A config with the vector's sizes gives the layers that a real engine made of that model."""
    text = json.dumps({"model_type": model_type, "dtype": "bfloat16"} | TINY[model_type])

    found = layers(text, mode=mode, tokens=tokens)

    assert plain(found) == plain(vector_layers(vector_id))


def test_mamba2_states_of_a_real_engine_have_a_checkpoint() -> None:
    """The engine keeps the current state and one checkpoint of an unfinished prompt, at any token."""
    text = json.dumps({"model_type": "mamba2", "dtype": "bfloat16"} | TINY["mamba2"])
    found, expected = layers(text)[0], vector_layers("plan-190")[0]

    assert isinstance(found, StateSpace)
    assert isinstance(expected, StateSpace)
    assert found.num_checkpoint_blocks == expected.num_checkpoint_blocks == 1
    assert found.checkpoint_multiple_tokens == expected.checkpoint_multiple_tokens == 1


def test_mamba2_states_are_the_vectors() -> None:
    """Mamba 2 alone has states of the vector's shapes, and in mode align the plan's block."""
    found = layers(config_text("mamba2-2.7b"), mode="align")

    expected = [replace(spec, num_speculative_blocks=0) for spec in _states("plan-119")]
    assert plain(found) == plain(expected)


@pytest.mark.parametrize(
    ("fixture", "vector_id", "ranks"),
    [
        pytest.param("qwen3-next-80b", "kbs-129", 1, id="qwen3-next"),
        pytest.param("qwen3-next-80b", "kbs-133", 2, id="qwen3-next tp2"),
        pytest.param("qwen3-next-80b", "kbs-139", 4, id="qwen3-next tp4"),
        pytest.param("jamba-v0.1", "kbs-145", 1, id="jamba"),
        pytest.param("bamba-9b", "kbs-147", 1, id="bamba"),
        pytest.param("kimi-linear-48b", "kbs-148", 1, id="kimi-linear"),
    ],
)
def test_hybrid_blocks_are_the_vectors(fixture: str, vector_id: str, ranks: int) -> None:
    """States have the vector's shapes and padded page, and all layers have its block."""
    found = vector(vector_id, "kernel_blocks")
    given, expected = found["input"], found["expected"]
    changes = {"mamba_ssm_dtype": "bfloat16"} if fixture == "bamba-9b" else {}

    made = layers(config_text(fixture, **changes), ranks=ranks, mode="align")

    states = [layer for layer in made if isinstance(layer, StateSpace)]
    attention = [layer for layer in made if isinstance(layer, FullAttention)]
    assert {state.shapes for state in states} == {tuple(map(tuple, given["state_shapes"]))}
    assert {state.dtypes for state in states} == {tuple(given["state_dtypes"])}
    assert {layer.head_size for layer in attention} == {given["head_size"]}
    assert {layer.tokens_per_block for layer in made} == {expected["block_size"]}
    assert {layer.bytes_per_page for layer in made} == {expected["mamba_page_size_padded"]}


def _states(vector_id: str) -> list[StateSpace]:
    return [spec for spec in vector_layers(vector_id) if isinstance(spec, StateSpace)]
