"""Own how a config is refused: what it lacks or contradicts, and how to give the layers by hand instead."""

from typing import Final

from kvlease.errors import InvalidError

BY_HAND: Final = (
    "give the layers by hand instead: "
    "PlanInputs(layers=(FullAttention(name=…, num_kv_heads=…, head_size=…, dtype=…), …)), or as JSON "
    '[{"kind": "full_attention", "name": …, "num_kv_heads": …, "head_size": …, "dtype": …}, …]'
)


def unknown_architecture(why: str) -> InvalidError:
    """Return the refusal of a model whose layers cannot be told for certain."""
    return InvalidError(
        f"this model cannot be planned from its config yet: {why}; {BY_HAND}",
        resource="model_config",
        rule="unknown_architecture",
    )


def missing_field(name: str) -> InvalidError:
    """Return the refusal of a config that does not say what its layers need."""
    return InvalidError(
        f"this model cannot be planned from its config: it lacks the field {name!r}; add it, or {BY_HAND}",
        resource=name,
        rule="missing_field",
    )


def bad_field(name: str, value: object, why: str) -> InvalidError:
    """Return the refusal of a field that is of a wrong type, or contradicts another one."""
    return InvalidError(
        f"the field {name!r} of the config is {str(value)[:80]}, {why}",
        resource=name,
        rule="contradictory_field",
    )


def keeps_nothing(model_type: str) -> InvalidError:
    """Return the refusal of an encoder."""
    message = (
        f"{model_type} is an encoder, which keeps no KV cache: every request is computed in one step, "
        "so there is nothing to plan"
    )
    return InvalidError(message, resource="model_config", rule="keeps_nothing")
