"""Own how commands, replies and effects are made: records that nobody changes, as cheap as Python makes them."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(
    kw_only_default=True, frozen_default=True, eq_default=True, field_specifiers=(field,)
)
def message(kind: type[T]) -> type[T]:
    """Make a class a frozen record whose fields are given by name.

    That nobody writes to one is checked by mypy alone. A dataclass that checks it at run time takes three times as long
    to make, and several are made in every call.
    """
    return dataclass(slots=True, kw_only=True, unsafe_hash=True)(kind)
