"""Whom nobody knows is told whose token it takes, in words that read well."""

import pytest

from kvlease.errors import NotYoursError, UnknownWorkerError
from kvleased import roles
from kvleased.callers import Caller
from kvleased.guarding import Guard
from kvleased.registry import Registry
from kvleased.roles import Role, Roles
from kvleased.tokens import Keyring

STRANGER = Caller(transport="rest", role=Role.STRANGER)


@pytest.fixture
def guard() -> Guard:
    """Nobody has a token."""
    return Guard(Registry(1, max_caches=1, max_workers=1), Keyring({}))


@pytest.mark.parametrize(("token", "what"), [("", "there is no"), ("guessed", "nobody has this")])
@pytest.mark.parametrize(
    ("allowed", "advice"),
    [
        (roles.LOOK_AT_ALL, "that of an operator or a reader; docs/security.md"),
        (roles.RULE, "that of an operator; docs/security.md"),
    ],
)
def test_unknown_caller_is_told_whose_token_it_takes(
    guard: Guard, token: str, what: str, allowed: Roles, advice: str
) -> None:
    """A wrong token of a reader sends nobody to attach; where it takes a worker's, that is how to get it."""
    with pytest.raises(UnknownWorkerError) as refused:
        guard.admit(allowed, STRANGER._replace(token=token))

    message = refused.value.message
    assert message.startswith(f"{what} bearer token: ")
    assert advice in message
    assert not message.endswith(".")


@pytest.mark.parametrize(
    ("allowed", "token"), [(roles.OWN, ""), (roles.OWN, "guessed"), (roles.USE, "guessed")]
)
def test_unknown_worker_is_told_to_attach(guard: Guard, allowed: Roles, token: str) -> None:
    """Whose token may have been a worker's is told how to get one, as over the local socket."""
    with pytest.raises(UnknownWorkerError, match="attach first and send the token"):
        guard.admit(allowed, STRANGER._replace(token=token))


def test_caller_without_a_token_is_told_of_both(guard: Guard) -> None:
    """What a worker and an operator may do says where each has its token from."""
    with pytest.raises(UnknownWorkerError, match=r"attach returns a worker's, docs/security\.md"):
        guard.admit(roles.USE, STRANGER)


def test_known_caller_is_told_who_it_is(guard: Guard) -> None:
    """A role that may not is named with its article."""
    with pytest.raises(NotYoursError, match=r"^an operator may not"):
        guard.admit(roles.LOOK_AT_ALL - roles.RULE, Caller(transport="rest", role=Role.OPERATOR))
