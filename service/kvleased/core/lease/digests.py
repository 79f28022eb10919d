"""Own the digests that stand for a request in a row of the table: one of its id, and one of what it asks for."""

import xxhash

from kvleased.core.commands import Fork, Reserve


def request_digest(request_id: str) -> int:
    """Return 64 bits that stand for a request id in a row; a caller whose ids collide harms only its own requests."""
    return xxhash.xxh3_64_intdigest(request_id.encode())


def asked_digest(request: Reserve | Fork) -> int:
    """Return 64 bits that stand for what a request asks for, whatever its id."""
    if isinstance(request, Reserve):
        named = request.keys
        if request.retain_priority is not None:
            named += request.retain_priority.to_bytes()
        return xxhash.xxh3_64_intdigest(named, request.num_tokens)
    return xxhash.xxh3_64_intdigest(str(request.lease_id).encode(), request.num_tokens)
