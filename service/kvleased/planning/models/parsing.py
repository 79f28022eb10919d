"""Own the reading of a config.json: typed fields, models inside models, and fields that published configs leave out.

The config classes of Transformers would load torch, which the daemon must not, so the JSON is read as it is; a test
compares the defaults here with those classes'.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvlease.errors import InvalidError
from kvlease.units import TOKENS_MAX
from kvleased.planning.models.defaults import DEFAULTS, NESTED_DEFAULTS, NESTED_TYPES
from kvleased.planning.models.known_types import type_of_class
from kvleased.planning.models.refusals import bad_field, missing_field

LAYERS_MAX: Final = 4096
"""Layers of the deepest model that is planned."""

_BYTE_ORDER_MARK: Final = "\ufeff"
_CONFIG_CHARACTERS_MAX: Final = 2**20
_DIMENSION_MAX: Final = 2**24
_INNER_FIELDS: Final = ("thinker_config", "text_config", "language_config", "llm_config")
_SHAPE_FIELDS: Final = ("num_hidden_layers", "num_attention_heads", "hidden_size")
"""Fields for which a class's defaults describe one model: if one of these fields differs, the defaults do not apply."""
_LAYER_FIELDS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_DECODER_FIELDS: Final = ("decoder_layers", "num_decoder_layers")
"""Fields for the decoder alone: beside an encoder, the others count the encoder's layers."""
_POSITION_FIELDS: Final = (
    "max_position_embeddings",
    "max_target_positions",
    "model_max_length",
    "n_positions",
    "max_seq_len",
    "seq_length",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The fields of one model; a null counts as a missing field."""

    fields: Mapping[str, object]
    path: str = ""
    """The path to the fields if they are inside of a larger config, such as "text_config."."""

    @property
    def model_type(self) -> str:
        """The architecture's name in Transformers; empty if the config does not say."""
        return str(self.fields.get("model_type") or "")[:80]

    @property
    def num_layers(self) -> int:
        """The number of layers of the decoder.

        Raises:
            InvalidError: the config does not say, or says too many.
        """
        of_decoder = self.given_count(*_DECODER_FIELDS, most=LAYERS_MAX)
        return of_decoder or self.count(*_LAYER_FIELDS, most=LAYERS_MAX)

    @property
    def max_positions(self) -> int | None:
        """The longest request, in tokens, that the model was made for; None if the config does not say."""
        return self.optional_count(*_POSITION_FIELDS)

    @property
    def dtype(self) -> str | None:
        """The element type of the weights; None if the config does not say."""
        dtype = self.value("dtype", "torch_dtype")
        return dtype.removeprefix("torch.") if isinstance(dtype, str) else None

    def value(self, *names: str) -> object | None:
        """Return the value of the first of these fields that is given; None if none is."""
        return next((value for name in names if (value := self.fields.get(name)) is not None), None)

    def count(self, *names: str, most: int = _DIMENSION_MAX) -> int:
        """Return the number in the first of these fields that is given; it must be at least 1.

        Raises:
            InvalidError: none is given, or it is not such a number.
        """
        found = self.given_count(*names, most=most)
        if found is None:
            raise self.lacks(names[0])
        return found

    def given_count(self, *names: str, most: int = _DIMENSION_MAX) -> int | None:
        """Return the number in the first of these fields that is given, at least 1; None if none is given.

        Raises:
            InvalidError: it is not such a number; 0 is not one, either.
        """
        for name in names:
            value = self.fields.get(name)
            if value is not None:
                return _counted(self.path + name, value, least=1, most=most)
        return None

    def optional_count(self, *names: str) -> int | None:
        """Return the number in the first of these fields that is given and not false; None if it is 0 or none is given.

        Raises:
            InvalidError: it is not a number.
        """
        for name in names:
            value = self.fields.get(name)
            if value is not None and value is not False:
                return _counted(self.path + name, value, least=0, most=TOKENS_MAX) or None
        return None

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return whether a field is set."""
        value = self.fields.get(name)
        return default if value is None else bool(value)

    def words(self, *names: str) -> tuple[str, ...]:
        """Return the words in the first of these lists that is given; none if no list is given.

        Raises:
            InvalidError: the field is not a list.
        """
        return tuple(str(item)[:40] for item in self._items(*names))

    def counts(self, *names: str) -> tuple[int, ...]:
        """Return the numbers in the first of these lists that is given; none if no list is given.

        Raises:
            InvalidError: the field is not a list of numbers.
        """
        return tuple(
            _counted(f"{self.path}{names[0]}[]", item, least=0, most=TOKENS_MAX)
            for item in self._items(*names)
        )

    def inner(self, name: str) -> "Config":
        """Return the fields of the object in this field.

        Raises:
            InvalidError: there is no such object.
        """
        value = self.fields.get(name)
        if value is None:
            raise self.lacks(name)
        if not isinstance(value, dict):
            raise self.contradicts(name, value, "which is not a JSON object")
        return Config(fields=value, path=f"{self.path}{name}.")

    def lacks(self, name: str) -> InvalidError:
        """Return the refusal of a config that lacks a field; it names the field by its whole path."""
        return missing_field(self.path + name)

    def contradicts(self, name: str, value: object, why: str) -> InvalidError:
        """Return the refusal of a field that has a wrong type or contradicts another; it names the whole path."""
        return bad_field(self.path + name, value, why)

    def _items(self, *names: str) -> list[object]:
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if not isinstance(value, list):
                raise self.contradicts(name, value, "which is not a list")
            return value
        return []


def parsed(config_text: str) -> Config:
    """Return the config of the decoder that the text of a config.json describes.

    In a multimodal model, the model inside stands for the whole. Fields that published configs leave to their class get
    that class's defaults, unless they are null.

    Raises:
        InvalidError: the text is not a JSON object, is too long, or lacks the inner model that its type must have.
    """
    fields = _named(_read(config_text))
    path = ""
    for name in _INNER_FIELDS:
        inner = fields.get(name)
        if isinstance(inner, dict):
            fields = _named(_unwrapped(fields, inner))
            path += f"{name}."
    model_type = str(fields.get("model_type") or "")
    if model_type in NESTED_TYPES:
        if not any(fields.get(name) is not None for name in _LAYER_FIELDS):
            raise missing_field(path + _inner_field(model_type))
        model_type = NESTED_TYPES[model_type]
        fields["model_type"] = model_type
    defaults = DEFAULTS.get(model_type, {})
    if path:
        defaults = _nested_defaults(model_type, fields) | defaults
    merged = {**defaults, **_counted_layers(fields), **fields}
    return Config(fields=_given(merged), path=path)


def _read(config_text: str) -> dict[str, object]:
    if len(config_text) > _CONFIG_CHARACTERS_MAX:
        message = f"model_config has {len(config_text)} characters; at most {_CONFIG_CHARACTERS_MAX} are read"
        raise InvalidError(
            message, resource="model_config", need=len(config_text), limit=_CONFIG_CHARACTERS_MAX
        )
    try:
        config = json.loads(config_text.removeprefix(_BYTE_ORDER_MARK))
    except (ValueError, RecursionError) as error:
        message = f"model_config is not the text of a config.json: {error}"
        raise InvalidError(message, resource="model_config") from error
    if not isinstance(config, dict):
        message = f"model_config must be a JSON object, not {type(config).__name__}"
        raise InvalidError(message, resource="model_config")
    return config


def _named(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of a model; if they name no model_type, its class gives it."""
    if fields.get("model_type"):
        return dict(fields)
    architectures = fields.get("architectures")
    classes = architectures if isinstance(architectures, list) else []
    return {**fields, "model_type": type_of_class(classes) or None}


def _unwrapped(outer: Mapping[str, object], inner: Mapping[str, object]) -> dict[str, object]:
    """Return the inner model's fields, and those that are given once for both models."""
    outer_type = str(outer.get("model_type") or "")
    said_once = {
        name: outer[name] for name in ("architectures", "dtype", "torch_dtype") if name in outer
    }
    said = {
        name: value
        for name, value in inner.items()
        if value is not None or name not in (*said_once, "model_type")
    }
    return {"model_type": NESTED_TYPES.get(outer_type), **said_once, **said}


def _inner_field(model_type: str) -> str:
    """Return the field that holds the inner model of such a model."""
    return "language_config" if model_type == "deepseek_vl_v2" else "text_config"


def _nested_defaults(model_type: str, fields: Mapping[str, object]) -> dict[str, object]:
    """Return what an inner model may leave out; if its shape is another model's, only its positions."""
    defaults = NESTED_DEFAULTS.get(model_type, {})
    is_another = any(
        name in defaults and fields.get(name) not in (None, defaults[name])
        for name in _SHAPE_FIELDS
    )
    return (
        {"max_position_embeddings": defaults["max_position_embeddings"]} if is_another else defaults
    )


def _counted_layers(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the number of layers, if a config only lists the layers."""
    for name in ("hybrid_override_pattern", "layers_block_type"):
        listed = fields.get(name)
        if isinstance(listed, str | list):
            return {"num_hidden_layers": len(listed)}
    return {}


def _given(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}


def _counted(name: str, value: object, *, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        why = f"but it must be an integer from {least} to {most}, not {type(value).__name__}"
        raise bad_field(name, json.dumps(value), why)
    if not least <= value <= most:
        why = f"but it must be from {least} to {most}"
        raise bad_field(name, value, why, need=_on_the_wire(value), limit=most)
    return value


def _on_the_wire(value: int) -> int | None:
    """Return the number if an error can carry it as an int64, else None."""
    return value if -(2**63) <= value < 2**63 else None
