"""The environment and the scheduling policy that a process starts with."""

import os
import socket

import pytest

from kvleased.movers import protocol
from kvleased.supervision.processes import MOVER, _for_copies, spawn

_OURS = "glibc.cpu.x86_non_temporal_threshold=0x5000"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(None, _OURS, id="nothing"),
        pytest.param("", _OURS, id="empty"),
        pytest.param("glibc.malloc.check=1", f"glibc.malloc.check=1:{_OURS}", id="something else"),
        pytest.param(
            "glibc.cpu.x86_non_temporal_threshold=0x40000",
            "glibc.cpu.x86_non_temporal_threshold=0x40000",
            id="the same",
        ),
    ],
)
def test_movers_write_past_the_caches_unless_told_otherwise(
    told: str | None, expected: str
) -> None:
    """An operator's own setting for the C library's copies goes first, and no other variable changes."""
    environment = {"HOME": "/"} | ({} if told is None else {"GLIBC_TUNABLES": told})

    assert _for_copies(environment) == {"HOME": "/", "GLIBC_TUNABLES": expected}


def test_mover_gives_way_to_who_wakes_it() -> None:
    """A mover that is running does not take the core from the process that hands it a batch."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            child = spawn(MOVER, {"link": theirs.fileno()})
        ours.settimeout(60)
        try:
            assert ours.recv(protocol.PACKET_BYTES_MAX) == protocol.HERE

            assert os.sched_getscheduler(child.process.pid) == os.SCHED_BATCH
        finally:
            child.process.kill()
            child.process.wait()
