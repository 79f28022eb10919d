"""Own the refusal of names that a request's head cannot carry, in the words of the daemon over other transports."""

from kvlease.errors import InvalidError, UnknownCacheError
from kvlease.ids import CACHE_CHARACTERS_MAX, TENANT_CHARACTERS_MAX


def check_cache(name: str) -> None:
    """Check the length of a cache's name.

    Raises:
        UnknownCacheError: no cache can have such a name.
    """
    if len(name) > CACHE_CHARACTERS_MAX:
        raise UnknownCacheError.of_long_name(name, CACHE_CHARACTERS_MAX)


def check_new_cache(name: str) -> None:
    """Check the length of the name of a cache to register or attach to.

    Raises:
        InvalidError: it is empty or too long.
    """
    if not 1 <= len(name) <= CACHE_CHARACTERS_MAX:
        message = (
            f"cache is {name[:80]!r}; it must be 1 to {CACHE_CHARACTERS_MAX} of a-z, 0-9 and '-', starting with a "
            "letter"
        )
        raise InvalidError(message, resource="cache")


def check_tenant(name: str) -> None:
    """Check the length of a tenant's name.

    Raises:
        InvalidError: it is empty or too long.
    """
    if not 1 <= len(name) <= TENANT_CHARACTERS_MAX:
        wanted = f"{'up' if name else '1'} to {TENANT_CHARACTERS_MAX}"
        message = f"tenant has {len(name)} characters; it must have {wanted}, all printable"
        raise InvalidError(message, resource="tenant", need=len(name), limit=TENANT_CHARACTERS_MAX)
