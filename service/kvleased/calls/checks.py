"""Own the checks of the arguments of calls; each failure names the field, the value and the rule."""

import re
import struct
from collections.abc import Collection, Sequence
from typing import Final

from kvlease._checks import range_words, shown
from kvlease.errors import InvalidError, TooLargeError
from kvlease.ids import BYTES_PER_KEY, CACHE_CHARACTERS_MAX
from kvlease.retention import RETAIN_PRIORITY_MAX, SECONDS_RETAINED_MAX
from kvleased.access.tenant_names import RULE, is_reserved
from kvleased.counted import counted

TOKENS_MAX: Final = (1 << 31) - 1
"""Token counts travel as int32 in the block table."""
REQUEST_ID_CHARACTERS_MAX: Final = 128
"""Characters of the name that an engine gives a request."""
LABEL_CHARACTERS_MAX: Final = 128
"""Characters of any other name that a caller gives."""

PRIORITIES: Final = ("low", "normal", "high")
"""The priorities; the core knows each by its position here."""
PRIORITY_DEFAULT: Final = 1
"""The number of the priority of a caller that names none."""

_WHOLE_MAX: Final = 1 << 53
"""The largest magnitude below which whole floating-point numbers are written as integers."""
_NAME: Final = re.compile(rf"[a-z][a-z0-9-]{{0,{CACHE_CHARACTERS_MAX - 1}}}")


def count(field: str, value: int, least: int, most: int) -> int:
    """Return a number, checked to lie in its range."""
    if not least <= value <= most:
        wanted, limit = range_words(value, least, most)
        message = f"{field} is {value}; it must be {wanted}"
        raise InvalidError(message, resource=field, need=value, limit=limit)
    return value


def number(field: str, value: float, least: float, most: float, *, is_open: bool = False) -> float:
    """Return a number, checked to lie in its range; an open range begins above `least`."""
    if (least < value if is_open else least <= value) and value <= most:
        return value
    message = f"{field} is {plain(value)}; {in_range(least, most, is_open=is_open)}"
    raise InvalidError(message, resource=field, limit=int(most))


def in_range(least: float, most: float, *, is_open: bool = False) -> str:
    """Say in words which range a number must lie in."""
    if is_open:
        return f"it must be above {plain(least)}, and at most {plain(most)}"
    return f"it must be from {plain(least)} to {plain(most)}"


def plain(value: float) -> str:
    """Write a number as people do: a whole one without a point."""
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) < _WHOLE_MAX
    return shown(int(value) if is_whole else value)


def packed(field: str, value: bytes, bytes_per_item: int, items_max: int) -> int:
    """Return how many items a packed field holds, checked to be whole and not too many."""
    num_items, rest = divmod(len(value), bytes_per_item)
    if rest:
        message = (
            f"{field} has {counted(len(value), 'byte')}; it must be a multiple of {bytes_per_item}"
        )
        raise InvalidError(message, resource=field)
    if num_items > items_max:
        message = f"{field} has {counted(num_items, 'item')}, but the limit is {items_max}; split the call"
        raise TooLargeError(message, resource=field, need=num_items, limit=items_max)
    return num_items


def keys(field: str, value: bytes, keys_max: int) -> int:
    """Return how many block keys a field holds."""
    return packed(field, value, BYTES_PER_KEY, keys_max)


def lease_ids(field: str, value: bytes, ids_max: int) -> tuple[int, ...]:
    """Return the lease ids that a field packs."""
    num_ids = packed(field, value, 8, ids_max)
    return struct.unpack(f"<{num_ids}q", value)


def request_id(value: str, field: str = "request_id") -> str:
    """Return a request id, checked so that it can be written into a log line."""
    if not 1 <= len(value) <= REQUEST_ID_CHARACTERS_MAX or not value.isprintable():
        message = f"{field} has {_described(value)}; it must have 1 to {REQUEST_ID_CHARACTERS_MAX}, all printable"
        raise InvalidError(
            message, resource=field, need=len(value), limit=REQUEST_ID_CHARACTERS_MAX
        )
    return value


def label(field: str, value: str) -> str:
    """Return a name for people, checked to be short and printable; it may be empty."""
    if len(value) > LABEL_CHARACTERS_MAX or not value.isprintable():
        message = f"{field} has {_described(value)}; it must have up to {LABEL_CHARACTERS_MAX}, all printable"
        raise InvalidError(message, resource=field, need=len(value), limit=LABEL_CHARACTERS_MAX)
    return value


def parameters(named: Sequence[str], known: Sequence[str]) -> None:
    """Check the names of a query's parameters against those that the path takes.

    Raises:
        InvalidError: a name is unknown, or given twice.
    """
    for name in named:
        if name not in known:
            there_are = "there are" if len(known) > 1 else "there is"
            message = f"{name[:40]!r} is not a query parameter here; {there_are} {', '.join(known) or 'none'}"
            raise InvalidError(message, resource="query")
        if named.count(name) > 1:
            raise repeated(name, resource="query")


def repeated(name: str, *, resource: str) -> InvalidError:
    """Return the refusal of a parameter or a header that is there twice: neither value must count by chance."""
    return InvalidError(f"{name} was sent twice; send it once", resource=resource)


def tenant(value: str) -> str:
    """Return the name of a tenant, checked not to be reserved; it may be empty."""
    if is_reserved(label("tenant", value)):
        message = f"tenant is {value[:80]!r}; {RULE}"
        raise InvalidError(message, resource="tenant", rule="reserved_name")
    return value


def _described(value: str) -> str:
    kind = "" if value.isprintable() else ", some of them not printable"
    return f"{counted(len(value), 'character')}{kind}"


def one_of(field: str, value: str, names: Collection[str]) -> str:
    """Return a name, checked to be one of several."""
    if value not in names:
        message = f"{field} is {value[:40]!r}; it must be one of {', '.join(names)}"
        raise InvalidError(message, resource=field)
    return value


def priority(field: str, value: str) -> int:
    """Return the number of the named priority."""
    return PRIORITIES.index(one_of(field, value, PRIORITIES))


def retain_priority(field: str, value: int) -> int:
    """Return a retain priority, which says how long blocks stay, checked to lie in its range."""
    return count(field, value, 0, RETAIN_PRIORITY_MAX)


def seconds_retained(field: str, value: int) -> int:
    """Return the seconds for which blocks are retained above others, checked to lie in their range."""
    return count(field, value, 0, SECONDS_RETAINED_MAX)


def cache_name(value: str) -> str:
    """Return the name of a cache, checked as every name is."""
    return name("cache", value)


def name(field: str, value: str) -> str:
    """Return a name that people and programs write, checked to be 1 to 63 of a-z, 0-9 and '-'."""
    if not _NAME.fullmatch(value):
        message = f"{field} is {value[:80]!r}; it must be 1 to 63 of a-z, 0-9 and '-', starting with a letter"
        raise InvalidError(message, resource=field)
    return value


def exactly_one(values: Sequence[tuple[str, object]]) -> str:
    """Return the name of the only field that is set."""
    names = [name for name, value in values if value]
    if len(names) != 1:
        wanted = ", ".join(name for name, _ in values)
        message = (
            f"{len(names)} of {wanted} are set ({', '.join(names) or 'none'}); set exactly one"
        )
        raise InvalidError(message, resource=names[0] if names else values[0][0])
    return names[0]
