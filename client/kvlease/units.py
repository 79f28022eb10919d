"""Own the limits of counts, the check that a number from outside is a count, and bytes as people write them."""

import re
from typing import Final

from kvlease._checks import shown
from kvlease.errors import InvalidError

BYTES_MAX: Final = 2**53 - 1
"""Bytes of the largest region: the largest integer that a JSON number carries exactly."""
BLOCKS_MAX: Final = 2**31 - 1
"""Blocks of the largest pool: block ids are int32."""
TOKENS_MAX: Final = 2**31 - 1
"""Tokens of the longest request: the block table counts them in int32."""
RANKS_MAX: Final = 128
"""Ranks of one cache: the descriptors of all their regions travel in one message."""
BYTES_PER_SECTOR: Final = 4096
"""Offsets and sizes of direct disk reads and writes are multiples of this, in the file and in memory."""
BYTES_PER_DISK_HEADER: Final = 128
"""Bytes of a header in a disk store: one for the store and one for each slot, all before the slots. As the number
divides a sector, no header lies in two sectors."""

_BYTES_PER_UNIT: Final = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_WRITTEN_BYTES: Final = re.compile(r"(\d{1,16})(?:\.(\d{1,6}))?\s*([A-Za-z]{0,3})", re.ASCII)
_SHOWN_UNITS: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def checked_count(name: str, value: int, *, least: int = 0, most: int) -> int:
    """Return `value` if it is an integer from `least` to `most`.

    Raises:
        InvalidError: it is not; the message names the value and both bounds.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name} must be an integer, not {type(value).__name__}"
        raise InvalidError(message, resource=name)
    if not least <= value <= most:
        message = f"{name} must be from {least} to {most}, not {shown(value)}"
        raise InvalidError(message, resource=name, need=_on_the_wire(value), limit=most)
    return value


def parse_bytes(written: str) -> int:
    """Read a number of bytes such as "8GiB", "1.5 GiB", "500MB" or "4096".

    Raises:
        InvalidError: the text is not written so, or is no whole number of bytes.
    """
    match = _WRITTEN_BYTES.fullmatch(written.strip())
    if match is None or match[3].upper() not in _BYTES_PER_UNIT:
        message = (
            f"{written[:40]!r} is not a number of bytes; write for example 8GiB, 500MB or 4096"
        )
        raise InvalidError(message, resource="bytes")
    fraction = match[2] or ""
    scaled = int(match[1] + fraction) * _BYTES_PER_UNIT[match[3].upper()]
    num_bytes, rest = divmod(scaled, 10 ** len(fraction))
    if rest:
        message = f"{written[:40]!r} is not a whole number of bytes"
        raise InvalidError(message, resource="bytes")
    return checked_count("bytes", num_bytes, most=BYTES_MAX)


def show_bytes(num_bytes: int) -> str:
    """Write a number of bytes for people: exact below 1 KiB, else with two decimals, rounded down."""
    for unit_bytes, unit in _SHOWN_UNITS:
        if num_bytes >= unit_bytes:
            whole, hundredths = divmod(num_bytes * 100 // unit_bytes, 100)
            return f"{whole}.{hundredths:02d} {unit}"
    return f"{num_bytes} B"


def _on_the_wire(value: int) -> int | None:
    """Return the value if an error can carry it as int64, else None."""
    return value if -(2**63) <= value < 2**63 else None
