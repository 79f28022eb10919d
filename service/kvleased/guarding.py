"""Own the question whether a caller may do something: who is behind a token, and what is said to whoever may not."""

from typing import NoReturn

from kvlease.errors import NotYoursError, UnknownWorkerError
from kvleased.callers import Caller
from kvleased.registry import Registry
from kvleased.roles import OWN, Role, Roles
from kvleased.tokens import Keyring


class Guard:
    """Admits callers, or refuses them before anything of their call is looked at."""

    def __init__(self, registry: Registry, keyring: Keyring) -> None:
        """Take who knows the workers' tokens, and who the others."""
        self._workers = registry.by_token
        self.keyring = keyring

    def admit(self, allowed: Roles, caller: Caller) -> Caller:
        """Return the caller as who he is; a token that is no worker's has done its work, and is taken away.

        Raises:
            UnknownWorkerError: nobody has this token, or there is none and one is needed.
            NotYoursError: the caller's role may not.
        """
        if caller.token:
            if caller.token in self._workers:
                caller = caller._replace(role=Role.WORKER)
            else:
                role = self.keyring.role_of(caller.token)
                if role is Role.STRANGER and Role.WORKER in allowed:
                    # The very words of the local socket, where nobody but a worker shows a token.
                    raise UnknownWorkerError(resource="token")
                if role is Role.STRANGER:
                    raise _unknown("nobody has this bearer token", allowed)
                caller = caller._replace(role=role, token="")
        if caller.role not in allowed:
            _refuse(caller.role, allowed)
        return caller


def _refuse(role: Role, allowed: Roles) -> NoReturn:
    if role is Role.STRANGER:
        raise _unknown("there is no bearer token", allowed)
    if allowed is OWN:
        # Whoever may attach is told how to become a worker.
        raise UnknownWorkerError(resource="token")
    message = f"{_one(role)} may not do this"
    raise NotYoursError(message, resource="role", rule="role")


def _unknown(what: str, allowed: Roles) -> UnknownWorkerError:
    """Return the refusal of a caller whom nobody knows, which says whose token it takes, and where that is."""
    if allowed == OWN:
        where = "attach first and send the token that attach returned"
    else:
        wanted = " or ".join(map(_one, sorted(allowed, key=lambda role: role.value)))
        others = "attach returns a worker's, " if Role.WORKER in allowed else ""
        where = f"this needs that of {wanted}; {others}docs/security.md tells where they are"
    return UnknownWorkerError(f"{what}: {where}", resource="token")


def _one(role: Role) -> str:
    return f"{'an' if role is Role.OPERATOR else 'a'} {role.value}"
