"""Own what a plan's inputs take from the model where they say nothing themselves."""

from collections.abc import Sequence
from dataclasses import replace

from kvlease.plan import PlanInputs
from kvlease.spec import CrossAttention, LayerSpec
from kvleased.planning.models import missing_encoder_tokens, model_facts


def with_model_facts(inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with the longest request that the model takes, and its encoder's input, where those are open.

    The longest request is still shortened to what fits; a request beyond the model's positions is of no use to anybody.

    Raises:
        InvalidError: the model's config cannot be read.
    """
    if not inputs.model_config or inputs.layers:
        return inputs
    facts = model_facts(inputs.model_config)
    if not inputs.longest_request_tokens and facts.max_position_tokens:
        inputs = replace(
            inputs, longest_request_tokens=facts.max_position_tokens, fit_longest_request=True
        )
    if not inputs.engine.encoder_tokens_max and facts.encoder_tokens_max:
        engine = replace(inputs.engine, encoder_tokens_max=facts.encoder_tokens_max)
        inputs = replace(inputs, engine=engine)
    return inputs


def require_encoder_tokens(layers: Sequence[LayerSpec], inputs: PlanInputs) -> None:
    """Refuse a model's cross attention of which nothing says how many tokens it keeps: it would count as no block.

    Who gives layers by hand says with 0 that there is no encoder's input.

    Raises:
        InvalidError: rule missing_encoder_tokens.
    """
    if inputs.engine.encoder_tokens_max or not inputs.model_config:
        return
    for layer in layers:
        if isinstance(layer, CrossAttention):
            raise missing_encoder_tokens(layer.name)
