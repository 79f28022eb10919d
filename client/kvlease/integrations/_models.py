"""Own what a cache needs to know of a model: its digest, whether it fits the cache, and how it takes a cache.

What a model computes is the caller's business, and the cache that it computes into is `LeasedCache`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from kvlease.errors import InvalidError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlease.items import Item
    from kvlease.plan import CachePlan

_PREFIX: Final = "transformers"
_ELEMENTS_PER_TENSOR: Final = 64
"""Elements of each weight that the digest covers, evenly spaced."""
_NAMES_REMEMBERED: Final = 1_024
_NO_PART_OF_THE_MODEL: Final = frozenset(
    {"_name_or_path", "transformers_version", "output_attentions", "output_hidden_states", "use_cache"}
)  # fmt: skip
"""Fields of a config that change no state."""
_PLACEHOLDERS: Final = ("image_token_id", "video_token_id", "audio_token_id")
"""Fields of a config that name placeholder tokens, which stand for something else, such as an image."""
_NOT_APPLIED: Final = {
    "repetition_penalty": (None, 1.0),
    "encoder_repetition_penalty": (None, 1.0),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "bad_words_ids": (None,),
    "sequence_bias": (None,),
    "suppress_tokens": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "guidance_scale": (None, 1.0),
}
"""Fields of a generation config that can change the greedy choice, and the values with which they do not."""

_logger = logging.getLogger(__name__)

_known: WeakKeyDictionary[PreTrainedModel, tuple[tuple[int, ...], str]] = WeakKeyDictionary()
"""The digest of each model, and a mark of the weights that it was made from."""


def model_digest(model: PreTrainedModel) -> str:
    """Return the digest that tells a model from others of its shape, to be registered as `PlanInputs.model_digest`.

    It covers the config and, of each weight, the name, shape, type and 64 evenly spaced elements. Two models that
    differ in a few elements only, or in the adapters that are switched on, need a digest made by the caller. The digest
    is computed again when weights were replaced or written in place.
    """
    weights = model.state_dict(keep_vars=True)
    made_from = tuple(
        part for weight in weights.values() for part in (weight.data_ptr(), _version_of(weight))
    )
    known = _known.get(model)
    if known is not None and known[0] == made_from:
        return known[1]
    digest = hashlib.sha256(_plain_config(model))
    for name, weight in weights.items():
        digest.update(f"\0{name}\0{tuple(weight.shape)}\0{weight.dtype}\0".encode())
        digest.update(_sample(weight))
    said = f"{_PREFIX}:{digest.hexdigest()}"
    _known[model] = (made_from, said)
    return said


def require_model(model: PreTrainedModel, plan: CachePlan) -> None:
    """Refuse a model that the cache was not registered for; warn once if the cache does not name its model.

    Raises:
        InvalidError: the cache keeps other layers, or was registered for another model, or the model has an encoder, or
            its keys depend on the length of a request.
    """
    if model.config.is_encoder_decoder:
        message = (
            f"{type(model).__name__} has an encoder, and what its decoder keeps depends on the encoder's output, which "
            "no key covers; a leased cache does not support such models. Generate without it."
        )
        raise InvalidError(message, resource="model", rule="kind_not_supported")
    num_layers = len(DynamicCache(config=model.config).layers)
    if num_layers not in (0, len(plan.layers)):
        num_shared = getattr(model.config.get_text_config(), "num_kv_shared_layers", 0) or 0
        message = f"The cache keeps {len(plan.layers)} layers, but the model has {num_layers}; " + (
            f"{num_shared} of these share the states of other layers, which a leased cache does not support."
            if num_layers == len(plan.layers) + num_shared
            else "register a cache from the config of this model."
        )
        raise InvalidError(
            message,
            resource="layers",
            need=num_layers,
            available=len(plan.layers),
            rule="other_model",
        )
    _require_steady_keys(model, plan.longest_request_tokens)
    if not plan.model_digest:
        _warn_of_no_name(plan.layout_fingerprint)
    elif plan.model_digest.startswith(f"{_PREFIX}:") and plan.model_digest != model_digest(model):
        message = (
            f"The cache was registered for {plan.model_digest[:24]}..., but this model is "
            f"{model_digest(model)[:24]}..., with other weights or another config. Register a cache for this model."
        )
        raise InvalidError(message, resource="model_digest", rule="other_model")


def _require_steady_keys(model: PreTrainedModel, longest_request_tokens: int) -> None:
    """Refuse a cache whose requests may be so long that blocks cannot be shared between shorter and longer ones.

    Some rotary embeddings turn every key by another angle once a request is longer than the model was first trained
    for. A block of such keys is right only for requests on the same side of that length.
    """
    config = model.config.get_text_config()
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        kind = str(rope.get("rope_type", ""))
        if "dynamic" in kind:
            steady_tokens = config.max_position_embeddings
        elif kind == "longrope":
            steady_tokens = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", config.max_position_embeddings
            )
        else:
            continue
        if longest_request_tokens > steady_tokens:
            message = (
                f"Keys of this model depend on the length of the request beyond {steady_tokens} tokens (rope_type "
                f"{kind}), so blocks of longer and shorter requests cannot be shared, but the cache allows requests of "
                f"{longest_request_tokens}; register the cache with longest_request_tokens={steady_tokens}."
            )
            raise InvalidError(
                message,
                resource="longest_request_tokens",
                need=longest_request_tokens,
                limit=steady_tokens,
                rule="keys_depend_on_length",
            )


def _ropes(parameters: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary embeddings of a config, which has one for all layers or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        if "rope_type" in parameters:
            yield parameters
        for one in parameters.values():
            yield from _ropes(one)


def require_items(model: PreTrainedModel, token_ids: Sequence[int], items: Sequence[Item]) -> None:
    """Refuse a prompt with a placeholder token, such as an image's, that no item covers.

    Raises:
        InvalidError: a placeholder is not covered, so what was computed for one image would be found for another.
    """
    ids = {getattr(model.config, name, None) for name in _PLACEHOLDERS} - {None}
    if not ids:
        return
    covered = [range(item.first_token, item.first_token + item.num_tokens) for item in items]
    for place, token in enumerate(token_ids):
        if token in ids and not any(place in one for one in covered):
            message = (
                f"Token {place} of the prompt stands for an image, a video or a sound, but no item covers it; "
                "pass items=[ContextItem(digest=..., first_token=..., num_tokens=...)]. Without it, what was computed "
                "for one image would be found for another."
            )
            raise InvalidError(message, resource="items", rule="items_missing")


def warn_of_what_is_not_applied(model: PreTrainedModel) -> None:
    """Warn once if a model's generation config asks for other tokens than the greedy ones."""
    config = model.generation_config
    fields = tuple(
        name for name, idle in _NOT_APPLIED.items() if getattr(config, name, None) not in idle
    )
    if fields:
        _warn_of_fields(fields)


@functools.lru_cache(maxsize=_NAMES_REMEMBERED)
def _warn_of_fields(fields: tuple[str, ...]) -> None:
    _logger.warning(
        "The model's generation_config has %s, which kvlease's generate does not apply: it always takes the likeliest "
        "token. Pass a LeasedCache to model.generate to apply all of it.",
        ", ".join(fields),
        extra={"action": "generation_config_not_applied"},
    )


@functools.lru_cache(maxsize=_NAMES_REMEMBERED)
def _warn_of_no_name(layout_fingerprint: str) -> None:
    _logger.warning(
        "The cache does not say which model it is for, so two models with the same config would be served each "
        "other's states. Register it with model_digest=kvlease.integrations.transformers.model_digest(model).",
        extra={"action": "model_unnamed", "layout": layout_fingerprint},
    )


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument that takes the cache; Transformers 5.24 renamed it in many models."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _plain_config(model: PreTrainedModel) -> bytes:
    fields = model.config.to_dict()
    kept = {name: fields[name] for name in fields if name not in _NO_PART_OF_THE_MODEL}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def _sample(weight: torch.Tensor) -> bytes:
    """Return the bytes of some elements of a weight; none if the weight has no memory."""
    if weight.is_meta or not weight.numel():
        return b""
    flat = weight.detach().reshape(-1)
    num_elements = min(_ELEMENTS_PER_TENSOR, len(flat))
    places = [index * len(flat) // num_elements for index in range(num_elements)]
    chosen = flat[torch.tensor(places, device=flat.device)]
    return chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _version_of(weight: torch.Tensor) -> int:
    """Return how often a weight was written; torch keeps no such count for inference tensors."""
    return 0 if weight.is_inference() else weight._version  # noqa: SLF001 - torch has no other name for it
