"""Own the common part of all JSON bodies: how strictly they are read, and the ranges of their numbers."""

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field

UINT32_MAX: Final = 2**32 - 1
UINT64_MAX: Final = 2**64 - 1
JSON_INTEGER_MAX: Final = 2**53 - 1
"""The largest integer that every JSON reader carries exactly."""

Count = Annotated[int, Field(ge=0, le=UINT32_MAX)]
WaitMs = Annotated[Count, Field(description="Milliseconds to wait for blocks; 0 does not wait.")]
CopyMs = Annotated[
    Count,
    Field(
        description="Milliseconds to wait for copies; 0 takes the daemon's own limit, copy_wait_ms."
    ),
]
Bytes = Annotated[int, Field(ge=0, le=UINT64_MAX, json_schema_extra={"maximum": JSON_INTEGER_MAX})]
"""The protocol carries more than the daemon takes, so it is the daemon that refuses more, as over other transports."""
Percent = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Id = Annotated[int, Field(ge=-JSON_INTEGER_MAX, le=JSON_INTEGER_MAX)]
Number = Annotated[int, Field(ge=0, le=JSON_INTEGER_MAX)]
"""An id or a sequence number, counted from 1; 0 stands for none."""
Name = Annotated[str, Field(json_schema_extra={"maxLength": 256})]


def _tell_required(schema: dict[str, Any]) -> None:
    """Have a schema require the fields whose default is out of range: left out, they are refused with that default."""
    for name, field in schema.get("properties", {}).items():
        default = field.get("default")
        is_short = isinstance(default, str) and len(default) < field.get("minLength", 0)
        if is_short or (isinstance(default, int) and default < field.get("minimum", default)):
            del field["default"]
            schema.setdefault("required", []).append(name)


class Body(BaseModel):
    """A JSON body: frozen, strict, and without fields of its own invention."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        val_json_bytes="base64",
        ser_json_bytes="base64",
        protected_namespaces=(),
        json_schema_extra=_tell_required,
    )

    def fields(self) -> dict[str, Any]:
        """Return the fields by the names of the protocol, as its messages take them."""
        return self.__dict__
