"""Own the check whether a caller may do something: who owns a token, and what a refused caller is told."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache

from google.protobuf.message import Message

from kvlease.errors import KVLeaseError, NotYoursError, UnknownWorkerError
from kvleased.access.callers import Caller
from kvleased.access.roles import OWN, Role, Roles, of_verb
from kvleased.access.strangers import Strangers
from kvleased.access.tokens import Keyring
from kvleased.caches.registry import Registry


class Guard:
    """Admits callers, or refuses them before anything else of their call is looked at."""

    def __init__(self, registry: Registry, keyring: Keyring) -> None:
        """Take the registry, which knows the workers' tokens, and the keyring, which knows the tokens of roles."""
        self._workers = registry.by_token
        self._strangers = Strangers()
        self.keyring = keyring

    def admit(self, allowed: Roles, caller: Caller, asked: str = "") -> Caller:
        """Return the caller with its role; the token of a role is removed from it, as only workers need theirs later.

        `asked` is the verb or the path by which the log tells of a refusal.

        Raises:
            UnknownWorkerError: nobody has this token, or none was sent and one is needed.
            NotYoursError: the caller's role may not do this.
        """
        token = caller.token
        if token in self._workers:
            caller = caller.known_as(Role.WORKER, token)
        elif token:
            role = self.keyring.role_of(token)
            is_stranger = role is Role.STRANGER
            caller = (
                caller.known_as(role, token)
                if is_stranger
                else caller.known_as(role, "", self.keyring)
            )
        if caller.role not in allowed or (caller.role is Role.STRANGER and caller.token):
            error = _refusal(caller, allowed, asked)
            # In a worker's own call an unknown token is most often one that its daemon took along: it attaches again.
            if allowed is not OWN or not token or caller.role is not Role.STRANGER:
                self._strangers.refused(asked, caller, error.code, has_token=bool(token))
            raise error
        return caller

    def check_still(self, caller: Caller) -> None:
        """Refuse to go on for a caller who was admitted by a token that another one has replaced since.

        Raises:
            UnknownWorkerError: it was replaced.
        """
        keyring = caller.keyring
        if keyring is self.keyring or keyring is None:
            return
        if not self.keyring.has_token_of(caller.role, keyring):
            message = f"the token of {_one(caller.role)} was replaced; call again with the new one"
            raise UnknownWorkerError(message, resource="token")

    async def while_admitted(
        self, answers: AsyncGenerator[Message, None], caller: Caller
    ) -> AsyncGenerator[Message, None]:
        """Yield a stream's answers for as long as the token counts that admitted the caller.

        Raises:
            UnknownWorkerError: it was replaced; the next answer is not given any more.
        """
        # Where this ends, they end with it: what they hold, such as a recording, must not outlast them.
        async with aclosing(answers):
            async for answer in answers:
                self.check_still(caller)
                yield answer

    def knows(self, token: str, /) -> bool:
        """Tell whether a token is that of a worker or of a role."""
        return token in self._workers or self.keyring.role_of(token) is not Role.STRANGER


def _refusal(caller: Caller, allowed: Roles, asked: str) -> KVLeaseError:
    """Return the refusal of a caller that may not do this."""
    if caller.role is Role.STRANGER and caller.token and allowed is OWN and asked:
        # An operation of REST that is a worker's own is refused as the whole verb is over other transports.
        allowed = of_verb(asked)
    if caller.role is Role.STRANGER and not caller.token:
        return _unknown("no token was sent", allowed)
    if allowed == OWN:
        # An unknown token gets the same words as on the local socket: they tell how to become a worker.
        message = None if caller.role is Role.STRANGER else _words_to_no_worker(caller)
        return UnknownWorkerError(message, resource="token")
    if caller.role is Role.STRANGER:
        return _unknown("this daemon does not know the token", allowed)
    message = (
        f"{_one(caller.role)} may not do this, only {_any_of(allowed)} may; docs/security.md "
        "says who may call what"
    )
    return NotYoursError(message, resource="role", rule="role")


def _unknown(what: str, allowed: Roles) -> UnknownWorkerError:
    """Return the refusal of an unknown caller."""
    return UnknownWorkerError(_words_to_unknown(what, allowed), resource="token")


@cache
def _words_to_unknown(what: str, allowed: Roles) -> str:
    """Say whose token is needed, and where it is; cached, as a flood of strangers is told the same few texts."""
    if allowed == OWN:
        return f"{what}: attach first and send the token that attach returned"
    where = "kvlease reads it from the file that KVLEASE_TOKEN_FILE names"
    if Role.WORKER in allowed:
        where = (
            "attach returns a worker's token, and kvlease reads any other from the file that "
            "KVLEASE_TOKEN_FILE names"
        )
    where += "; docs/security.md says where to find it"
    return f"{what}: this call needs the token of {_any_of(allowed)}; {where}"


def _words_to_no_worker(caller: Caller) -> str:
    """Say that the caller is known, yet no worker: to look for a mistyped token would lead nowhere."""
    return (
        f"this call is made by {_one(caller.role)}, and only a worker may make it: attach first "
        "and send the token that attach returned"
    )


def _any_of(allowed: Roles) -> str:
    return " or ".join(map(_one, sorted(allowed, key=lambda role: role.value)))


def _one(role: Role) -> str:
    return f"{'an' if role is Role.OPERATOR else 'a'} {role.value}"
