"""Build registrations for tests of what they make."""

from typing import Any

from kvlease.v1 import kvlease_pb2 as pb

from .conftest import inputs

SLOT_BYTES = 512
"""Bytes of a block of these caches."""


def request_of(options: pb.CacheOptions | None = None, **changes: Any) -> pb.RegisterCacheRequest:
    """Return a request to register a cache, with some inputs changed."""
    return pb.RegisterCacheRequest(cache="main", inputs=inputs(**changes), options=options)
