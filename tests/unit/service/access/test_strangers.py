"""However much strangers send, the log has one line of a kind in ten seconds, and the counts miss none."""

import asyncio

import pytest
from structlog.testing import capture_logs

from kvlease.errors import KVLeaseError
from kvleased.access import strangers
from kvleased.access.callers import Caller
from kvleased.access.roles import LOOK, OWN, RULE, Role
from kvleased.access.strangers import Seldom
from kvleased.access.tokens import Keyring
from kvleased.answering.guarding import Guard
from kvleased.caches.registry import Registry

STRANGER = Caller(transport="rest", role=Role.STRANGER, address="10.0.0.7:4711")


async def test_flood_is_a_line_and_a_number() -> None:
    """The first refusal is logged at once; the others are logged together, with the last of them."""
    seldom = Seldom("bad_http")

    with capture_logs() as lines:
        for port in range(1_000):
            seldom.tell(peer=f"10.0.0.7:{port}")
        told_at_once = len(lines)
        seldom.tell_held_back()
        seldom.tell_held_back()

    assert told_at_once == 1
    assert [(line["count"], line["peer"]) for line in lines] == [
        (1, "10.0.0.7:0"),
        (999, "10.0.0.7:999"),
    ]


async def test_end_of_a_flood_is_told_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals that were held back are logged without waiting for the next stranger."""
    monkeypatch.setattr(strangers, "SECONDS_APART", 0.01)
    seldom = Seldom("bad_http")

    with capture_logs() as lines:
        seldom.tell()
        seldom.tell()
        async with asyncio.timeout(10):
            while sum(line["count"] for line in lines) < 2:  # noqa: ASYNC110 - the log has no event for it
                await asyncio.sleep(0.005)

    assert {line["event"] for line in lines} == {"bad_http"}


async def test_refused_operator_is_told_with_verb_and_peer_but_no_token() -> None:
    """A wrong token for an operator's verb is a warning with verb and peer, and without the token."""
    guard = Guard(Registry(1, max_caches=1, max_workers=1), Keyring({Role.READER: "reader-token"}))

    with capture_logs() as lines:
        for verb, token in (("drain", "CANARY"), ("clear", "reader-token"), ("drain", "CANARY")):
            with pytest.raises(KVLeaseError):
                guard.admit(RULE, STRANGER._replace(token=token), verb)

    told = [(line["verb"], line["role"], line["code"], line["peer"]) for line in lines]
    assert told == [
        ("drain", "stranger", "UNKNOWN_WORKER", "10.0.0.7:4711"),
        ("clear", "reader", "NOT_YOURS", "10.0.0.7:4711"),
    ]
    assert {line["log_level"] for line in lines} == {"warning"}
    assert "CANARY" not in str(lines)
    assert "reader-token" not in str(lines)


async def test_worker_that_was_forgotten_is_no_stranger() -> None:
    """A worker that calls with the token of an earlier daemon attaches again and causes no warning."""
    guard = Guard(Registry(1, max_caches=1, max_workers=1), Keyring({}))

    with capture_logs() as lines:
        with pytest.raises(KVLeaseError):
            guard.admit(OWN, STRANGER._replace(token="lost"), "reserve")
        num_of_worker = len(lines)
        with pytest.raises(KVLeaseError):
            guard.admit(LOOK, STRANGER, "stats")

    assert (num_of_worker, len(lines)) == (0, 1)
