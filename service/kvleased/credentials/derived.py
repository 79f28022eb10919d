"""Own what is derived from the root secret and a tenant's name: the tenant's key, and numbers for names in the core."""

from blake3 import blake3


def tenant_key(root_secret: bytes, tenant: str) -> bytes:
    """Return the secret for a tenant's block keys: blake3(root secret; label ‖ tenant), the same in every life."""
    return blake3(b"kvlease tenant 1\0" + tenant.encode(), key=root_secret).digest()


def tenant_digest(key: bytes) -> int:
    """Return 64 bits that name the tenant with this key in the core, never 0."""
    return int.from_bytes(blake3(key).digest(8), "little") or 1


def engine_digest(key: bytes, engine: str) -> int:
    """Return 64 bits that name an engine of the tenant with this key in the core; 0 if the name is empty."""
    if not engine:
        return 0
    return int.from_bytes(blake3(engine.encode(), key=key).digest(8), "little") or 1


def magazine_digest(key: bytes, magazine: str) -> int:
    """Return 64 bits that name a magazine of the tenant with this key in the core; 0 if the name is empty."""
    return engine_digest(key, f"magazine\0{magazine}") if magazine else 0
