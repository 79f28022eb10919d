"""Own what is to be known of models: a digest of one, whether a cache was registered for it, and how it takes a cache.

What a model computes, and the cache that it computes into, are `transformers`'s business.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache

from kvlease.errors import InvalidError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvlease.plan import CachePlan

_PREFIX: Final = "transformers"
_ELEMENTS_PER_TENSOR: Final = 64
"""Elements of each weight that the digest covers, evenly spread."""
_NAMES_REMEMBERED: Final = 1_024
_NO_PART_OF_THE_MODEL: Final = frozenset(
    {"_name_or_path", "transformers_version", "output_attentions", "output_hidden_states", "use_cache"}
)  # fmt: skip
"""Fields of a config by which no state becomes another."""

_logger = logging.getLogger(__name__)

_known: WeakKeyDictionary[PreTrainedModel, tuple[tuple[int, ...], str]] = WeakKeyDictionary()
"""The digest of each model, and the weights that it was made from."""


def model_digest(model: PreTrainedModel) -> str:
    """Return what tells a model from others of its shape, to be registered as `PlanInputs.model_digest`.

    It covers the config, and of each weight its name, shape, type and 64 elements, evenly spread: two models that
    differ in a few elements only, or in which adapters are switched on, are told apart by a digest of the caller's own.
    It is made again where weights were replaced, or changed where they are.
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
    """Refuse a model that a cache was not registered for; warn once where the cache does not say for which it was.

    Raises:
        InvalidError: the cache keeps other layers, or what another model computed.
    """
    num_layers = len(DynamicCache(config=model.config).layers)
    if num_layers not in (0, len(plan.layers)):
        message = (
            f"The cache keeps {len(plan.layers)} layers, and the model has {num_layers}; register a cache "
            "from the config of this model."
        )
        raise InvalidError(
            message,
            resource="layers",
            need=num_layers,
            available=len(plan.layers),
            rule="other_model",
        )
    if not plan.model_digest:
        _warn_of_no_name(plan.layout_fingerprint)
    elif plan.model_digest.startswith(f"{_PREFIX}:") and plan.model_digest != model_digest(model):
        message = (
            f"The cache was registered for {plan.model_digest[:24]}..., and this model is "
            f"{model_digest(model)[:24]}...: it has other weights, or another config. Register a cache for this model."
        )
        raise InvalidError(message, resource="model_digest", rule="other_model")


@functools.lru_cache(maxsize=_NAMES_REMEMBERED)
def _warn_of_no_name(layout_fingerprint: str) -> None:
    _logger.warning(
        "The cache does not say which model it is for: two models of one config would be served each other's "
        "states. Register it with model_digest=kvlease.integrations.transformers.model_digest(model).",
        extra={"action": "model_unnamed", "layout": layout_fingerprint},
    )


def cache_argument(model: PreTrainedModel) -> str:
    """Return the name of the argument by which a model takes its cache: Transformers 5.24 gave many another one."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def _plain_config(model: PreTrainedModel) -> bytes:
    fields = model.config.to_dict()
    kept = {name: fields[name] for name in fields if name not in _NO_PART_OF_THE_MODEL}
    return json.dumps(kept, sort_keys=True, default=str).encode()


def _sample(weight: torch.Tensor) -> bytes:
    """Return the bytes of some elements; none of a weight that has no memory."""
    if weight.is_meta or not weight.numel():
        return b""
    flat = weight.detach().reshape(-1)
    num_elements = min(_ELEMENTS_PER_TENSOR, len(flat))
    places = [index * len(flat) // num_elements for index in range(num_elements)]
    chosen = flat[torch.tensor(places, device=flat.device)]
    return chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _version_of(weight: torch.Tensor) -> int:
    """Return how often a weight was written; torch counts none of those made for inference."""
    return 0 if weight.is_inference() else weight._version  # noqa: SLF001 - torch has no other name for it
