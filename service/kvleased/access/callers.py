"""Own what the daemon knows of whoever sent a call; how an adapter learnt it is the adapter's business."""

from typing import NamedTuple

from kvleased.access.roles import Role
from kvleased.access.tokens import Keyring


class Caller(NamedTuple):
    """Say who sends a call, over what, and what the call must be checked against; a tuple, as one is made per call."""

    transport: str
    """ "local", "rest" or "grpc"."""
    token: str = ""
    """The bearer token that attach returned; empty for whoever is no worker."""
    epoch: int = 0
    """The daemon's life that the caller speaks of; 0 is not checked."""
    idempotency_key: str = ""
    """Retries of one call carry the same key; empty means that nothing is remembered."""
    cache: str = ""
    """The cache that an operator's call is about; empty where there is but one."""
    pidfd: int | None = None
    """A pidfd of the caller, only with a local attach; it stays the adapter's, the daemon duplicates it."""
    peer_pid: int = 0
    """The caller's process as the kernel names it; 0 where it is unknown or in another PID namespace."""
    peer_uid: int = -1
    role: Role = Role.STRANGER
    """What the caller is without a token; with one, who it belongs to, once `guarding` has looked."""
    traceparent: str = ""
    """The W3C traceparent of the span that calls; empty where nothing is traced."""
    address: str = ""
    """The address and port of who calls over TCP; empty where it is no TCP."""
    keyring: Keyring | None = None
    """The tokens among which the caller's own was found; None for a caller without one, and for a worker."""

    def known_as(self, role: Role, token: str, keyring: Keyring | None = None) -> "Caller":
        """Return the caller as who he turned out to be; `_replace` would take three times as long, in every call."""
        transport, _, epoch, key, cache, pidfd, pid, uid, _, traceparent, address, _ = self
        return Caller(
            transport,
            token,
            epoch,
            key,
            cache,
            pidfd,
            pid,
            uid,
            role,
            traceparent,
            address,
            keyring,
        )

    @property
    def who(self) -> dict[str, object]:
        """Who calls, as fields of a log line: role, transport and where from, and never a token."""
        found: dict[str, object] = {"role": self.role.value, "transport": self.transport}
        if self.address:
            found["peer"] = self.address
        elif self.peer_uid >= 0:
            found |= {"peer_pid": self.peer_pid, "peer_uid": self.peer_uid}
        return found

    @property
    def who_joins(self) -> dict[str, object]:
        """Who attaches, as fields of a log line: a worker from then on, and as what it was let in."""
        return self.who | {"role": Role.WORKER.value, "let_in_as": self.role.value}
