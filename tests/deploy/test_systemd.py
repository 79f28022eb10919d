"""Laws of the unit, run for real by systemd in a container: it starts locked, comes back when killed, and ends well."""

from collections.abc import Iterator
from typing import Final

import pytest

from tests.deploy.containers.engine import Engine
from tests.deploy.containers.images import NAME, PLACE, Image, archived, buildah, forget
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.deploy

_NAME: Final = "localhost/kvlease-systemd:deploy"
_UNIT: Final = ROOT / "deploy" / "systemd"
_INSTALL: Final = """
apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd >/dev/null 2>&1
systemctl mask systemd-logind.service systemd-udevd.service getty.target console-getty.service
"""


@pytest.fixture(scope="module")
def machine(engine: Engine, image: Image) -> Iterator[str]:
    """Run a container that looks like a machine: systemd is its first process, and the daemon is installed."""
    assert image.archive.exists()
    made = buildah("from", "--pull-never", NAME).strip()
    buildah("run", "--user=root", "--network=host", made, "--", "sh", "-ec", _INSTALL)
    buildah("copy", made, str(_UNIT / "kvleased.service"), "/etc/systemd/system/")
    buildah("copy", "--chown=0:10001", made, str(_UNIT / "kvleased.toml"), "/etc/kvlease/")
    buildah("config", "--user=root", '--entrypoint=["/lib/systemd/systemd"]', "--cmd=", made)
    buildah("commit", "-q", "--rm", "--format=docker", made, _NAME)
    archive = PLACE / "systemd.tar"
    archived(_NAME, archive)
    engine.do("load", "--quiet", "--input", str(archive))
    options = ["--pull=never", "--systemd=always", "--privileged", "--network=none"]
    engine.do("run", "--detach", "--name=machine", *options, "--tmpfs=/run", "--tmpfs=/tmp", _NAME)
    engine.until("machine", lambda: _ask(engine, "is-system-running") == "running" or None)
    yield "machine"
    engine.do("rm", "--force", "--time=0", "machine")
    forget(_NAME)
    archive.unlink()


def test_unit_starts_locked_and_serves(engine: Engine, machine: str) -> None:
    """`start` waits for a daemon that serves its own user, without any capability and behind filters."""
    engine.do("exec", machine, "systemctl", "start", "kvleased")

    status = engine.do("exec", machine, "cat", f"/proc/{_main(engine)}/status")
    assert "Uid:\t10001\t10001\t10001\t10001\n" in status
    assert "CapBnd:\t0000000000000000\n" in status
    assert "NoNewPrivs:\t1\nSeccomp:\t2\n" in status
    assert _told(engine).startswith("epoch ")


def test_killed_unit_is_started_again(engine: Engine, machine: str) -> None:
    """SIGKILL of the supervisor ends the whole daemon, and systemd starts another that serves."""
    engine.do("exec", machine, "systemctl", "start", "kvleased")
    before = _told(engine)

    kill = ["kill", "--kill-whom=main", "--signal=SIGKILL"]
    engine.do("exec", machine, "systemctl", *kill, "kvleased")

    engine.until(machine, lambda: int(_ask(engine, "show", "-p", "NRestarts")) > 0 or None)
    engine.until(machine, lambda: _ask(engine, "is-active") == "active" or None)
    assert _told(engine) != before


def test_stopped_unit_ended_well(engine: Engine, machine: str) -> None:
    """`stop` lets the daemon drain; nothing is killed, and its sockets' directory is gone."""
    engine.do("exec", machine, "systemctl", "start", "kvleased")

    engine.do("exec", machine, "systemctl", "stop", "kvleased")

    assert _ask(engine, "show", "-p", "Result") == "success"
    assert _ask(engine, "show", "-p", "ExecMainStatus") == "0"
    assert engine.try_to("exec", machine, "ls", "/run/kvlease").returncode != 0


def test_host_pools_in_shared_memory_outlive_the_unit(engine: Engine, machine: str) -> None:
    """`stop` leaves what lies in a host directory below /dev/shm, for the next start, and what engines have there."""
    place, path = "/dev/shm/kvlease", "/etc/kvlease/kvleased.env"
    own = ["setpriv", "--reuid=kvlease", "--regid=kvlease", "--clear-groups"]
    engine.do("exec", machine, *own, "install", "-d", "-m", "0700", place)
    engine.do("exec", machine, *own, "touch", "/dev/shm/of-an-engine")
    engine.do("exec", machine, "sh", "-c", f"echo KVLEASED_HOST_DIR={place} > {path}")
    engine.do("exec", machine, "systemctl", "start", "kvleased")
    before = engine.do("exec", machine, "sha256sum", f"{place}/secret")

    engine.do("exec", machine, "systemctl", "stop", "kvleased")

    after = engine.try_to("exec", machine, "sha256sum", f"{place}/secret", "/dev/shm/of-an-engine")
    assert before in after.stdout
    assert after.returncode == 0, after.stderr
    engine.do("exec", machine, "rm", "-r", path, place, "/dev/shm/of-an-engine")


def test_settings_that_cannot_work_are_not_tried_again(engine: Engine, machine: str) -> None:
    """A wrong setting ends the unit at once with its own status, and no restart."""
    path = "/etc/kvlease/kvleased.env"
    engine.do("exec", machine, "sh", "-c", f"echo KVLEASED_LEASE_SECONDS=-1 > {path}")

    started = engine.try_to("exec", machine, "systemctl", "start", "kvleased")

    assert started.returncode != 0
    # Units that wait for the daemon must not go on when it has ended.
    logs = engine.do("exec", machine, "journalctl", "--unit=kvleased", "--lines=60", "--no-pager")
    assert logs.rpartition("lease_seconds")[2].count("No such file or directory") < 20
    assert _ask(engine, "show", "-p", "ExecMainStatus") in {"2", "78"}
    assert _ask(engine, "is-active") == "failed"
    engine.do("exec", machine, "rm", path)
    engine.do("exec", machine, "systemctl", "reset-failed", "kvleased")


def _ask(engine: Engine, *command: str) -> str:
    """Return the value that a `systemctl` command prints of the system or of the unit."""
    unit = [] if command == ("is-system-running",) else ["kvleased"]
    done = engine.try_to("exec", "machine", "systemctl", *command, *unit)
    return done.stdout.strip().rpartition("=")[2]


def _main(engine: Engine) -> str:
    return _ask(engine, "show", "-p", "MainPID")


def _told(engine: Engine) -> str:
    """Return what `kvlease status` prints to the daemon's own user."""
    user = ["setpriv", "--reuid=kvlease", "--regid=kvlease", "--clear-groups"]
    place = ["env", "XDG_RUNTIME_DIR=/run/kvlease"]
    return engine.do("exec", "machine", *user, *place, "/opt/kvlease/bin/kvlease", "status")
