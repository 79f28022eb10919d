"""Own which names are no tenant's: those that metrics give to tenants without one, such as "(others)"."""

from typing import Final

RESERVED: Final = "("
"""What such names begin with."""
RULE: Final = (
    f"names that begin with {RESERVED!r} are those that metrics use themselves; choose another"
)


def is_reserved(name: str) -> bool:
    """Tell whether no tenant may have a name."""
    return name.startswith(RESERVED)
