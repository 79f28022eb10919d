"""A call's arguments are checked before the core sees them; the refusal names the argument and its bounds."""

from typing import Any

import pytest

from kvlease.errors import (
    InvalidError,
    LayoutMismatchError,
    TooLargeError,
    UnknownCacheError,
)
from kvlease.v1 import kvlease_pb2 as pb

from .conftest import Node

MALFORMED: list[tuple[str, Any, type[Exception], str]] = [
    ("reserve", pb.ReserveRequest(request_id="", num_tokens=1), InvalidError, "request_id"),
    ("reserve", pb.ReserveRequest(request_id="a\nb", num_tokens=1), InvalidError, "request_id"),
    ("reserve", pb.ReserveRequest(request_id="a" * 129, num_tokens=1), InvalidError, "request_id"),
    ("reserve", pb.ReserveRequest(request_id="a"), InvalidError, "num_tokens"),
    ("reserve", pb.ReserveRequest(request_id="a", num_tokens=1 << 31), InvalidError, "num_tokens"),
    ("reserve", pb.ReserveRequest(request_id="a", num_tokens=1, keys=b"x"), InvalidError, "keys"),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, keys=bytes(32 * 16_385)),
        TooLargeError,
        "keys",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, wait_ms=60_001),
        InvalidError,
        "wait_ms",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, token_ids=b"xyz"),
        InvalidError,
        "token_ids",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=1, token_ids=bytes(4 * 131_073)),
        TooLargeError,
        "token_ids",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=3, token_ids=bytes(16)),
        InvalidError,
        "token_ids has 4 tokens, but num_tokens is 3",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=3, token_ids=b"\1\0\0\0" + b"\xff" * 4),
        InvalidError,
        "-1; a token id must be from 0 to 2147483647",
    ),
    (
        "reserve",
        pb.ReserveRequest(request_id="a", num_tokens=4, token_ids=bytes(16), keys=bytes(32)),
        InvalidError,
        "token_ids",
    ),
    ("extend", pb.ExtendRequest(lease_id=0, num_tokens=1), InvalidError, "lease_id"),
    ("fork", pb.ForkRequest(lease_id=5, num_tokens=1), InvalidError, "request_id"),
    ("trim", pb.TrimRequest(lease_id=5), InvalidError, "num_tokens"),
    ("release", pb.ReleaseRequest(lease_id=-4), InvalidError, "lease_id"),
    ("evict", pb.EvictRequest(), InvalidError, "lease_id, keys, num_blocks"),
    ("evict", pb.EvictRequest(num_blocks=1, keys=bytes(32)), InvalidError, "keys, num_blocks"),
    ("reload", pb.ReloadRequest(), InvalidError, "lease_id, keys"),
    ("unpin", pb.UnpinRequest(pin_id=-1), InvalidError, "pin_id"),
    ("heartbeat", pb.HeartbeatRequest(lease_ids=b"1234567"), InvalidError, "lease_ids"),
    ("heartbeat", pb.HeartbeatRequest(newest_lease_id=-1), InvalidError, "newest_lease_id"),
    ("step", pb.StepRequest(verbs=b"\x01", lease_ids=bytes(8)), InvalidError, "num_tokens"),
    (
        "step",
        pb.StepRequest(reserves=[pb.ReserveRequest(request_id="a", num_tokens=1, wait_ms=1)]),
        InvalidError,
        r"reserves\[0\].wait_ms",
    ),
    ("step", pb.StepRequest(verbs=bytes(8_193)), TooLargeError, "verbs"),
    ("attach", pb.AttachRequest(cache="Main"), InvalidError, "cache"),
    ("attach", pb.AttachRequest(cache="main", lease_ids=bytes(8)), InvalidError, "lease_ids"),
    ("attach", pb.AttachRequest(cache="main", tenant="a\tb"), InvalidError, "tenant"),
    ("attach", pb.AttachRequest(cache="main", engine="Engine 1"), InvalidError, "engine"),
    ("attach", pb.AttachRequest(cache="main", engine="e" * 64), InvalidError, "engine"),
    (
        "attach",
        pb.AttachRequest(cache="main", layout_fingerprint="00"),
        LayoutMismatchError,
        "layout",
    ),
    ("attach", pb.AttachRequest(cache="gone"), UnknownCacheError, "gone"),
    ("register_cache", pb.RegisterCacheRequest(cache="x/y"), InvalidError, "cache"),
    (
        "register_cache",
        pb.RegisterCacheRequest(cache="x", options=pb.CacheOptions(integrity="crc")),
        InvalidError,
        "integrity",
    ),
    ("watch", pb.WatchRequest(), InvalidError, "watch"),
]


@pytest.mark.parametrize(
    ("verb", "request_", "error", "names"),
    MALFORMED,
    ids=[f"{number}-{case[0]}-{case[3]}" for number, case in enumerate(MALFORMED)],
)
async def test_malformed_calls_are_refused(
    node: Node, verb: str, request_: Any, error: type[Exception], names: str
) -> None:
    """A malformed call is refused with the name of the field, and changes nothing."""
    async with node.life() as daemon:
        await node.register()
        worker = await node.attach()
        before = daemon.registry.cache("main").core.census()

        with pytest.raises(error, match=names):
            await node.ask(verb, request_, worker)

        assert daemon.registry.cache("main").core.census() == before
