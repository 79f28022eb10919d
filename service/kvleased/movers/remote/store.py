"""Own what every remote store can do and how it fails; `addresses` knows which stores there are.

All calls of one store come from one thread, that of `bounded`; other threads only read `advice` and call `cut`.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from kvleased.movers.remote.value import Value, ValueParts

VALUE_BYTES_MAX: Final = 512 << 20
"""Bytes of the largest value that Redis takes."""
CALL_BYTES_MAX: Final = 2 << 20
"""Bytes of the values in one call, unless a single value has more: they should still be in the cache when used."""
IS_THERE: Final = 1
"""Of a name: it has a value, which may be what it should be."""
IS_SPOILED: Final = 2
"""Of a name: it has something that cannot be what it should be, because of its bytes in all or of its type."""
_REASON_CHARACTERS_MAX: Final = 240
_LATE: Final = "check the server of remote_url and the network to it, or raise remote_ms_max"


class RemoteError(Exception):
    """The remote store did not do what it was asked; the text says why, for people."""

    def __init__(
        self, reason: str, *, is_timeout: bool = False, is_forbidden: bool = False
    ) -> None:
        """Keep what can be shown of the reason, because a server may have said anything."""
        printable = "".join(letter if letter.isprintable() else "?" for letter in reason)
        super().__init__(printable[:_REASON_CHARACTERS_MAX])
        self.is_timeout = is_timeout
        self.is_forbidden = is_forbidden
        """Whether this user is not allowed to do it, which no other call changes."""


def advised(words: str, advice: str) -> str:
    """Return words and advice, with the words cut if an error would otherwise have no room for all of the advice."""
    room = _REASON_CHARACTERS_MAX - len(f"; {advice}")
    return f"{words if len(words) <= room else words[: room - 3] + '...'}; {advice}"


def no_answer(seconds: float, advice: str = "") -> RemoteError:
    """Return the error of a store that did not answer in time, with what to do about it if more is known."""
    told = f"no answer within {seconds * 1e3:.0f} ms"
    return RemoteError(advised(told, advice or _LATE), is_timeout=True)


class RemoteStore(Protocol):
    """A store of values by name, which may lose any of them at any time; every method raises only RemoteError."""

    @property
    def advice(self) -> str:
        """What to do if the current call of another thread takes too long; empty if nothing is known."""

    def exists(self, names: Sequence[str], value_bytes: int) -> bytes:
        """Return a byte for each name: `IS_THERE`, or `IS_SPOILED` if it is known not to have `value_bytes`, or 0."""

    def get(self, names: Sequence[str], value_bytes: int) -> Sequence[Value | None]:
        """Return the value of each name, None if it has none; views live until the next call."""

    def put(self, names: Sequence[str], values: Sequence[ValueParts]) -> bytes:
        """Store values, or keep existing ones; return a byte for each, 1 if it has a value now."""

    def drop(self, names: Sequence[str]) -> None:
        """Have values forgotten, as far as the store allows it."""

    def ping(self) -> None:
        """Check that the store answers."""

    def cut(self) -> None:
        """Make the call that another thread is in end soon, if possible."""

    def close(self) -> None:
        """Close the store."""
