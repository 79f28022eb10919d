"""Laws of the image, built for real: it has only the daemon, by hash, runs as nobody, and writes nothing."""

import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvlease.geometry import ceil_div
from tests.deploy.containers.engine import Engine, status_of
from tests.deploy.containers.images import NAME, BuildError, Image, build
from tests.deploy.tools import ROOT

pytestmark = pytest.mark.deploy

_VERSION: Final = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
_OF_THE_USER: Final = re.compile(
    r"etc/((passwd|group|shadow|gshadow|subuid|subgid)-?|\.pwd\.lock|hosts)|run/kvlease"
)
"""Files that making a user changes, the user's directory, and the builder's hosts file."""
_REMOVED: Final = re.compile(
    r"usr(/local(/bin|/lib(/python3\.\d+(/site-packages)?)?)?)?(/\.wh\.[^/]+)?"
)
"""The marks of files removed from the base, and their directories."""
_TOOLS: Final = {"as", "c++", "cc", "clang", "cpp", "g++", "gcc", "ld", "make", "pip", "pip3", "uv"}
_REMAINS: Final = {".cache", "ensurepip", "pip", "setuptools", "wheel", "wheels"}
_LOCKDOWN: Final = (
    "--network=none",
    "--read-only",
    "--read-only-tmpfs=false",
    "--cap-drop=all",
    "--security-opt=no-new-privileges",
    "--memory=1g",
)
_SETTINGS: Final = ("--env=KVLEASED_MEMORY_BYTES_MAX=67108864",)


@pytest.fixture(scope="module")
def daemon(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a container of the unchanged image, with only a directory for its sockets as Kubernetes makes it."""
    sockets = tmp_path_factory.mktemp("sockets")
    shutil.chown(sockets, group=10001)
    sockets.chmod(0o2777)
    options = [*_LOCKDOWN, *_SETTINGS, f"--volume={sockets}:/run/kvlease"]
    engine.do("run", "--detach", "--pull=never", "--name=daemon", *options, NAME)
    yield "daemon"
    engine.do("rm", "--force", "--time=0", "daemon")


def _locked() -> set[tuple[str, str]]:
    """Return names and versions of the lock, which has several versions of some packages, by release of Python."""
    lock = (ROOT / "requirements" / "service.lock").read_text()
    return set(re.findall(r"^([a-z0-9-]+)(?:\[\S+\])?==([^\s;]+)", lock, flags=re.MULTILINE))


def _probe(engine: Engine, container: str, probe: str) -> bool | None:
    return engine.try_to("exec", container, "kvleased", "probe", probe).returncode == 0 or None


def test_configuration_is_as_it_was_written(image: Image) -> None:
    """Signals reach the daemon itself, the health command needs no shell, and labels describe the image."""
    config = image.config
    labels = config["Labels"]

    assert (config["User"], config["Entrypoint"], config["Cmd"]) == (
        "10001:10001",
        ["kvleased"],
        ["serve"],
    )
    assert config["Healthcheck"]["Test"] == ["CMD", "kvleased", "probe", "livez"]
    assert config["StopSignal"] == "SIGTERM"
    assert labels["org.opencontainers.image.version"] == _VERSION
    assert labels["org.opencontainers.image.revision"] == "of-the-tests"
    assert labels["org.opencontainers.image.title"] == "kvlease"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert "(cpu)" in labels["org.opencontainers.image.description"]


def test_last_stage_adds_the_daemon_and_its_user(image: Image) -> None:
    """The last stage adds only the daemon's packages, a user and its directory: no cache, log or build file."""
    directories = {"etc", "opt", "run"}

    strays = [
        file.path
        for file in image.added
        if not file.path.startswith("opt/kvlease")
        and not _OF_THE_USER.fullmatch(file.path)
        and not _REMOVED.fullmatch(file.path)
        and file.path not in directories
    ]

    assert strays == []


def test_last_stage_cannot_build_or_install(image: Image) -> None:
    """The last stage adds no compiler or installer or their traces, and only root may write its files."""
    paths = [Path(file.path) for file in image.added]

    assert len(paths) > 1000
    assert not {path.name for path in paths} & (_TOOLS | _REMAINS)
    assert not [path for path in paths if path.suffix in {".o", ".tar", ".whl"}]
    ours = [file for file in image.added if file.path.startswith("opt/")]
    assert {file.owner for file in ours} == {0}
    assert not [file.path for file in ours if file.mode & 0o6000]


def test_bytes_are_those_that_are_told(image: Image) -> None:
    """The documentation tells how many MiB the daemon adds to its base, rounded up to tens."""
    num_bytes = sum(file.num_bytes for file in image.added)

    told = re.search(r"adds\s(\d+) MiB", (ROOT / "docs" / "install.md").read_text())

    assert told is not None
    assert ceil_div(num_bytes, 10 << 20) * 10 == int(told[1])


def test_packages_are_those_of_the_lock(engine: Engine) -> None:
    """Only the locked versions of the lock's packages are installed, and the daemon itself."""
    script = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.name.lower().replace('_', '-'): d.version for d in m.distributions()}))"
    )
    command = ["run", "--rm", "--pull=never", *_LOCKDOWN, "--entrypoint=python", NAME, "-c", script]

    installed = json.loads(engine.do(*command))

    locked = _locked()
    assert installed.pop("kvlease") == _VERSION
    assert set(installed.items()) <= locked
    # Packages for other systems, such as terminal colours, are locked too but not installed.
    assert len(installed) >= len({name for name, _ in locked}) - 5


def test_another_hash_ends_the_build(tmp_path: Path) -> None:
    """A package with another hash than the lock's ends the build."""
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        path = ROOT / line.removeprefix("!")
        if line.startswith("!") and path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
        elif line.startswith("!"):
            shutil.copy(path, tmp_path)
    shutil.copy(ROOT / "Dockerfile", tmp_path)
    lock = tmp_path / "requirements" / "build.lock"
    lock.write_text(re.sub(r"sha256:[0-9a-f]{4}", "sha256:0000", lock.read_text()))

    with pytest.raises(BuildError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
        build("build", context=tmp_path)


def test_daemon_runs_with_a_read_only_root(engine: Engine, daemon: str) -> None:
    """The daemon becomes ready and healthy without any capability, and with nothing writable but its sockets."""
    engine.until(daemon, lambda: _probe(engine, daemon, "readyz"))

    assert engine.try_to("healthcheck", "run", daemon).returncode == 0
    status = status_of(engine.pid(daemon))
    assert status["Uid"].split() == ["10001"] * 4
    assert status["Gid"].split() == ["10001"] * 4
    assert {status[name] for name in status if name.startswith("Cap")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert engine.inspect(daemon)["HostConfig"]["ReadonlyRootfs"] is True


def test_daemon_ends_when_it_is_told(engine: Engine, daemon: str) -> None:
    """SIGTERM reaches the daemon, which ends with status 0 before anybody kills it."""
    engine.until(daemon, lambda: _probe(engine, daemon, "readyz"))

    engine.do("stop", "--time=60", daemon)

    state = engine.inspect(daemon)["State"]
    assert (state["ExitCode"], state["OOMKilled"]) == (0, False), engine.logs(daemon)


def test_bill_names_all_that_is_installed(tmp_path: Path) -> None:
    """The target `sbom` writes CycloneDX with every installed locked package, its version and its address."""
    build("sbom", f"--output=type=local,dest={tmp_path}")

    bill: dict[str, Any] = json.loads((tmp_path / "kvlease.cdx.json").read_text())

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    found = {part["name"].lower().replace("_", "-"): part for part in bill["components"]}
    assert found.pop("kvlease")["version"] == _VERSION
    assert {"fastapi", "grpcio", "numpy", "textual", "uvicorn"} <= found.keys()
    for name, part in found.items():
        assert (name, part["version"]) in _locked()
        assert part["purl"].startswith(f"pkg:pypi/{name}@{part['version']}")
    # Equal packages must give equal bills.
    assert "serialNumber" not in bill
    assert "timestamp" not in bill["metadata"]
