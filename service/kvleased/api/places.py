"""Own the places of a listener's connections: those of members, who were let in, and a few of strangers, who give way.

A connection is a stranger's from its acceptance until it has shown whose it is, which other modules find out.
"""

from collections import Counter
from time import monotonic
from typing import Final, Protocol

from kvlease.errors import BusyError
from kvleased.access.strangers import Seldom
from kvleased.counted import are

STRANGERS_MAX: Final = 64
"""Connections of strangers at once, of each listener of REST and of probes; for one more the oldest gives way."""

SECONDS_IDLE: Final = 1.0
"""Seconds for which a member must have been idle before it gives way to another; clients connect again if need be."""

WHO: Final = ("member", "stranger")
"""Whose a connection may be."""

_RETRY_AFTER_MS: Final = 1000
"""Milliseconds after which a place may be free: silent connections give way, and closed ones are noticed."""


def no_place_of_member(limit: int) -> BusyError:
    """Return the error of one connection too many of members, on any listener."""
    message = (
        f"{are(limit, 'connection')} open to this listener, as many as max_connections allows; make all calls over one "
        "connection, or raise max_connections"
    )
    return _no_place(message, limit)


def no_place_of_stranger(limit: int) -> BusyError:
    """Return the error of the oldest connection of strangers, which gives way to another."""
    message = (
        f"{are(limit, 'connection')} open to this listener without a token, the most allowed; this one, the oldest, "
        "was closed to make room for a new one: call with a token"
    )
    return _no_place(message, limit)


def _no_place(message: str, limit: int) -> BusyError:
    return BusyError(
        message,
        resource="connections",
        need=1,
        available=0,
        limit=limit,
        retry_after_ms=_RETRY_AFTER_MS,
    )


class Guest(Protocol):
    """A connection, even before its handshake."""

    @property
    def host(self) -> str:
        """The address that it comes from, without the port; empty over a Unix socket."""
        ...

    @property
    def has_unread(self) -> bool:
        """Whether bytes have arrived that were not read yet, which may complete its first head."""
        ...

    def give_way(self) -> None:
        """End at once: another connection has the place."""
        ...


class Places:
    """The connections to one listener."""

    def __init__(self, members_max: int, strangers_max: int, port: int) -> None:
        """Take how many there may be of members and of strangers, and the listener's port; 0 for a Unix socket."""
        self.members_max = members_max
        self.strangers_max = strangers_max
        self._port = port
        self._members: set[Guest] = set()
        self._unheard: dict[Guest, None] = {}
        """The members that have asked nothing yet, the oldest first."""
        self._idle: dict[Guest, float] = {}
        """The members that have had all their answers, and since when in seconds; the one idle longest first."""
        self._strangers: dict[Guest, None] = {}
        self.turned_away: Counter[str] = Counter()
        """How many strangers gave way and how many members found no place, so far."""
        self._told = {who: Seldom("connections_turned_away") for who in WHO}

    def __repr__(self) -> str:
        """Show life."""
        return f"<Places {self.num_members} of members, {self.num_strangers} of strangers>"

    @property
    def num_members(self) -> int:
        """Connections that have shown whose they are."""
        return len(self._members)

    @property
    def num_strangers(self) -> int:
        """Connections that have not shown it, or are in the middle of a handshake."""
        return len(self._strangers)

    def enter(self, guest: Guest) -> None:
        """Give a connection a stranger's place, if need be that of the oldest: one of the same host if there is any.

        So many connections from one host only take each other's places. The oldest gives way, not the idle one: else a
        stranger could keep a place by sending requests without end.
        """
        if len(self._strangers) >= self.strangers_max:
            same = (one for one in self._strangers if one.host == guest.host)
            self._end(next(same, None) or next(iter(self._strangers)))
        self._strangers[guest] = None

    def make_room(self) -> None:
        """Have the oldest stranger give way, if there is any: called when no further connection can be accepted."""
        if self._strangers:
            self._end(next(iter(self._strangers)))

    def let_in(self, guest: Guest) -> bool:
        """Give a connection a member's place; return false if there is none: it then keeps its stranger's place.

        Without a free place, the oldest member that has asked nothing yet gives way, or else the one idle longest.
        """
        if guest in self._members:
            return True
        if len(self._members) >= self.members_max:
            silent = self._silent()
            self._tell("member", (silent or guest).host, self.members_max)
            if silent is None:
                return False
            self.leave(silent)
            silent.give_way()
        self._strangers.pop(guest, None)
        self._members.add(guest)
        return True

    def let_in_unheard(self, guest: Guest) -> bool:
        """Give a member's place to a connection that has asked nothing yet, which others may take until it does."""
        is_in = self.let_in(guest)
        if is_in:
            self._unheard[guest] = None
        return is_in

    def hear(self, guest: Guest) -> None:
        """Take note that a connection has sent a complete head, so that it gives way to no member any more."""
        self._unheard.pop(guest, None)

    def rest(self, guest: Guest) -> None:
        """Take note that a connection has had all its answers, so that in a while it may give way to a member."""
        if guest in self._members:
            self._idle.pop(guest, None)
            self._idle[guest] = monotonic()

    def rouse(self, guest: Guest) -> None:
        """Take note that a connection asks again."""
        self._idle.pop(guest, None)

    def show_out(self, guest: Guest) -> None:
        """Replace a connection's member's place by a stranger's."""
        if guest in self._members:
            self._members.remove(guest)
            self._idle.pop(guest, None)
            self.enter(guest)

    def leave(self, guest: Guest) -> None:
        """Take back the place of a connection, if it has one."""
        self._members.discard(guest)
        self._unheard.pop(guest, None)
        self._idle.pop(guest, None)
        self._strangers.pop(guest, None)

    def _silent(self) -> Guest | None:
        """Return the member that gives way to another, if one does."""
        for guest in self._unheard:
            if not guest.has_unread:
                return guest
        idle_since = monotonic() - SECONDS_IDLE
        for guest, since in self._idle.items():
            if since > idle_since:
                break
            if not guest.has_unread:
                return guest
        return None

    def _end(self, oldest: Guest) -> None:
        self.leave(oldest)
        self._tell("stranger", oldest.host, self.strangers_max)
        oldest.give_way()

    def _tell(self, who: str, host: str, limit: int) -> None:
        self.turned_away[who] += 1
        self._told[who].tell(who=who, limit=limit, port=self._port, peer=host)
