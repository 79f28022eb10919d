"""Laws of silence: it is counted only while both sides run, and only after a sign of life."""

import asyncio
import json
import socket
from math import inf

import pytest

from kvleased.config.settings import Settings
from kvleased.supervision.keeper_link import KeeperLink
from kvleased.supervision.silence import Silence


def test_silence_is_too_long_after_as_many_ticks() -> None:
    """Each second without a sign of life is a tick; a sign of life begins anew."""
    silence = Silence(3)
    silence.heard(100.0)

    assert [silence.tick(at) for at in (100.5, 101.0, 102.0)] == [False] * 3
    silence.heard(102.5)
    assert [silence.tick(at) for at in (103.5, 104.5, 105.5)] == [False, False, True]


def test_time_that_the_counter_stood_still_is_one_tick() -> None:
    """A late tick counts once: the other process stood still as well, and is heard of before the next tick."""
    silence = Silence(3)
    silence.heard(100.0)

    assert not silence.tick(100_000.0)
    assert silence.seconds == 1


@pytest.mark.parametrize("seconds_max", [0, 3])
def test_nothing_is_counted_before_the_first_sign(seconds_max: float) -> None:
    """No silence is counted while a process starts, if the limit is off, or after it has ended."""
    silence = Silence(seconds_max)

    assert silence.due == inf
    silence.heard(1.0)
    assert silence.due == (2.0 if seconds_max else inf)
    silence.end()
    assert not silence.tick(1e9)


@pytest.mark.parametrize("seconds", [0.5, 2.9])
def test_silence_shorter_than_beats_is_refused(seconds: float) -> None:
    """A limit that would end every control process is refused."""
    with pytest.raises(ValueError, match="at least 3"):
        Settings(control_silent_seconds_max=seconds)


async def test_signs_of_life_never_fill_the_link() -> None:
    """If the supervisor reads nothing, at most one sign of life waits, and sending it never blocks."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        link = KeeperLink(theirs)
        for _ in range(10_000):
            link.show_life()
            assert link._next_beat is not None
            link._next_beat.cancel()

        assert json.loads(ours.recv(100)) == {"op": "alive"}
        with pytest.raises(BlockingIOError):
            ours.recv(100, socket.MSG_DONTWAIT)
        link.show_life()
        assert json.loads(ours.recv(100)) == {"op": "alive"}
        link.close()
        await asyncio.sleep(0)
