"""Own which architecture goes which way; one that is not named here must say all in the usual words."""

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from kvlease.spec import LayerSpec
from kvleased.planning.models.families import (
    decoder,
    encoders,
    gemma,
    latent,
    linear_attention,
    mamba,
    mamba2_hybrids,
    older_words,
)
from kvleased.planning.models.families.deepseek_v4 import deepseek_v4
from kvleased.planning.models.model import Model
from kvleased.planning.models.parsing import Config

Family: TypeAlias = Callable[[Model], tuple[LayerSpec, ...]]
"""What makes a model's layers."""

_TYPES_OF_FAMILY: Final[Mapping[Family, tuple[str, ...]]] = {
    decoder.usual: ("bloom", "codegen", "gpt2", "gptj", "minimax_m2"),
    decoder.llama4: ("llama4_text",),
    gemma.gemma3n: ("gemma3n_text",),
    gemma.gemma4: ("gemma4_text",),
    older_words.falcon: ("falcon", "RefinedWeb", "RefinedWebModel"),
    older_words.bigcode: ("gpt_bigcode",),
    older_words.mpt: ("dbrx", "mpt"),
    older_words.chatglm: ("chatglm",),
    latent.latent: (
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
    ),
    deepseek_v4: ("deepseek_v4",),
    mamba.mamba_1: ("falcon_mamba", "mamba"),
    mamba.mamba_2: ("mamba2",),
    mamba.jamba: ("jamba",),
    mamba2_hybrids.bamba: ("bamba",),
    mamba2_hybrids.granite: ("granitemoehybrid",),
    mamba2_hybrids.falcon_h1: ("falcon_h1",),
    mamba2_hybrids.zamba2: ("zamba2",),
    mamba2_hybrids.nemotron_h: ("nemotron_h",),
    linear_attention.qwen3_next: (
        "olmo_hybrid",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_next",
    ),
    linear_attention.kimi_linear: ("kimi_linear",),
    linear_attention.minimax: ("minimax", "minimax_m1", "minimax_text_01"),
    linear_attention.lfm2: ("lfm2", "lfm2_moe"),
    encoders.bart: (
        "bart",
        "blenderbot",
        "m2m_100",
        "marian",
        "mbart",
        "pegasus",
        "speech_to_text",
        "whisper",
    ),
    encoders.t5: ("longt5", "mt5", "switch_transformers", "t5", "umt5"),
    encoders.encoder: (
        "albert",
        "bert",
        "camembert",
        "clip",
        "clip_text_model",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "modernbert",
        "mpnet",
        "nomic_bert",
        "roberta",
        "siglip",
        "siglip2_text_model",
        "siglip_text_model",
        "vit",
        "xlm-roberta",
    ),
}
FAMILY_OF_TYPE: Final[Mapping[str, Family]] = {
    model_type: family for family, types in _TYPES_OF_FAMILY.items() for model_type in types
}
"""What makes the layers of an architecture, by what Transformers calls it."""


def family_of(config: Config) -> Family:
    """Return what makes the layers of a model: by its name, else by its words."""
    if config.model_type in FAMILY_OF_TYPE:
        return FAMILY_OF_TYPE[config.model_type]
    if config.flag("is_encoder_decoder") and config.value("decoder_layers") is not None:
        return encoders.bart
    return decoder.plain
