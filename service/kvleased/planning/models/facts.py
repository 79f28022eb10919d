"""Own what a report says of a model besides its layers."""

from dataclasses import dataclass

from kvleased.planning.models.families.encoders import encoder_tokens_max
from kvleased.planning.models.parsing import parsed
from kvleased.planning.models.registry import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a config says of its model."""

    architecture: str
    """The class that the config names, else its model_type."""
    family: str
    """The rule by which its layers are made, such as plain, latent or qwen3_next."""
    max_position_tokens: int | None
    """Tokens of the longest request that the model was made for; None: the config does not say."""
    dtype: str
    """The element type of the weights; empty: the config does not say."""
    num_hidden_layers: int
    encoder_tokens_max: int | None
    """Tokens of the longest encoder input; None: the config does not say, or there is no encoder."""


def model_facts(model_config: str) -> ModelFacts:
    """Return what the text of a config.json says of its model.

    Raises:
        InvalidError: the text is not a config.json, does not say how many layers there are, or names no known
            architecture.
    """
    config = parsed(model_config)
    architectures = config.words("architectures")
    family = family_of(config).__name__
    return ModelFacts(
        architecture=architectures[0] if architectures else config.model_type,
        family=family,
        max_position_tokens=config.max_positions,
        dtype=config.dtype or "",
        num_hidden_layers=config.num_layers,
        encoder_tokens_max=encoder_tokens_max(config, family),
    )
