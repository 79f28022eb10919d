"""Own the comparison of two records for people: the fields that differ, each with its path and both values."""

import dataclasses
from collections.abc import Iterator
from typing import Final

from kvlease.plan import CachePlan
from kvlease.spec import LayerSpec

_NAMED_MAX: Final = 12
"""Most differences that are named; further ones are counted."""
_VALUE_CHARACTERS_MAX: Final = 64
_DERIVED: Final = ("layout_fingerprint", "waste", "capacity_tokens")
"""Fields that follow from the others; they are named only where no other differs."""


def plan_differences(old: CachePlan, new: CachePlan) -> list[str]:
    """Return the differences of two plans, such as "groups[0].spec.head_size (64, not 128)"; empty if equal."""
    every = list(differences(old, new))
    found = [one for one in every if not one.startswith(_DERIVED)] or every
    if len(found) > _NAMED_MAX:
        found[_NAMED_MAX:] = [f"{len(found) - _NAMED_MAX} more fields"]
    return found


def differences(old: object, new: object, path: str = "") -> Iterator[str]:
    """Yield the path of every value in which two records differ, with both values."""
    if isinstance(old, LayerSpec) and isinstance(new, LayerSpec) and old.kind != new.kind:
        yield f"{path}.kind ({old.kind}, not {new.kind})"
    elif dataclasses.is_dataclass(old) and type(old) is type(new):
        for field in dataclasses.fields(old):
            inner = f"{path}.{field.name}" if path else field.name
            yield from differences(getattr(old, field.name), getattr(new, field.name), inner)
    elif isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        for index, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif old != new:
        yield f"{path} ({_brief(old)}, not {_brief(new)})"


def _brief(value: object) -> str:
    return (
        f"{len(value)} entries" if isinstance(value, tuple) else str(value)[:_VALUE_CHARACTERS_MAX]
    )
