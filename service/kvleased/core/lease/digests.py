"""Own the digests by which a row of the table knows its request: what it is called, and what it asks for."""

import xxhash

from kvleased.core.commands import Fork, Reserve


def request_digest(request_id: str) -> int:
    """Return 64 bits that stand for an engine's request id in a row; who finds two of the same harms but itself."""
    return xxhash.xxh3_64_intdigest(request_id.encode())


def asked_digest(request: Reserve | Fork) -> int:
    """Return 64 bits that stand for what a request asks for, its name apart."""
    if isinstance(request, Reserve):
        named = request.keys
        if request.retain_priority is not None:
            named += request.retain_priority.to_bytes()
        return xxhash.xxh3_64_intdigest(named, request.num_tokens)
    return xxhash.xxh3_64_intdigest(str(request.lease_id).encode(), request.num_tokens)
