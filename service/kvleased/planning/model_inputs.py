"""Own what a plan takes from the model when its inputs do not say it."""

from collections.abc import Sequence
from dataclasses import replace

from kvlease.plan import PlanInputs
from kvlease.spec import CrossAttention, LayerSpec
from kvleased.planning.models import missing_encoder_tokens, model_facts


def with_model_facts(inputs: PlanInputs) -> PlanInputs:
    """Return the inputs with the model's longest request and longest encoder input filled in where they were not given.

    The longest request is then still shortened to what fits. A request beyond the model's positions is of no use.

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
    """Refuse a model with cross attention if nothing says how many tokens that keeps: it would count as no block.

    For layers given by hand, 0 says that there is no encoder input.

    Raises:
        InvalidError: rule missing_encoder_tokens.
    """
    if inputs.engine.encoder_tokens_max or not inputs.model_config:
        return
    for layer in layers:
        if isinstance(layer, CrossAttention):
            raise missing_encoder_tokens(layer.name)
