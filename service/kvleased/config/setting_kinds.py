"""Own the types of the values of settings; the settings themselves are in `settings`."""

from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, Field

from kvlease.errors import InvalidError
from kvlease.ids import TENANT_CHARACTERS_MAX
from kvlease.units import parse_bytes
from kvleased.access.tenant_names import RULE, is_reserved

BYTES_MAX: Final = 1 << 60
"""The largest number of bytes: more memory than any node has."""


def _read_bytes(value: object) -> object:
    """Return the number of bytes of a text with a unit; a number is returned as it is."""
    if not isinstance(value, str) or value.strip().lstrip("+-").replace("_", "").isdigit():
        return value
    try:
        return parse_bytes(value)
    except InvalidError as error:
        raise ValueError(str(error)) from error


WRITTEN: Final = BeforeValidator(_read_bytes)
"""Accepts a number of bytes also with a unit."""
Count = Annotated[int, Field(ge=1, le=1 << 20)]
Bytes = Annotated[int, WRITTEN, Field(ge=0, le=BYTES_MAX)]
"""Bytes, also written with a unit, such as 8GiB."""
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]


def _nameable(name: str) -> str:
    if not name.isprintable():
        message = f"{name!r} has characters that are not printable"
        raise ValueError(message)
    if is_reserved(name):
        message = f"{name!r} cannot be a tenant's name: {RULE}"
        raise ValueError(message)
    return name


TenantName = Annotated[
    str,
    Field(min_length=1, max_length=TENANT_CHARACTERS_MAX),
    AfterValidator(_nameable),
]
