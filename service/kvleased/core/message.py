"""Own how commands, replies and effects are made: as records that nobody changes, as cheaply as Python allows."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(
    kw_only_default=True, frozen_default=True, eq_default=True, field_specifiers=(field,)
)
def message(kind: type[T]) -> type[T]:
    """Make a class a frozen record whose fields are given by name.

    Only mypy checks that nobody writes to such a record. A dataclass that checks it at run time takes three times as
    long to make, and every call makes several.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(kind)
