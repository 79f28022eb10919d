"""Own what the daemon knows about the caller of a call; how an adapter learnt it is the adapter's business."""

from typing import NamedTuple

from kvleased.access.roles import Role
from kvleased.access.tokens import Keyring


class Caller(NamedTuple):
    """The caller of a call, the transport, and what to check the call against; a tuple, as each call makes one."""

    transport: str
    """ "local", "rest" or "grpc"."""
    token: str = ""
    """The bearer token that attach returned; empty if the caller is no worker."""
    epoch: int = 0
    """The epoch of the daemon that the caller expects; 0 is not checked."""
    idempotency_key: str = ""
    """Retries of one call carry the same key; empty means that nothing is remembered."""
    cache: str = ""
    """The cache that an operator's call is about; may be empty if there is only one."""
    pidfd: int | None = None
    """A pidfd of the caller, only with a local attach; the adapter owns it, and the daemon duplicates it."""
    peer_pid: int = 0
    """The caller's process id as the kernel tells it; 0 if unknown or in another PID namespace."""
    peer_uid: int = -1
    role: Role = Role.STRANGER
    """The role that the caller has without a token; once `guarding` has checked a token, the role of its owner."""
    traceparent: str = ""
    """The W3C traceparent of the caller's span; empty if nothing is traced."""
    address: str = ""
    """The address and port of a caller over TCP; empty for other transports."""
    keyring: Keyring | None = None
    """The tokens among which the caller's own was found; None for a caller without one, and for a worker."""

    def known_as(self, role: Role, token: str, keyring: Keyring | None = None) -> "Caller":
        """Return the caller with this role and token; `_replace` would take three times as long, in every call."""
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
        """The caller as fields of a log line: role, transport and origin, but never a token."""
        found: dict[str, object] = {"role": self.role.value, "transport": self.transport}
        if self.address:
            found["peer"] = self.address
        elif self.peer_uid >= 0:
            found |= {"peer_pid": self.peer_pid, "peer_uid": self.peer_uid}
        return found

    @property
    def who_joins(self) -> dict[str, object]:
        """The caller of an attach as fields of a log line: a worker from now on, with the role that let it in."""
        return self.who | {"role": Role.WORKER.value, "let_in_as": self.role.value}
