"""Own the plan of a uniform cache: full-attention layers in one group, blocks outermost.

bytes_per_page  = num_kv_heads * (head_size + head_size_v) * bytes_per_element * tokens_per_block
bytes_per_block = round_up(sum of the pages, 64)
num_blocks      = floor(device_bytes / bytes_per_block), or device_blocks as given
num_slots       = floor(host_bytes / bytes_per_block)
capacity        = num_blocks * tokens_per_block
"""

import json
from typing import Final

from blake3 import blake3

from kvlease.errors import InvalidError, NeverFitsError
from kvlease.geometry import ALIGNMENT_BYTES, bytes_per_page, floor_div, round_up
from kvlease.plan import CachePlan, LayerPlacement, PlanInputs
from kvlease.spec import LayerSpec
from kvlease.units import BLOCKS_MAX, BYTES_MAX, TOKENS_MAX, checked_count, show_bytes
from kvleased.planning.admission import check_request, largest_request_tokens
from kvleased.planning.model import LAYERS_MAX, layers_of

_LAYOUT: Final = "block-outermost, K then V, [heads, tokens, head_size], version 1"
_TOKENS_PER_BLOCK_MAX: Final = 2**16
_DIGEST_CHARACTERS_MAX: Final = 256


def plan(inputs: PlanInputs) -> CachePlan:
    """Compute every number of a cache.

    Raises:
        InvalidError: the inputs contradict themselves, are out of range, or describe a model not planned yet.
        NeverFitsError: the memory holds no block, or the longest request does not fit in it.
    """
    tokens_per_block = checked_count(
        "tokens_per_block", inputs.tokens_per_block, least=1, most=_TOKENS_PER_BLOCK_MAX
    )
    if len(inputs.model_digest) > _DIGEST_CHARACTERS_MAX:
        message = f"model_digest must have at most {_DIGEST_CHARACTERS_MAX} characters, not {len(inputs.model_digest)}"
        raise InvalidError(
            message,
            resource="model_digest",
            need=len(inputs.model_digest),
            limit=_DIGEST_CHARACTERS_MAX,
        )
    specs = _specs(inputs)
    layers, bytes_per_block = _place(specs, tokens_per_block)
    num_blocks = _device_blocks(inputs, bytes_per_block)
    num_slots = _host_slots(inputs, bytes_per_block)
    longest = checked_count(
        "longest_request_tokens", inputs.longest_request_tokens, most=TOKENS_MAX
    )
    blocks_per_longest_request = check_request(
        longest or largest_request_tokens(num_blocks, tokens_per_block),
        num_blocks=num_blocks,
        tokens_per_block=tokens_per_block,
        bytes_per_block=bytes_per_block,
    )
    return CachePlan(
        layout_fingerprint=_fingerprint(layers, tokens_per_block, bytes_per_block),
        tokens_per_block=tokens_per_block,
        bytes_per_token=sum(spec.bytes_per_token for spec in specs),
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        num_slots=num_slots,
        device_bytes=num_blocks * bytes_per_block,
        host_bytes=num_slots * bytes_per_block,
        longest_request_tokens=blocks_per_longest_request * tokens_per_block,
        blocks_per_longest_request=blocks_per_longest_request,
        capacity_tokens=num_blocks * tokens_per_block,
        layers=layers,
        model_digest=inputs.model_digest,
    )


def _specs(inputs: PlanInputs) -> tuple[LayerSpec, ...]:
    """Return the layers that the inputs describe, checked, with nothing left to a default."""
    if bool(inputs.layers) == bool(inputs.model_config):
        message = "give either layers or model_config, and not both"
        raise InvalidError(message, resource="layers")
    if inputs.layers and inputs.kv_dtype:
        message = "kv_dtype goes with model_config; layers carry their own dtype"
        raise InvalidError(message, resource="kv_dtype")
    specs = inputs.layers or layers_of(inputs.model_config, inputs.kv_dtype)
    checked_count("layers", len(specs), most=LAYERS_MAX)
    names: set[str] = set()
    for spec in specs:
        spec.check()
        if spec.name in names:
            message = f"two layers are named {spec.name!r}; a layer's name is unique in its model"
            raise InvalidError(message, resource="name")
        names.add(spec.name)
    return tuple(spec.explicit() for spec in specs)


def _place(
    specs: tuple[LayerSpec, ...], tokens_per_block: int
) -> tuple[tuple[LayerPlacement, ...], int]:
    """Return the layers' places in a block, and the block's bytes."""
    placements = []
    end_bytes = 0
    for spec in specs:
        # Only layers of different dtypes can leave a page off the boundary of its elements.
        offset_bytes = round_up(end_bytes, spec.bytes_per_element)
        page = bytes_per_page(spec, tokens_per_block)
        placements.append(
            LayerPlacement(
                name=spec.name, group=0, offset_bytes=offset_bytes, bytes_per_page=page, spec=spec
            )
        )
        end_bytes = offset_bytes + page
    return tuple(placements), checked_count(
        "bytes_per_block", round_up(end_bytes, ALIGNMENT_BYTES), most=BYTES_MAX
    )


def _device_blocks(inputs: PlanInputs, bytes_per_block: int) -> int:
    """Return the blocks of the device pool; there is at least one."""
    checked_count("device_bytes", inputs.device_bytes, most=BYTES_MAX)
    checked_count("device_blocks", inputs.device_blocks, most=BLOCKS_MAX)
    if bool(inputs.device_bytes) == bool(inputs.device_blocks):
        message = "give exactly one of device_bytes and device_blocks"
        raise InvalidError(message, resource="device_bytes")
    if inputs.device_blocks:
        checked_count("device_bytes", inputs.device_blocks * bytes_per_block, most=BYTES_MAX)
        return inputs.device_blocks
    return _blocks_in("device_bytes", inputs.device_bytes, bytes_per_block)


def _host_slots(inputs: PlanInputs, bytes_per_block: int) -> int:
    """Return the slots of the host pool: none without host memory, else at least one."""
    if not checked_count("host_bytes", inputs.host_bytes, most=BYTES_MAX):
        return 0
    return _blocks_in("host_bytes", inputs.host_bytes, bytes_per_block)


def _blocks_in(name: str, budget_bytes: int, bytes_per_block: int) -> int:
    num_blocks = floor_div(budget_bytes, bytes_per_block)
    if not num_blocks:
        message = (
            f"{name} is {budget_bytes} ({show_bytes(budget_bytes)}) and one block takes {bytes_per_block} bytes "
            f"({show_bytes(bytes_per_block)}); give more memory or fewer tokens_per_block"
        )
        raise NeverFitsError(
            message, resource=name, need=bytes_per_block, available=budget_bytes, limit=budget_bytes
        )
    return checked_count("num_blocks", num_blocks, most=BLOCKS_MAX)


def _fingerprint(
    layers: tuple[LayerPlacement, ...], tokens_per_block: int, bytes_per_block: int
) -> str:
    """Return the digest of all that decides where a byte of a block lies and what it means."""
    content = {
        "layout": _LAYOUT,
        "tokens_per_block": tokens_per_block,
        "bytes_per_block": bytes_per_block,
        "layers": [
            {
                "name": layer.name,
                "kind": layer.spec.kind,
                "group": layer.group,
                "offset_bytes": layer.offset_bytes,
                "num_kv_heads": layer.spec.num_kv_heads,
                "head_size": layer.spec.head_size,
                "head_size_v": layer.spec.head_size_v,
                "dtype": layer.spec.dtype,
            }
            for layer in layers
        ],
    }
    return blake3(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
