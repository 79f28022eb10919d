"""Own a Transformers `Cache` whose keys and values live in the daemon's pool; the caller runs the model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

import numpy as np
from transformers import Cache

from kvlease.errors import (
    InvalidError,
    KVLeaseError,
    UnknownLeaseError,
    WrongStateError,
)
from kvlease.geometry import floor_div
from kvlease.ids import BYTES_PER_KEY
from kvlease.integrations._models import (
    require_items,
    require_model,
)
from kvlease.integrations._pages import WAIT_MS, LayerPages, LeasedBlocks, LeasedLayer
from kvlease.memory.cuda import DeviceMemory
from kvlease.spec import ChunkedLocal, CrossAttention, FullAttention, SlidingWindow
from kvlease.views import layer_views

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvlease import Lease, Worker
    from kvlease.items import Item
    from kvlease.plan import LayerPlacement
    from kvlease.views import LayerTensors


class LeasedCache(Cache):
    """Keep the keys and values of one sequence in the blocks of a lease.

    Pass it as `cache` (before Transformers 5.24 `past_key_values`) to `model.generate`, or to a loop of your own. New
    keys and values are written straight into the mapped pages, attention reads them from there, and a prefix that was a
    hit counts as seen already. The lease is extended as tokens come. A call raises `KVLeaseError` when the lease is
    lost or cannot grow; everything computed since the last good call is then worthless. Assisted decoding needs an
    empty cache: a cache with a hit refuses it.

    Keys cover tokens and items, but no attention mask. So commit only what was computed with every token seen, which is
    not so with padding to the left. Do not pass the images, or other inputs, of items that lie in the hit.
    """

    def __init__(
        self,
        worker: Worker,
        lease: Lease,
        *,
        blocks_ahead: int = 1,
        num_tokens_max: int | None = None,
        items: Sequence[Item] = (),
    ) -> None:
        """Wrap a lease that was just granted; `num_tokens_max` bounds how far it is extended ahead of need.

        `items` stand for tokens of the prompt and are placed from its start; reserve the lease with the same items.
        """
        region = _region_of(worker)
        layers = layer_views(worker.plan, region)
        self._worker = worker
        self._blocks = LeasedBlocks(
            worker, lease, blocks_ahead, num_tokens_max, layers[0].states.device
        )
        present = lease.hit_tokens
        self._blocks.shared_tokens = present
        self._chain = worker.keys.grow(worker.plan.hash_block_tokens)
        self._unsaid_items = tuple(items)
        self._pages = [
            LeasedLayer(self._blocks, _pages_of(tensors, placed), present)
            for tensors, placed in zip(layers, worker.plan.layers, strict=True)
        ]
        super().__init__(layers=list(self._pages))

    @classmethod
    def reserve(  # noqa: PLR0913 - each is a fact of the request
        cls,
        worker: Worker,
        token_ids: Sequence[int],
        *,
        request_id: str,
        model: PreTrainedModel | None = None,
        num_tokens_max: int | None = None,
        wait_ms: int = WAIT_MS,
        items: Sequence[Item] = (),
    ) -> Self:
        """Lease blocks for a prompt, reusing its longest cached prefix short of the last token.

        Give the `model` that will compute into the cache to have two mistakes refused with `InvalidError`: a cache that
        was registered for another model, and a prompt with a placeholder that no item covers. No hit ends inside an
        item. If no lease is granted, the refusal is raised.
        """
        _region_of(worker)
        if model is not None:
            require_model(model, worker.plan)
            require_items(model, token_ids, items)
        tokens_per_key = worker.plan.hash_block_tokens
        # The last token's logits are needed, so at least that token has to be computed.
        num_keys = floor_div(len(token_ids) - 1, tokens_per_key)
        hashed = token_ids[: num_keys * tokens_per_key]
        keys = worker.keys.chain(hashed, tokens_per_key, items=items)
        longest = worker.plan.longest_request_tokens
        tokens_ahead = worker.plan.tokens_per_block
        room_for = min(len(token_ids) + tokens_ahead, num_tokens_max or longest, longest)
        num_tokens = max(len(token_ids), room_for)
        lease = worker.reserve(request_id, keys=keys, num_tokens=num_tokens, wait_ms=wait_ms)
        while (num_usable := _tokens_before_split_item(lease, items)) is not None:
            # A model computes an image only as a whole.
            lease.release()
            keys = keys[: floor_div(num_usable, tokens_per_key) * BYTES_PER_KEY]
            lease = worker.reserve(request_id, keys=keys, num_tokens=num_tokens, wait_ms=wait_ms)
        if not lease.is_live:
            raise lease.refusal or UnknownLeaseError
        try:
            lease.map()
            return cls(worker, lease, num_tokens_max=num_tokens_max, items=items)
        except BaseException:
            lease.release()
            raise

    @property
    def lease(self) -> Lease:
        """The lease whose blocks the cache uses."""
        return self._blocks.lease

    @property
    def committed_tokens(self) -> int:
        """Tokens from the start that others may read; they are never written again."""
        return self._blocks.shared_tokens

    def activate_past_recording(self) -> None:
        """Take part in assisted decoding, which Transformers announces by this call, unless the cache has tokens.

        Raises:
            WrongStateError: the cache has tokens. Transformers would give the model the whole prompt, including those
                tokens a second time, and the model would generate other tokens than without the cache.
        """
        num_present = self.get_seq_length()
        if num_present:
            message = (
                f"Assisted decoding would compute the {num_present} tokens of the cache again, after them; "
                "generate without assistance, or begin without a hit: use LeasedCache(worker, lease) with a lease that "
                "was reserved without keys, and is mapped."
            )
            raise WrongStateError(message, resource="tokens", need=0, available=num_present)
        super().activate_past_recording()  # type: ignore[no-untyped-call]  # Transformers types no hooks

    def require_live(self) -> None:
        """Raise unless the lease still holds; if it holds, everything read from it up to now can be trusted."""
        self._blocks.require_live()

    def extend(self, num_tokens: int) -> None:
        """Extend the lease to cover `num_tokens` in all, and a little more."""
        self._blocks.cover(num_tokens)

    def reach(self, num_tokens: int) -> int:
        """Extend the lease to cover `num_tokens` in all, as far as windows have room; return how many it covers."""
        return self._blocks.reach(num_tokens)

    def commit(self, token_ids: Sequence[int]) -> int:
        """Make full blocks findable under the keys of `token_ids`; return how many keys were committed."""
        tokens_per_key = self._worker.plan.hash_block_tokens
        first_key = floor_div(self._blocks.shared_tokens, tokens_per_key)
        num_keys = floor_div(min(len(token_ids), self.get_seq_length()), tokens_per_key)
        if num_keys <= first_key:
            return 0
        self._require_all_layers()
        self.require_live()
        chain = self._chain
        chain.append(
            token_ids[chain.num_tokens : num_keys * tokens_per_key], items=self._unsaid_items
        )
        self._unsaid_items = ()
        keys = chain.keys[first_key * BYTES_PER_KEY : num_keys * BYTES_PER_KEY]
        self._blocks.settle()
        # From here on others may read the blocks, even if the answer is lost on its way.
        self._blocks.shared_tokens = num_keys * tokens_per_key
        self.lease.commit(num_keys * tokens_per_key, keys, first_key)
        self.require_live()
        return num_keys - first_key

    def _require_all_layers(self) -> None:
        """Raise if the model wrote only some of the layers: others would be served what it did not write."""
        num_written = sum(layer.get_seq_length() == self.get_seq_length() for layer in self._pages)
        if num_written < len(self._pages):
            message = (
                f"The model wrote {num_written} layers, but the cache keeps {len(self._pages)}."
            )
            raise WrongStateError(
                message, resource="layers", need=len(self._pages), available=num_written
            )

    def evict(self) -> int:
        """Move all blocks to the host pool; return the device blocks freed. The cache cannot be used until `reload`."""
        return self._blocks.evict()

    def reload(self) -> int:
        """Bring the blocks back, to other places; return the tokens present, after which computing goes on."""
        num_tokens = self._blocks.reload()
        for layer in self._pages:
            layer.truncate(num_tokens)
        return self.get_seq_length()

    def release(self) -> None:
        """End the lease; committed blocks stay findable."""
        # The blocks may be another's at once, and work that is still under way would write or read them.
        self._blocks.settle()
        self.lease.release()

    def __enter__(self) -> Self:
        """Return the cache itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease; if the daemon does not hear it now, the next heartbeat tells it."""
        with contextlib.suppress(KVLeaseError):
            self.release()


def _tokens_before_split_item(lease: Lease, items: Sequence[Item]) -> int | None:
    """Return how many tokens come before the item that the hit ends inside; None if it ends inside no item."""
    hit_tokens = lease.hit_tokens if lease.is_live else 0
    for item in items:
        if item.first_token < hit_tokens < item.first_token + item.num_tokens:
            return item.first_token
    return None


def _pages_of(layer: LayerTensors, placed: LayerPlacement) -> LayerPages:
    """Return where a layer keeps its states; refuse a layer that Transformers could not read."""
    if layer.keys is None or layer.values is None:
        message = (
            f"Layer {layer.name!r} does not keep plain keys and values, which Transformers needs."
        )
        raise InvalidError(message, resource="layers", rule="no_keys_and_values")
    spec = placed.spec
    if not isinstance(spec, FullAttention | SlidingWindow):
        why = ""
        if isinstance(spec, ChunkedLocal):
            why = " Plan the cache with one_group, so that every token is kept."
        elif isinstance(spec, CrossAttention):
            why = " What this layer keeps depends on an encoder's output, which no key covers."
        message = (
            f"Layer {layer.name!r} is of kind {spec.kind}; a leased cache supports only full attention and "
            f"sliding windows.{why}"
        )
        raise InvalidError(message, resource="layers", rule="kind_not_supported")
    window_tokens = spec.window_tokens if isinstance(spec, SlidingWindow) else 0
    return LayerPages(
        keys=layer.keys, values=layer.values, group=placed.group, window_tokens=window_tokens
    )


def _region_of(worker: Worker) -> NDArray[np.uint8] | DeviceMemory:
    if worker.gpu is not None:
        return worker.gpu
    if worker.device is None:
        raise InvalidError(
            "This worker has no memory mapped; attach over the local socket.", resource="memory"
        )
    return worker.device
