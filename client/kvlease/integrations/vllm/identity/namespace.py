"""Own the identity of an engine's bytes, its digest and the names made from it; the plan says where each byte lies.

An `Identity` is a list of named fields, read from vLLM's configuration alone, so that all processes of an engine get
the same one. It travels as the plan's `model_digest`: a digest of all fields, and a short digest of each, so that a
refusal can name the fields in which two engines differ.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from kvlease.integrations.vllm.identity.fields import (
    DIGEST_CHARACTERS,
    FIELDS,
    RANDOM_SEED,
    addresses_of,
    digest_of,
    fields_of,
)

_PREFIX: Final = "vllm1"
_FIELD_CHARACTERS: Final = 8
_NAME_CHARACTERS: Final = 24


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything that an engine's bytes depend on, except for their places."""

    values: tuple[str, ...]
    """One text for each of FIELDS."""
    refusal: str = ""
    """Why nobody can find this engine's blocks, and what to change; empty if they can be found."""
    has_adapters: bool = False
    """Whether requests may use adapters (LoRA), which vLLM's hashes tell apart only by name and path."""

    @classmethod
    def of(cls, vllm_config: Any, kv_cache_config: Any = None, *, weights: str = "") -> Self:
        """Read the identity of an engine; `weights` identifies its weights, if it is set."""
        refusal = ""
        try:
            read = fields_of(vllm_config, kv_cache_config, weights)
        except OSError as error:
            refusal = f"the model's files cannot be read ({error}); set `weights` to a text that identifies its weights"
            read = fields_of(vllm_config, kv_cache_config, "unknown")
        if (address := addresses_of(vllm_config)) and not weights:
            refusal = (
                f"the model's weights are at {address}, where they can be replaced unnoticed; "
                "set `weights` to a text that identifies them"
            )
        if read["hash_seed"] == RANDOM_SEED:
            refusal = (
                f"prefix_caching_hash_algo {read['hash_algorithm']} has a different random seed in every engine; "
                "use sha256, or set PYTHONHASHSEED to the same value everywhere"
            )
        has_adapters = getattr(vllm_config, "lora_config", None) is not None
        return cls(tuple(read[name] for name in FIELDS), refusal, has_adapters)

    def in_mode(self, mode: str) -> Self:
        """Return the identity with the mode added to its format, for modes that use a pool in their own way.

        An owned-memory engine takes all blocks of its pool, so another engine that shared the pool would wait for ever.
        """
        at = FIELDS.index("format")
        values = (*self.values[:at], f"{self.values[at]}, {mode}", *self.values[at + 1 :])
        return replace(self, values=values)

    @property
    def digest(self) -> bytes:
        """The 32-byte digest of all fields."""
        return digest_of(*self.values)

    @property
    def model_digest(self) -> str:
        """The identity in the form that the plan carries: the digest of all fields, then a short digest of each."""
        short = "".join(digest_of(value).hex()[:_FIELD_CHARACTERS] for value in self.values)
        return f"{_PREFIX}:{self.digest.hex()}:{short}"

    def differing(self, model_digest: str) -> list[str]:
        """Return the fields in which an identity, given as a plan carries it, differs; empty if the two are equal."""
        if model_digest == self.model_digest:
            return []
        prefix, _, rest = model_digest.partition(":")
        _, _, theirs = rest.partition(":")
        own = self.model_digest.rpartition(":")[2]
        if prefix != _PREFIX or len(theirs) != len(own):
            return [
                "the form of the identity: the cache is not vLLM's, or another version of kvlease made it"
            ]
        pairs = zip(FIELDS, self.values, _pieces(own), _pieces(theirs), strict=True)
        return [f"{name} (here {value[:60]})" for name, value, one, other in pairs if one != other]

    def cache_name(self, mode: str) -> str:
        """Return the name of the cache that engines of this identity share in a mode such as "offload"."""
        model = re.sub(r"[^a-z0-9]+", "-", Path(self.values[FIELDS.index("model")]).name.lower())
        slug = model.strip("-")[:_NAME_CHARACTERS].strip("-") or "model"
        return f"vllm-{mode}-{slug}-{self.digest.hex()[:DIGEST_CHARACTERS]}"


def magazine_name(vllm_config: Any, mode: str) -> str:
    """Return the name of an engine's magazine in a mode: the same in all its processes, and in no other engine."""
    transfer = vllm_config.kv_transfer_config
    seen = digest_of(
        str(getattr(transfer, "engine_id", "")), str(getattr(vllm_config, "instance_id", ""))
    )
    return f"vllm-{mode}-{seen.hex()[:32]}"


def rank_mark(vllm_config: Any) -> str:
    """Return what the name of a pool ends with that only one data parallel rank uses; empty for the first rank."""
    index = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    return f"-dp{index}" if index else ""


def _pieces(short: str) -> Iterator[str]:
    return (
        short[at : at + _FIELD_CHARACTERS]
        for at in range(0, len(FIELDS) * _FIELD_CHARACTERS, _FIELD_CHARACTERS)
    )
