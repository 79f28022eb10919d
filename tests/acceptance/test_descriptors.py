"""A daemon out of descriptors goes on: it retries later, and idle peers give way to active ones."""

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvlease.v1 import kvlease_pb2 as pb
from tests.acceptance.test_processes import Connection, Served, sample, until

pytestmark = pytest.mark.acceptance

STATS = pb.StatsRequest()


@contextmanager
def started(directory: Path, *options: str) -> Iterator[Served]:
    """Run a daemon."""
    served = Served(directory, *options)
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def descriptors_left(pid: int, count: int) -> Iterator[None]:
    """Limit a process to so many more descriptors than it has open."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    used = {int(one.name) for one in Path(f"/proc/{pid}/fd").iterdir()}
    free = (number for number in range(soft) if number not in used)
    limit = [next(free) for _ in range(count + 1)][-1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("role", [pytest.param("mover", marks=pytest.mark.thorough), "control"])
def test_child_that_cannot_be_started_is_started_later(tmp_path: Path, role: str) -> None:
    """A child that ends while the supervisor has no descriptor left comes back later over the same memory."""
    with started(tmp_path) as served:
        served.register()
        supervisor, before = served.process.pid, served.living(role)
        with descriptors_left(supervisor, 0):
            os.kill(before, signal.SIGKILL)
            until(lambda: served.events("child_not_started"), "a try")
        until(lambda: served.child(role) not in (0, before), f"another {role}")
        num_lives = 2 if role == "control" else 1
        until(lambda: len(served.events("ready")) == num_lives, "a daemon that serves")
        until(lambda: served.stats().pools[0].free == 64, "the cache")

        assert served.process.poll() is None
        assert served.events("child_not_started")[0]["role"] == role
        assert served.process.pid == supervisor


def test_children_run_out_of_descriptors_before_the_supervisor(tmp_path: Path) -> None:
    """The supervisor keeps the control process's descriptors, and has enough left to start another one."""
    with started(tmp_path) as served:
        of_supervisor, of_control = (
            resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]
            for pid in (served.process.pid, served.living("control"))
        )

        assert of_control < of_supervisor


def test_silent_connection_gives_way_to_a_new_one(tmp_path: Path) -> None:
    """When the control process has no descriptor left, idle connections give way to new ones that call."""
    with started(tmp_path) as served:
        silent = [served.connect() for _ in range(8)]
        for one in silent:
            one.call(stats=STATS)
        with descriptors_left(served.living("control"), 0):
            for _ in range(3):
                with closing(served.connect()) as newcomer:
                    assert newcomer.call(stats=STATS).epoch
            assert served.events("descriptors_lacking")[0]["listener"] == "local"

        closed = [one for one in silent if _is_closed(one)]
        assert 0 < len(closed) < len(silent)
        for one in silent:
            one.close()


def test_connections_beyond_the_limit_are_counted_and_logged(tmp_path: Path) -> None:
    """The metrics and the log tell of a client of the local socket that finds no place, and of its process."""
    with started(tmp_path, "--max-connections", "1") as served:
        name = 'kvlease_connections_turned_away_total{listener="local",who="member"}'
        with closing(served.connect()) as first:
            first.call(stats=STATS)
            with closing(served.connect()):
                until(lambda: served.events("connections_turned_away"), "the warning")
                (told,) = served.events("connections_turned_away")

                assert sample(served, name) == 1
                assert (told["listener"], told["peer_pid"]) == ("local", os.getpid())


def _is_closed(connection: Connection) -> bool:
    try:
        connection.call(stats=STATS)
    except (EOFError, ConnectionError):
        return True
    return False


@pytest.mark.parametrize(("connections_max", "num_warnings"), [(1 << 20, 1), (1, 0)])
def test_limit_below_what_connections_need_is_warned_of(
    tmp_path: Path, connections_max: int, num_warnings: int
) -> None:
    """A start warns when it promises more connections than there can be descriptors."""
    with started(tmp_path, "--max-connections", str(connections_max)) as served:
        warnings = served.events("descriptors_below_need")

        assert len(warnings) == num_warnings
        assert all(one["limit"] < one["need"] for one in warnings)
