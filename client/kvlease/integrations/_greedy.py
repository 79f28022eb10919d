"""Own a greedy loop over leased blocks that survives their loss; all other sampling is left to Transformers."""

from __future__ import annotations

import logging
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from transformers import DynamicCache

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.integrations._leased_cache import LeasedCache
from kvlease.integrations._models import (
    cache_argument,
    require_model,
    warn_of_what_is_not_applied,
)
from kvlease.integrations._token_counts import TokenCounts
from kvlease.units import TOKENS_MAX, checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import Cache, PreTrainedModel

    from kvlease import Worker

_LEASED_ATTEMPTS_MAX: Final = 3
"""Leases that `generate` tries for one request before it goes on without the daemon."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What `generate` made, and what it cost: each prompt token is a hit in some tier or was computed."""

    tokens: tuple[int, ...]
    """The new tokens."""
    device_hit_tokens: int
    """Prompt tokens whose states were found in the device pool."""
    host_hit_tokens: int
    """Prompt tokens whose states came back from the host pool."""
    store_hit_tokens: int
    """Prompt tokens whose states came from the disk or remote store."""
    computed_tokens: int
    """Prompt tokens that this request computed; each counts once."""
    recomputed_tokens: int
    """Prompt and new tokens whose states were lost and computed again; they count each time."""
    recomputes: int
    """How often a lease was lost or could not grow after something had been computed under it."""


def generate(
    model: PreTrainedModel,
    worker: Worker,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    request_id: str,
    on_step: Callable[[LeasedCache | None, int], None] | None = None,
) -> Generation:
    """Generate greedily over leased blocks, and without them if the daemon cannot help.

    Of the model's generation config only the end-of-text tokens are used; a warning says so once if other settings
    would change the result. After each new token, `on_step` gets the cache (None while there is no lease) and the
    number of new tokens; it may evict and reload. A lost lease costs a recomputation, and a refused one costs the hits;
    neither reaches the caller.

    Raises:
        InvalidError: the call is malformed, or the cache was registered for another model.
    """
    require_model(model, worker.plan)
    warn_of_what_is_not_applied(model)
    run = _GreedyRun(model, token_ids, max_new_tokens, on_step)
    for attempt in range(_LEASED_ATTEMPTS_MAX):
        try:
            run.with_lease(worker, f"{request_id}.{attempt}" if attempt else request_id)
        except InvalidError:
            raise
        except KVLeaseError as error:
            _logger.warning(
                "A lease was lost or refused: %s",
                error.message,
                extra={"action": "recompute", "code": error.code},
            )
            if isinstance(error, NeverFitsError):
                break
        else:
            return run.result()
    run.without_lease()
    return run.result()


class _GreedyRun:
    """One request of `generate`; it outlives the caches that it tries."""

    def __init__(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        max_new_tokens: int,
        on_step: Callable[[LeasedCache | None, int], None] | None,
    ) -> None:
        tokens = _integers(token_ids)
        checked_count("max_new_tokens", max_new_tokens, least=1, most=TOKENS_MAX)
        if not tokens:
            raise InvalidError("A prompt must have at least one token.", resource="prompt")
        self._recomputes = 0
        self._model = model
        self._cache_argument = cache_argument(model)
        self._tokens = tokens
        self._num_prompt = len(tokens)
        self._num_tokens_max = len(tokens) + max_new_tokens
        self._on_step = on_step or (lambda _cache, _num_new: None)
        self._counts = TokenCounts(len(tokens))

    def with_lease(self, worker: Worker, request_id: str) -> None:
        """Generate to the end under a fresh lease; raise `KVLeaseError` when the lease is refused or lost."""
        with LeasedCache.reserve(
            worker, self._tokens, request_id=request_id, num_tokens_max=self._num_tokens_max
        ) as cache:
            num_hit = cache.get_seq_length()
            self._counts.hit(num_hit, cache.lease.device_hit_tokens, cache.lease.host_hit_tokens)
            try:
                self._go_on(cache)
            except KVLeaseError:
                self._recomputes += cache.get_seq_length() > num_hit
                raise

    def _go_on(self, cache: LeasedCache) -> None:
        while not self._is_done:
            token = self._next_token(cache)
            # Only a lease that still holds proves that nobody else wrote the pages just read.
            cache.require_live()
            cache.commit(self._tokens)
            self._tokens.append(token)
            self._on_step(cache, len(self._tokens) - self._num_prompt)

    def without_lease(self) -> None:
        """Generate to the end in a cache of our own, without the daemon."""
        cache = DynamicCache(config=self._model.config)
        while not self._is_done:
            self._tokens.append(self._next_token(cache))
            self._on_step(None, len(self._tokens) - self._num_prompt)

    def result(self) -> Generation:
        """Return the new tokens and the counts."""
        return Generation(
            tokens=tuple(self._tokens[self._num_prompt :]),
            device_hit_tokens=self._counts.device_hits,
            host_hit_tokens=self._counts.host_hits,
            store_hit_tokens=self._counts.store_hits,
            computed_tokens=self._counts.computed,
            recomputed_tokens=self._counts.recomputed,
            recomputes=self._recomputes,
        )

    @property
    def _is_done(self) -> bool:
        stops = self._model.generation_config.eos_token_id
        stops = stops if isinstance(stops, list) else [stops]
        has_stopped = len(self._tokens) > self._num_prompt and self._tokens[-1] in stops
        return has_stopped or len(self._tokens) >= self._num_tokens_max

    @torch.inference_mode()
    def _next_token(self, cache: Cache) -> int:
        while isinstance(cache, LeasedCache):
            num_covered = cache.reach(len(self._tokens))
            if num_covered == len(self._tokens) or num_covered <= cache.get_seq_length():
                break
            # Windows have no room for the whole prompt: computing and committing a part of it moves them on.
            self._compute(cache, num_covered)
            cache.commit(self._tokens)
        return self._compute(cache, len(self._tokens))

    def _compute(self, cache: Cache, num_tokens: int) -> int:
        """Run the model over the tokens not yet in the cache, up to `num_tokens`; return the next token."""
        num_present = cache.get_seq_length()
        ids = torch.tensor([self._tokens[num_present:num_tokens]], device=self._model.device)
        options = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
        output = self._model(input_ids=ids, **options)
        self._counts.compute(num_present, num_tokens)
        return int(output.logits[0, -1].argmax())


def _integers(token_ids: Sequence[int]) -> list[int]:
    """Return the ids as plain integers, also those of a tensor or an array."""
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError as error:
        message = "A prompt must be one sequence of token ids, each an integer."
        raise InvalidError(message, resource="token_ids") from error
