"""Own a Transformers `Cache` whose keys and values live in the daemon's pool, and a greedy loop that survives its loss.

The model, its weights and any sampling beyond greedy are the caller's business.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
import torch
from transformers import Cache, DynamicCache

from kvlease.cuda import DeviceMemory
from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    NeverFitsError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.geometry import floor_div
from kvlease.ids import BYTES_PER_KEY
from kvlease.integrations._models import cache_argument, model_digest, require_model
from kvlease.integrations._pages import WAIT_MS, LayerPages, LeasedBlocks, LeasedLayer
from kvlease.integrations._token_counts import TokenCounts
from kvlease.spec import FullAttention, SlidingWindow
from kvlease.views import layer_views

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvlease import Lease, Worker
    from kvlease.plan import LayerPlacement
    from kvlease.views import LayerTensors

__all__ = ["Generation", "LeasedCache", "generate", "model_digest"]

_LEASED_ATTEMPTS_MAX: Final = 3
"""Leases that `generate` tries for one request before it goes on without the daemon."""

_logger = logging.getLogger(__name__)


class LeasedCache(Cache):
    """Keep the keys and values of one sequence in the blocks of a lease.

    Pass it as `cache` (before Transformers 5.24 as `past_key_values`), to `model.generate` or to a loop of your own. New keys and values are written straight
    into the mapped pages, attention reads them from there, and the prefix that was a hit counts as seen already. The
    lease is extended as tokens come. A call raises `KVLeaseError` when the lease is lost or cannot grow; what was
    computed since is then worth nothing. Assisted decoding begins with an empty cache only: one with a hit refuses it.
    """

    def __init__(
        self,
        worker: Worker,
        lease: Lease,
        *,
        blocks_ahead: int = 1,
        num_tokens_max: int | None = None,
    ) -> None:
        """Wrap a lease that was just granted; `num_tokens_max` bounds what it is extended to ahead of need."""
        device = _device_of(worker)
        self._worker = worker
        self._blocks = LeasedBlocks(worker, lease, blocks_ahead, num_tokens_max)
        present = lease.hit_tokens
        self._blocks.shared_tokens = present
        self._keys = bytearray()
        self._pages = [
            LeasedLayer(self._blocks, _pages_of(tensors, placed), present)
            for tensors, placed in zip(
                layer_views(worker.plan, device), worker.plan.layers, strict=True
            )
        ]
        super().__init__(layers=list(self._pages))

    @classmethod
    def reserve(
        cls,
        worker: Worker,
        token_ids: Sequence[int],
        *,
        request_id: str,
        model: PreTrainedModel | None = None,
        num_tokens_max: int | None = None,
        wait_ms: int = WAIT_MS,
    ) -> Self:
        """Lease blocks for a prompt, reusing its longest cached prefix short of the last token.

        Given the model that shall compute into it, a cache that was registered for another is refused (`InvalidError`).
        Raises the refusal when no lease is granted.
        """
        _device_of(worker)
        if model is not None:
            require_model(model, worker.plan)
        tokens_per_key = worker.plan.hash_block_tokens
        # The last token's logits are wanted, so at least that token has to be computed.
        num_keys = floor_div(len(token_ids) - 1, tokens_per_key)
        keys = worker.keys.chain(token_ids[: num_keys * tokens_per_key], tokens_per_key)
        longest = worker.plan.longest_request_tokens
        tokens_ahead = worker.plan.tokens_per_block
        room_for = min(len(token_ids) + tokens_ahead, num_tokens_max or longest, longest)
        num_tokens = max(len(token_ids), room_for)
        lease = worker.reserve(request_id, keys=keys, num_tokens=num_tokens, wait_ms=wait_ms)
        if not lease.is_live:
            raise lease.refusal or UnknownLeaseError
        try:
            lease.map()
            return cls(worker, lease, num_tokens_max=num_tokens_max)
        except BaseException:
            lease.release()
            raise

    @property
    def lease(self) -> Lease:
        """The lease under the cache."""
        return self._blocks.lease

    @property
    def committed_tokens(self) -> int:
        """Tokens from the start that others may read, so that they are never written again."""
        return self._blocks.shared_tokens

    def activate_past_recording(self) -> None:
        """Take part in assisted decoding, which Transformers announces by this call, unless tokens are there already.

        Raises:
            WrongStateError: they are; Transformers would give the model the whole prompt, those tokens once more, and
                what it said then would be other tokens than without the cache.
        """
        num_present = self.get_seq_length()
        if num_present:
            message = (
                f"Assisted decoding would compute the {num_present} tokens of the cache once more, behind them; "
                "generate without assistance, or begin without a hit: LeasedCache(worker, lease), of a lease reserved "
                "without keys, and mapped."
            )
            raise WrongStateError(message, resource="tokens", need=0, available=num_present)
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # Transformers types no hooks

    def require_live(self) -> None:
        """Raise unless the lease still holds, which makes everything read from it up to now worth trusting."""
        self._blocks.require_live()

    def extend(self, num_tokens: int) -> None:
        """Make the lease cover `num_tokens` in all, and a little more."""
        self._blocks.cover(num_tokens)

    def reach(self, num_tokens: int) -> int:
        """Make the lease cover `num_tokens` in all, as far as windows have room; return how many it covers."""
        return self._blocks.reach(num_tokens)

    def commit(self, token_ids: Sequence[int]) -> int:
        """Make the blocks that are full findable under the keys of `token_ids`; return how many keys were handed in."""
        tokens_per_key = self._worker.plan.hash_block_tokens
        first_key = floor_div(self._blocks.shared_tokens, tokens_per_key)
        num_keys = floor_div(min(len(token_ids), self.get_seq_length()), tokens_per_key)
        if num_keys <= first_key:
            return 0
        self._require_all_layers()
        self.require_live()
        num_keyed = len(self._keys) // BYTES_PER_KEY
        fresh = token_ids[num_keyed * tokens_per_key : num_keys * tokens_per_key]
        self._keys += self._worker.keys.chain(
            fresh, tokens_per_key, bytes(self._keys[-BYTES_PER_KEY:])
        )
        keys = bytes(self._keys[first_key * BYTES_PER_KEY : num_keys * BYTES_PER_KEY])
        # From here on the blocks may be read by others, even if the answer is lost on its way.
        self._blocks.shared_tokens = num_keys * tokens_per_key
        self.lease.commit(num_keys * tokens_per_key, keys, first_key)
        self.require_live()
        return num_keys - first_key

    def _require_all_layers(self) -> None:
        """Raise where the model computed some of the layers only: others would be served what it did not write."""
        num_written = sum(layer.get_seq_length() == self.get_seq_length() for layer in self._pages)
        if num_written < len(self._pages):
            message = (
                f"The model wrote {num_written} layers, and the cache keeps {len(self._pages)}."
            )
            raise WrongStateError(
                message, resource="layers", need=len(self._pages), available=num_written
            )

    def evict(self) -> int:
        """Move all blocks to the host pool; until `reload` the cache cannot be used. Return the device blocks freed."""
        return self._blocks.evict()

    def reload(self) -> int:
        """Bring the blocks back, to other places; return the tokens present, from which on to compute again."""
        num_tokens = self._blocks.reload()
        for layer in self._pages:
            layer.truncate(num_tokens)
        return self.get_seq_length()

    def release(self) -> None:
        """End the lease; committed blocks stay findable."""
        self.lease.release()

    def __enter__(self) -> Self:
        """Return the cache itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease; what the daemon does not hear now, the next heartbeat tells it."""
        with contextlib.suppress(KVLeaseError):
            self.release()


def _pages_of(layer: LayerTensors, placed: LayerPlacement) -> LayerPages:
    """Return where a layer keeps its states; what Transformers could not read is refused."""
    if layer.keys is None or layer.values is None:
        message = (
            f"Layer {layer.name!r} does not keep plain keys and values, which Transformers needs."
        )
        raise InvalidError(message, resource="layers", rule="no_keys_and_values")
    spec = placed.spec
    if not isinstance(spec, FullAttention | SlidingWindow):
        message = (
            f"Layer {layer.name!r} is of kind {spec.kind}; a leased cache holds full attention and sliding "
            "windows. Plan the cache with one_group, so that every token is kept."
        )
        raise InvalidError(message, resource="layers", rule="kind_not_supported")
    window_tokens = spec.window_tokens if isinstance(spec, SlidingWindow) else 0
    return LayerPages(
        keys=layer.keys, values=layer.values, group=placed.group, window_tokens=window_tokens
    )


def _device_of(worker: Worker) -> NDArray[np.uint8] | DeviceMemory:
    if worker.gpu is not None:
        return worker.gpu
    if worker.device is None:
        raise InvalidError("This worker has no memory mapped; attach over the local socket.")
    return worker.device


def _integers(token_ids: Sequence[int]) -> list[int]:
    """Return the ids as plain integers, those of a tensor or an array, too."""
    try:
        return [operator.index(token) for token in token_ids]
    except TypeError as error:
        message = "A prompt is one sequence of token ids, each an integer."
        raise InvalidError(message, resource="token_ids") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What `generate` made, and what it cost: the prompt's tokens are its hits, from all tiers, and those computed."""

    tokens: tuple[int, ...]
    """The new tokens."""
    device_hit_tokens: int
    """Prompt tokens whose states were in the device pool before this request had computed them."""
    host_hit_tokens: int
    """The same of those that came back from the host pool."""
    store_hit_tokens: int
    """The same of those that came from the disk store or the remote one."""
    computed_tokens: int
    """Prompt tokens that this request computed; each is counted once."""
    recomputed_tokens: int
    """Tokens of the prompt and of what was made whose states were lost and computed again, each time."""
    recomputes: int
    """How often a lease was lost or could not grow, so that what was computed was computed again."""


def generate(
    model: PreTrainedModel,
    worker: Worker,
    token_ids: Sequence[int],
    *,
    max_new_tokens: int,
    request_id: str,
    on_step: Callable[[LeasedCache | None, int], None] | None = None,
) -> Generation:
    """Generate greedily over leased blocks, and without them where the daemon cannot help.

    `on_step` gets the cache (None while there is no lease) and the number of new tokens, after each of
    them; it may evict and reload. A lease that is lost costs a recomputation, and one that is refused
    the hits; neither reaches the caller.

    Raises:
        InvalidError: the call is malformed, or the cache was registered for another model.
    """
    require_model(model, worker.plan)
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
    """One request of `generate`, which outlives the caches that it is tried with."""

    def __init__(
        self,
        model: PreTrainedModel,
        token_ids: Sequence[int],
        max_new_tokens: int,
        on_step: Callable[[LeasedCache | None, int], None] | None,
    ) -> None:
        tokens = _integers(token_ids)
        if not tokens:
            raise InvalidError("A prompt has at least one token.")
        self._recomputes = 0
        self._model = model
        self._cache_argument = cache_argument(model)
        self._tokens = tokens
        self._num_prompt = len(tokens)
        self._num_tokens_max = len(tokens) + max_new_tokens
        self._on_step = on_step or (lambda _cache, _num_new: None)
        self._counts = TokenCounts(len(tokens))

    def with_lease(self, worker: Worker, request_id: str) -> None:
        """Go on to the end under a fresh lease; raise `KVLeaseError` when it is refused or lost."""
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
            # Only a lease that still holds proves that nobody else wrote what was just read.
            cache.require_live()
            cache.commit(self._tokens)
            self._tokens.append(token)
            self._on_step(cache, len(self._tokens) - self._num_prompt)

    def without_lease(self) -> None:
        """Go on to the end with memory of our own."""
        cache = DynamicCache(config=self._model.config)
        while not self._is_done:
            self._tokens.append(self._next_token(cache))
            self._on_step(None, len(self._tokens) - self._num_prompt)

    def result(self) -> Generation:
        """Return what was made."""
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
            # Windows have no room for the whole prompt: a part of it moves them on.
            self._compute(cache, num_covered)
            cache.commit(self._tokens)
        return self._compute(cache, len(self._tokens))

    def _compute(self, cache: Cache, num_tokens: int) -> int:
        """Run the model over the tokens up to so many; returns the next one."""
        num_present = cache.get_seq_length()
        ids = torch.tensor([self._tokens[num_present:num_tokens]], device=self._model.device)
        options = {self._cache_argument: cache, "use_cache": True, "logits_to_keep": 1}
        output = self._model(input_ids=ids, **options)
        self._counts.compute(num_present, num_tokens)
        return int(output.logits[0, -1].argmax())
