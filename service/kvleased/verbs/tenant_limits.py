"""Own how the limits in a call are read; the settings and the core know what they mean beside other tenants'."""

from collections.abc import Mapping
from typing import Final, NamedTuple, cast

from annotated_types import Ge, Gt, Le
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from kvlease.errors import InvalidError
from kvlease.units import BYTES_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.calls import checks
from kvleased.config.tenant_settings import TenantSettings

_DEFAULTS: Final = TenantSettings()


class _Range(NamedTuple):
    least: float
    most: float
    is_open: bool
    """Whether the number must be above `least`, not equal to it."""


def limits_from(limits: pb.TenantLimits) -> TenantSettings:
    """Return limits in the form of the settings; a field that is left out has its default.

    Raises:
        InvalidError: a limit is out of its range, or a minimum is above its maximum.
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
        # Each limit is in its range, so two of them contradict each other.
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidError(message, resource="limits") from error


def _range_of(field: FieldInfo) -> _Range:
    bounds = [one for one in field.metadata if isinstance(one, Ge | Gt | Le)]
    (least,) = (one for one in bounds if isinstance(one, Ge | Gt))
    (most,) = (one.le for one in bounds if isinstance(one, Le))
    is_open = isinstance(least, Gt)
    bound = least.gt if isinstance(least, Gt) else least.ge
    # The settings allow larger numbers, which JSON could not carry exactly.
    return _Range(cast("float", bound), min(cast("float", most), BYTES_MAX), is_open)


_RANGES: Final[Mapping[str, _Range]] = {
    name: _range_of(field) for name, field in TenantSettings.model_fields.items()
}
