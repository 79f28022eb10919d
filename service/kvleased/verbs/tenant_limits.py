"""Own how a caller's limits of a tenant are read; what they mean to the others' is the settings' and the core's."""

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kvlease.errors import InvalidError
from kvlease.units import BYTES_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased import checks
from kvleased.config.settings import TenantSettings

_DEFAULTS: Final = TenantSettings()


class _Range(NamedTuple):
    least: float
    most: float
    is_open: bool
    """Whether it must be above the least."""


def limits_from(limits: pb.TenantLimits) -> TenantSettings:
    """Return limits as the settings have them; what is left out has its default.

    Raises:
        InvalidError: one is out of its range, or a minimum is above its maximum.
    """
    fields = {
        field.name: getattr(limits, field.name)
        if not field.has_presence or limits.HasField(field.name)
        else getattr(_DEFAULTS, field.name)
        for field in limits.DESCRIPTOR.fields
    }
    for name, value in fields.items():
        least, most, is_open = _RANGES[name]
        if isinstance(value, int):
            checks.count(f"limits.{name}", value, int(least), int(most))
        else:
            checks.number(f"limits.{name}", value, least, most, is_open=is_open)
    try:
        return TenantSettings(**fields)
    except ValidationError as error:
        # Each is in its range; what is left is what two of them are to each other.
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidError(message, resource="limits") from error


def _range_of(field: FieldInfo) -> _Range:
    bounds = [one for one in field.metadata if isinstance(one, Ge | Gt | Le)]
    (least,) = (one for one in bounds if isinstance(one, Ge | Gt))
    (most,) = (one.le for one in bounds if isinstance(one, Le))
    is_open = isinstance(least, Gt)
    bound = least.gt if isinstance(least, Gt) else least.ge
    # The settings take more, which JSON could not carry.
    return _Range(cast("float", bound), min(cast("float", most), BYTES_MAX), is_open)


_RANGES: Final[Mapping[str, _Range]] = {
    name: _range_of(field) for name, field in TenantSettings.model_fields.items()
}
