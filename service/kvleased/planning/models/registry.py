"""Own which function makes the layers of which architecture; an unknown architecture is refused."""

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
from kvleased.planning.models.known_types import TYPES_OF_FAMILY, nearest_types
from kvleased.planning.models.model import Model
from kvleased.planning.models.parsing import Config
from kvleased.planning.models.refusals import unknown_architecture

Family: TypeAlias = Callable[[Model], tuple[LayerSpec, ...]]
"""A function that makes a model's layers."""

_FAMILIES: Final[tuple[Family, ...]] = (
    *(decoder.plain, decoder.usual, decoder.llama4),
    *(gemma.gemma3n, gemma.gemma4),
    *(older_words.falcon, older_words.bigcode, older_words.mpt, older_words.chatglm),
    *(latent.latent, deepseek_v4),
    *(mamba.mamba_1, mamba.mamba_2, mamba.jamba),
    *(mamba2_hybrids.bamba, mamba2_hybrids.granite, mamba2_hybrids.falcon_h1),
    *(mamba2_hybrids.zamba2, mamba2_hybrids.nemotron_h),
    *(linear_attention.qwen3_next, linear_attention.kimi_linear),
    *(linear_attention.minimax, linear_attention.lfm2),
    *(encoders.bart, encoders.t5, encoders.encoder),
)
FAMILY_OF_TYPE: Final[Mapping[str, Family]] = {
    model_type: family for family in _FAMILIES for model_type in TYPES_OF_FAMILY[family.__name__]
}
"""The function that makes an architecture's layers, by the architecture's name in Transformers."""


def family_of(config: Config) -> Family:
    """Return the function that makes the layers of a model.

    Raises:
        InvalidError: rule unknown_architecture: the config does not say which model it is, or the model is not known;
            the message says what else can be given.
    """
    if config.model_type in FAMILY_OF_TYPE:
        return FAMILY_OF_TYPE[config.model_type]
    field = f"{config.path}model_type"
    classes = ", ".join(config.words("architectures")) or "none"
    if not config.model_type:
        why = f"the field {field!r} is missing, and it cannot be derived from the class in 'architectures' ({classes})"
    else:
        why = f"the field {field!r} is {config.model_type!r} (architectures: {classes}), which is not known"
    nearest = nearest_types(config.model_type) or ("llama", "qwen3")
    raise unknown_architecture(
        f"{why}; if its layers are laid out like those of a known model type, set {field} to that type, such as "
        f"{' or '.join(nearest)}"
    )
