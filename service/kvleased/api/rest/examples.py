"""Own examples of the bodies and answers of the usual calls of REST; schemas are not its business."""

import base64
import json
from collections.abc import Mapping
from typing import Any, Final

from google.protobuf.message import Message

from kvlease.v1 import kvlease_pb2 as pb

_KEY: Final = base64.b64encode(bytes(range(32))).decode()
"""One key of 32 bytes."""
_INPUTS: Final = {
    "model_config": json.dumps({
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "dtype": "bfloat16",
    }),
    "tokens_per_block": 16, "device_blocks": 512,
}  # fmt: skip

REQUESTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "attach": {"worker_name": "vllm-0", "tenant": "team-a"},
    "commit": {"num_tokens": 16, "keys": _KEY},
    "evict": {"num_blocks": 4},
    "extend": {"num_tokens": 48},
    "fork": {"request_id": "request-2", "num_tokens": 32},
    "lookup": {"keys": _KEY},
    "pin": {"keys": _KEY},
    "plan": {"inputs": _INPUTS, "report": True},
    "register_cache": {"inputs": _INPUTS, "options": {"write_policy": "on-evict"}},
    "reload": {"keys": _KEY},
    "reserve": {"request_id": "request-1", "num_tokens": 32, "keys": _KEY, "wait_ms": 100},
    "resize": {"tier": "device", "num_blocks": 2048},
    "set_tenant": {"limits": {"min_percent": 20, "max_percent": 60}, "revision": 1},
    "trim": {"num_tokens": 16},
}
"""Example bodies, by operation."""

ANSWERS: Final[Mapping[str, Message]] = {
    "heartbeat": pb.HeartbeatResponse(),
    "lookup": pb.LookupResponse(num_device_blocks=2, num_host_blocks=1, hit_tokens=48),
    "pin": pb.PinResponse(pin_id=3, num_blocks=2),
    "release": pb.ReleaseResponse(),
    "reserve": pb.ReserveResponse(
        lease_id=17, block_ids=b"\5\0\0\0\6\0\0\0", device_hit_tokens=16, row=2, covered_tokens=32
    ),
}
"""Example answers, by operation."""
