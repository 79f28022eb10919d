"""Own the names that no tenant may have: metrics use them for tenants that they do not name, such as "(others)"."""

from typing import Final

RESERVED: Final = "("
"""The beginning of reserved names."""
RULE: Final = f"names that begin with {RESERVED!r} are reserved for metrics; choose another name"


def is_reserved(name: str) -> bool:
    """Tell whether a name is reserved, so that no tenant may have it."""
    return name.startswith(RESERVED)
