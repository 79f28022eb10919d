"""Own the known architectures, by their names in Transformers; `registry` says which rule makes their layers.

An architecture that is not named here is refused: a config cannot prove that its model does what its words say.
"""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from kvleased.planning.models.defaults import NESTED_TYPES

PLAIN_TYPES: Final = (
    *("afmoe", "apertus", "aquila", "arcee", "arctic", "aria_text", "baichuan", "bailing_moe"),
    *("biogpt", "bitnet", "cohere", "cohere2", "ctrl", "cwm", "deepseek", "diffllama", "doge"),
    *("dots1", "ernie4_5", "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "flex_olmo"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "glm4v_moe_text"),
    *("glm4v_text", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "granite", "granite_swa"),
    *("granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hunyuan_v1_dense"),
    *("hunyuan_v1_moe", "hy_v3", "internlm", "internlm2", "internlm3", "jais2", "llama"),
    *("mellum", "mimo", "minicpm", "ministral", "ministral3", "mistral", "mixtral", "nanochat"),
    *("nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "orion", "persimmon", "phi"),
    *("phi3", "phi3_v", "phi4mm", "phimoe", "qwen2", "qwen2_5_omni_text", "qwen2_5_vl"),
    *("qwen2_5_vl_text", "qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_moe"),
    *("qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3"),
    *("solar", "solar_open", "stablelm", "starcoder2", "vaultgemma", "xverse"),
)
"""Decoders with attention only, whose configs say everything in the usual words."""
TYPES_OF_FAMILY: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": PLAIN_TYPES,
    "usual": ("bloom", "codegen", "gpt2", "gptj", "minimax_m2"),
    "llama4": ("llama4_text",),
    "gemma3n": ("gemma3n_text",),
    "gemma4": ("gemma4_text",),
    "falcon": ("falcon", "RefinedWeb", "RefinedWebModel"),
    "bigcode": ("gpt_bigcode",),
    "mpt": ("dbrx", "mpt"),
    "chatglm": ("chatglm",),
    "latent": (
        *("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"),
        "kimi_k2",
    ),
    "deepseek_v4": ("deepseek_v4",),
    "mamba_1": ("falcon_mamba", "mamba"),
    "mamba_2": ("mamba2",),
    "jamba": ("jamba",),
    "bamba": ("bamba",),
    "granite": ("granitemoehybrid",),
    "falcon_h1": ("falcon_h1",),
    "zamba2": ("zamba2",),
    "nemotron_h": ("nemotron_h",),
    "qwen3_next": ("olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    "kimi_linear": ("kimi_linear",),
    "minimax": ("minimax", "minimax_m1", "minimax_text_01"),
    "lfm2": ("lfm2", "lfm2_moe"),
    "bart": (
        *("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mvp"),
        *("pegasus", "plbart", "speech_to_text", "whisper"),
    ),
    "t5": ("longt5", "mt5", "switch_transformers", "t5", "umt5"),
    "encoder": (
        *("albert", "bert", "camembert", "clip", "clip_text_model", "deberta", "deberta-v2"),
        *("distilbert", "electra", "modernbert", "mpnet", "nomic_bert", "roberta", "siglip"),
        *("siglip2_text_model", "siglip_text_model", "vit", "xlm-roberta"),
    ),
}
"""The architectures of each rule, by the name of the function that makes their layers."""

_KNOWN_TYPES: Final = tuple(name for names in TYPES_OF_FAMILY.values() for name in names)
_CLASS_ENDINGS: Final = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "LMHeadModel",
    "Model",
)


def type_of_class(architectures: Sequence[object]) -> str:
    """Return the model_type of the first of these classes that is known; empty if none is known.

    A class name is the model_type without hyphens and underscores, then an ending: Qwen3MoeForCausalLM is of qwen3_moe.
    """
    by_letters = {_letters(name): name for name in (*_KNOWN_TYPES, *NESTED_TYPES)}
    for architecture in architectures:
        for ending in _CLASS_ENDINGS:
            stem = str(architecture).removesuffix(ending)
            if stem != architecture and _letters(stem) in by_letters:
                return by_letters[_letters(stem)]
    return ""


def nearest_types(model_type: str) -> tuple[str, ...]:
    """Return the known architectures whose names are most like this one, without encoders, which keep nothing.

    There are at most three, the nearest first.
    """
    keeping = set(_KNOWN_TYPES).difference(TYPES_OF_FAMILY["encoder"])
    return tuple(get_close_matches(model_type, sorted(keeping), n=3))


def _letters(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()
