"""Own the refusals of configs: what a config lacks or contradicts, and how to give the layers by hand instead."""

from typing import Final

from kvlease.errors import InvalidError

BY_HAND: Final = (
    "give the layers by hand instead: --specs FILE (docs/specs.md says what is in it), "
    "PlanInputs(layers=(FullAttention(name=…, num_kv_heads=…, head_size=…, dtype=…), …)), or as JSON "
    '[{"kind": "full_attention", "name": …, "num_kv_heads": …, "head_size": …, "dtype": …}, …]'
)


def unknown_architecture(why: str) -> InvalidError:
    """Return the refusal of a model whose layers cannot be known for certain."""
    return InvalidError(
        f"this model cannot be planned from its config yet: {why}; {BY_HAND}",
        resource="model_config",
        rule="unknown_architecture",
    )


def missing_field(name: str) -> InvalidError:
    """Return the refusal of a config that does not say what its layers need."""
    return InvalidError(
        f"this model cannot be planned from its config: the field {name!r} is missing or null; "
        f"add it, or {BY_HAND}",
        resource=name,
        rule="missing_field",
    )


def bad_field(
    name: str, value: object, why: str, *, need: int | None = None, limit: int | None = None
) -> InvalidError:
    """Return the refusal of a field of a wrong type, or one that contradicts another."""
    return InvalidError(
        f"the field {name!r} of the config is {str(value)[:80]}, {why}; correct it, or {BY_HAND}",
        resource=name,
        rule="contradictory_field",
        need=need,
        limit=limit,
    )


def keeps_nothing(model_type: str) -> InvalidError:
    """Return the refusal of an encoder."""
    message = (
        f"{model_type} is an encoder, which keeps no KV cache: every request is computed in one step, "
        "so there is nothing to plan"
    )
    return InvalidError(message, resource="model_config", rule="keeps_nothing")


def no_layers(model_type: str) -> InvalidError:
    """Return the refusal of a model whose layers all keep nothing."""
    message = (
        f"none of the layers in this config of {model_type!r} keeps anything between steps, so there is nothing to "
        f"plan; correct the fields that list the layers, or {BY_HAND}"
    )
    return InvalidError(message, resource="model_config", rule="keeps_nothing")


def missing_encoder_tokens(name: str) -> InvalidError:
    """Return the refusal of cross attention whose encoder input has no known length; `name` is one such layer."""
    message = (
        f"layer {name!r} keeps the output of an encoder, but its largest number of tokens is not known: "
        "encoder_tokens_max is 0, and no config gives a limit; set engine.encoder_tokens_max to the number of tokens "
        "of the longest encoder input, such as 512 or 1500"
    )
    return InvalidError(
        message,
        resource="encoder_tokens_max",
        rule="missing_encoder_tokens",
        need=1,
        available=0,
    )
