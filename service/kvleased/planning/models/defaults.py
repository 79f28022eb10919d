"""Own the values that published configs leave to their class; a test compares them with the classes of Transformers."""

from collections.abc import Mapping
from typing import Final

DEFAULTS: Final[Mapping[str, dict[str, object]]] = {
    "bamba": {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_n_groups": 1},
    "cohere2": {"sliding_window": 4096},
    "deepseek_v32": {"index_topk": 2048, "index_head_dim": 128},
    "exaone4": {"sliding_window": 4096},
    "falcon_h1": {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_n_groups": 1},
    "falcon_mamba": {"expand": 2, "conv_kernel": 4, "state_size": 16},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 131072,
    },
    "gemma3n_text": {"sliding_window": 512, "num_kv_shared_layers": 15},
    "gemma4_text": {"head_dim": 256, "sliding_window": 512, "global_head_dim": 512},
    "glm_moe_dsa": {"index_topk": 2048, "index_head_dim": 128},
    "gpt_oss": {"sliding_window": 128},
    "granitemoehybrid": {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_n_groups": 1},
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_expand": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
    },
    "lfm2": {"conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "llama4_text": {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "mamba": {"expand": 2, "conv_kernel": 4, "state_size": 16},
    "mamba2": {"expand": 2, "conv_kernel": 4, "state_size": 128, "n_groups": 8, "head_dim": 64},
    "ministral": {"sliding_window": 4096},
    "mistral": {"sliding_window": 4096},
    "nemotron_h": {"conv_kernel": 4, "expand": 2, "n_groups": 8},
    "olmo3": {"sliding_window": 4096},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "zamba2": {"mamba_expand": 2, "mamba_d_conv": 4, "mamba_ngroups": 1},
}
"""Fields by model_type, whether or not the config is inside another one."""

NESTED_DEFAULTS: Final[Mapping[str, dict[str, object]]] = {
    "llama": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_size": 4096,
        "max_position_embeddings": 131072,
    },
    "qwen2": {
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "hidden_size": 4096,
        "max_position_embeddings": 32768,
    },
    "gemma": {"max_position_embeddings": 8192},
    "gemma2": {"max_position_embeddings": 8192},
    "llama4_text": {"max_position_embeddings": 131072},
}
"""Fields by model_type that only a model inside another one may leave out; in any other model it is a mistake."""

NESTED_TYPES: Final[Mapping[str, str]] = {
    "deepseek_vl_v2": "deepseek_v2",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""The type of the inner model, by the type of the outer one, if the inner one names no type."""

KV_HEADS_OF_CLASS: Final = frozenset(
    (
        *("bamba", "bitnet", "cwm", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4"),
        *("exaone_moe", "falcon_h1", "gemma", "gemma2", "gemma3_text", "gemma3n_text"),
        *("gemma4_text", "glm", "glm4", "glm4_moe", "glm4v_moe_text", "glm4v_text", "gpt_oss"),
        *("granite_swa", "helium", "hy_v3", "internlm3", "jais2", "jamba", "lfm2", "lfm2_moe"),
        *("llama4_text", "mellum", "minimax", "minimax_m2", "ministral", "ministral3"),
        *("mistral", "mixtral", "nemotron_h", "phimoe", "qwen2", "qwen2_5_omni_text"),
        *("qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_text"),
        *("qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open"),
        *("stablelm", "starcoder2", "vaultgemma"),
    )
)
"""Architectures whose class has a default for K and V heads, so a config that names no number does not mean Q's."""
