"""Own the rule that true and false are no numbers, for all settings; the other types of values are `setting_kinds`."""

from typing import Final

from pydantic import BaseModel, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

_NUMBERS: Final = (int, float)


class StrictNumbers(BaseModel):
    """A model whose numbers may not be given as true or false, which pydantic takes for 1 and 0."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth(cls, value: object, info: ValidationInfo) -> object:
        if (
            isinstance(value, bool)
            and cls.model_fields[str(info.field_name)].annotation in _NUMBERS
        ):
            raise PydanticCustomError("truth_for_number", "true and false are no numbers")
        return value
