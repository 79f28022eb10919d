"""An unknown caller is told whose token the call takes, in words that read well."""

import pytest

from kvlease.errors import NotYoursError, UnknownWorkerError
from kvleased.access import roles
from kvleased.access.callers import Caller
from kvleased.access.roles import Role, Roles
from kvleased.access.tokens import Keyring
from kvleased.answering.guarding import Guard
from kvleased.caches.registry import Registry

STRANGER = Caller(transport="rest", role=Role.STRANGER)


@pytest.fixture
def guard() -> Guard:
    """A guard without any token."""
    return Guard(Registry(1, max_caches=1, max_workers=1), Keyring({}))


@pytest.mark.parametrize(
    ("token", "what"),
    [("", "no token was sent"), ("guessed", "this daemon does not know the token")],
)
@pytest.mark.parametrize(
    ("allowed", "advice"),
    [
        (
            roles.LOOK_AT_ALL,
            "needs the token of an operator or a reader; kvlease reads it from the file",
        ),
        (roles.RULE, "needs the token of an operator; kvlease reads it from the file"),
    ],
)
def test_unknown_caller_is_told_whose_token_it_takes(
    guard: Guard, token: str, what: str, allowed: Roles, advice: str
) -> None:
    """A wrong token gets advice on the right one; only where a worker's token is taken, the advice is to attach."""
    with pytest.raises(UnknownWorkerError) as refused:
        guard.admit(allowed, STRANGER._replace(token=token))

    message = refused.value.message
    assert message.startswith(f"{what}: ")
    assert advice in message
    assert not message.endswith(".")


def test_caller_goes_on_for_as_long_as_the_token_of_his_role_is_the_same(guard: Guard) -> None:
    """A caller stays admitted while its role's token is the same; after that it is told whose token was replaced."""
    guard.keyring = Keyring({Role.READER: "seen", Role.OPERATOR: "secret"})
    caller = guard.admit(roles.LOOK_AT_ALL, STRANGER._replace(token="seen"))
    guard.check_still(caller)
    guard.check_still(STRANGER)

    guard.keyring = Keyring({Role.READER: "seen", Role.OPERATOR: "other"})
    guard.check_still(caller)

    guard.keyring = Keyring({Role.READER: "other", Role.OPERATOR: "seen"})
    with pytest.raises(UnknownWorkerError, match="the token of a reader was replaced"):
        guard.check_still(caller)


@pytest.mark.parametrize("token", ["", "guessed"])
def test_unknown_worker_is_told_to_attach(guard: Guard, token: str) -> None:
    """If a call takes only a worker's token, the refusal says how to get one, as over the local socket."""
    with pytest.raises(UnknownWorkerError, match="attach first and send the token"):
        guard.admit(roles.OWN, STRANGER._replace(token=token))


async def test_token_of_a_role_in_place_of_a_workers_is_told_apart_from_an_unknown_one(
    guard: Guard,
) -> None:
    """Who sends a joiner's token in a worker's own call is not told that nobody has it."""
    guard.keyring = Keyring({Role.JOINER: "joins"})

    with pytest.raises(UnknownWorkerError, match=r"made by a joiner, .*attach first") as refused:
        guard.admit(roles.OWN, STRANGER._replace(token="joins"))

    assert "obody has this token" not in refused.value.message
    with pytest.raises(UnknownWorkerError, match=r"made by an operator, .*attach first"):
        guard.admit(roles.OWN, Caller(transport="rest", role=Role.OPERATOR))


@pytest.mark.parametrize("token", ["", "guessed"])
async def test_caller_is_told_of_both(guard: Guard, token: str) -> None:
    """If a call takes a worker's or an operator's token, the refusal says where each comes from."""
    with pytest.raises(
        UnknownWorkerError, match=r"attach returns a worker's token, and .* KVLEASE_TOKEN_FILE"
    ):
        guard.admit(roles.USE, STRANGER._replace(token=token))


async def test_part_of_a_verb_is_refused_as_the_verb(guard: Guard) -> None:
    """A lost token is refused with the same message in a detach over REST as in other calls of a worker's own."""
    lost, messages = STRANGER._replace(token="lost"), set()
    for allowed in (roles.OWN, roles.of_verb("detach")):
        with pytest.raises(UnknownWorkerError) as refused:
            guard.admit(allowed, lost, "detach")
        messages.add(refused.value.message)

    assert len(messages) == 1
    with pytest.raises(UnknownWorkerError, match="attach first"):
        guard.admit(roles.OWN, Caller(transport="rest", role=Role.OPERATOR), "detach")


def test_known_caller_is_told_who_it_is(guard: Guard) -> None:
    """The refusal names the caller's role, and the roles that may call, with their articles."""
    with pytest.raises(
        NotYoursError, match=r"^an operator may not do this, only a reader may; docs/"
    ):
        guard.admit(roles.LOOK_AT_ALL - roles.RULE, Caller(transport="rest", role=Role.OPERATOR))
