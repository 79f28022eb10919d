"""Laws of deployed files beside the chart: linters are silent, hashes complete, units and pods locked."""

import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Final

import pytest

from kvleased.config.sources import load, unknown_variables
from tests.deploy.tools import ROOT, VENV, Document, Helm, run

pytestmark = pytest.mark.deploy

_DEPLOY: Final = ROOT / "deploy"
_UNIT: Final = _DEPLOY / "systemd" / "kvleased.service"
_DOCKERFILE: Final = (ROOT / "Dockerfile").read_text()
_EXPOSURE_MAX: Final = 2.0
"""Exposure out of ten, as systemd rates it."""
_SCRIPTS: Final = (
    ROOT / "tests" / "deploy" / "setup.sh",
    ROOT / "tests" / "deploy" / "containers" / "base.sh",
    *sorted((ROOT / "tests" / "deploy" / "cluster").glob("*.sh")),
    ROOT / "requirements" / "lock",
)
_COMPOSITIONS: Final = [
    _DEPLOY / "compose.yaml",
    *sorted((ROOT / "examples" / "vllm").glob("*.yaml")),
]
_LOCKS: Final = {"service": ("otel", "service"), "cuda": ("cuda", "otel", "service")}


@pytest.mark.parametrize("path", ["Dockerfile", "examples/vllm/Dockerfile"])
def test_dockerfile_is_clean(path: str) -> None:
    """The linter of Dockerfiles finds nothing."""
    done = run(VENV / "hadolint", ROOT / path)

    assert (done.stdout, done.returncode) == ("", 0)


def test_daemon_has_no_installer_of_its_base(tmp_path: Path) -> None:
    """The last stage removes all installers of Python's slim image, and nothing that Python needs to run."""
    base = tmp_path / "usr" / "local"
    library = base / "lib" / "python3.11"
    for kept in ("bin/python3.11", "lib/python3.11/venv/__init__.py", "lib/python3.11/os.py"):
        (base / kept).parent.mkdir(parents=True, exist_ok=True)
        (base / kept).touch()
    for name in ("pip", "setuptools", "wheel", "pkg_resources", "_distutils_hack"):
        (library / "site-packages" / name).mkdir(parents=True)
    (library / "site-packages" / "distutils-precedence.pth").touch()
    (library / "ensurepip" / "_bundled").mkdir(parents=True)
    for name in ("pip", "pip3", "pip3.11", "wheel"):
        (base / "bin" / name).touch()
    last = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    (command,) = re.findall(r"^RUN (rm -rf .*?) \\$", last, re.MULTILINE)

    done = run("sh", "-euc", command.replace("/usr/local", str(base)))

    assert done.returncode == 0
    left = {str(path.relative_to(base)) for path in base.rglob("*") if path.is_file()}
    assert left == {"bin/python3.11", "lib/python3.11/venv/__init__.py", "lib/python3.11/os.py"}
    assert not any((library / "site-packages").iterdir())
    assert not (library / "ensurepip").exists()


def test_yaml_is_clean() -> None:
    """The linter of YAML finds nothing, not even a warning."""
    done = run(VENV / "yamllint", "-s", "deploy", "helm")

    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize("script", _SCRIPTS, ids=lambda path: path.name)
def test_script_is_clean(script: Path) -> None:
    """The linter of shell scripts finds nothing."""
    done = run(VENV / "shellcheck", script)

    assert (done.stdout, done.returncode) == ("", 0)


def test_image_is_nobody_and_starts_without_a_shell() -> None:
    """The image's user is a number above 10,000, and signals reach the daemon itself."""
    last = _DOCKERFILE.rpartition("\nFROM ")[2]

    assert "\nUSER 10001:10001\n" in last
    assert '\nENTRYPOINT ["kvleased"]\nCMD ["serve"]\n' in last
    assert 'CMD ["kvleased", "probe", "livez"]' in last
    for label in ("title", "description", "version", "revision", "created", "licenses"):
        assert f"org.opencontainers.image.{label}=" in last


def test_every_install_is_locked() -> None:
    """Pip installs only by hash in the image, except our own wheel, which it installs offline."""
    installs = re.findall(r"pip (?:install|wheel) [^\n&]*", _DOCKERFILE)

    assert len(installs) == 5
    for line in installs:
        assert "--require-hashes" in line or "--no-deps" in line


@pytest.mark.parametrize(("name", "extras"), _LOCKS.items(), ids=_LOCKS.keys())
def test_lock_has_all_that_is_required(name: str, extras: tuple[str, ...]) -> None:
    """Each requirement is locked to one version with its hashes; torch is not among them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = list(project["dependencies"])
    for extra in extras:
        lines += project["optional-dependencies"][extra]
    wanted = {re.split(r"[\[<>=!~; ]", line)[0].lower() for line in lines}

    entries = re.split(r"\n(?=\S)", (ROOT / "requirements" / f"{name}.lock").read_text())
    locked = {entry.partition("==")[0].split("[")[0] for entry in entries if "==" in entry}
    assert wanted <= locked
    assert "torch" not in locked
    assert all("--hash=sha256:" in entry for entry in entries if "==" in entry)


def test_version_of_the_image_is_the_project_s() -> None:
    """Chart, image and examples name the version that is built."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

    assert f"ARG VERSION={version}\n" in _DOCKERFILE
    assert f"appVersion: {version}\n" in (ROOT / "helm" / "kvlease" / "Chart.yaml").read_text()
    for path in ("compose.yaml", "sidecar.yaml"):
        assert f"image: kvlease:{version}\n" in (_DEPLOY / path).read_text()


def test_context_has_what_the_image_copies() -> None:
    """The build context has all that the Dockerfile copies, and nothing else."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", _DOCKERFILE, flags=re.MULTILINE)
    copied = {path for line in copies for path in line.split()}

    assert {re.sub(r"requirements/\w+\.lock", "requirements", path) for path in copied} == let_in
    assert all((ROOT / path).exists() for path in copied)


def test_sidecar_is_valid_and_locked(helm: Helm) -> None:
    """Every Kubernetes with native sidecars accepts the pod, and no container in it can gain privileges."""
    (pod,) = helm.load_yaml((_DEPLOY / "sidecar.yaml").read_text())

    for version in ("1.29", "1.31", "1.33", "1.34", "1.37"):
        assert helm.validate(pod, version) == ""
    assert pod["spec"]["automountServiceAccountToken"] is False
    (daemon,) = pod["spec"]["initContainers"]
    # An unready daemon must neither keep an engine from starting nor take it out of traffic.
    assert [name for name in daemon if name.endswith("Probe")] == ["livenessProbe"]
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["runAsUser"] == 10001


def test_sidecar_s_daemon_takes_its_environment(
    helm: Helm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon accepts the pod's settings, and its pools fit into its memory."""
    (pod,) = helm.load_yaml((_DEPLOY / "sidecar.yaml").read_text())
    (daemon,) = pod["spec"]["initContainers"]
    for entry in daemon["env"]:
        monkeypatch.setenv(entry["name"], entry["value"])

    settings = load([])

    assert not unknown_variables()
    gibibytes = int(daemon["resources"]["limits"]["memory"].removesuffix("Gi"))
    assert settings.memory_bytes_max <= (gibibytes - 1) << 30


def test_compose_is_locked(helm: Helm, monkeypatch: pytest.MonkeyPatch) -> None:
    """No service may write its root or gain rights, no port is open beyond this machine, and settings are valid."""
    (compose,) = helm.load_yaml((_DEPLOY / "compose.yaml").read_text())
    services: dict[str, Document] = compose["services"]

    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert services["kvleased"]["user"] == "10001:10001"
    for name, value in services["kvleased"]["environment"].items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value))
    assert load([]).probe_host == "0.0.0.0"  # noqa: S104 - the value that is looked for
    assert not unknown_variables()


def test_unit_is_understood(tmp_path: Path) -> None:
    """Systemd knows every directive of the unit."""
    assert shutil.which("systemd-analyze"), "tests/deploy/setup.sh installs it on Debian, as root"
    here = tmp_path / _UNIT.name
    # Systemd may miss only the program, which is not installed on the testing machine; any other stands for it.
    here.write_text(_UNIT.read_text().replace("/opt/kvlease/bin/kvleased", sys.executable))

    done = run("systemd-analyze", "verify", "--man=no", here)

    assert (done.stdout + done.stderr, done.returncode) == ("", 0)


def test_unit_may_start_as_long_as_a_pod(helm: Helm) -> None:
    """The unit allows a start as much time as the kubelet does, for busy machines and large stores."""
    (values,) = helm.load_yaml((ROOT / "helm" / "kvlease" / "values.yaml").read_text())
    startup = values["probes"]["startup"]

    found = re.search(r"^TimeoutStartSec=(\d+)$", _UNIT.read_text(), re.MULTILINE)

    assert found is not None
    assert int(found[1]) >= startup["periodSeconds"] * startup["failureThreshold"]


@pytest.mark.parametrize("path", _COMPOSITIONS, ids=lambda path: path.stem)
def test_container_may_start_as_long_as_a_pod(helm: Helm, path: Path) -> None:
    """Whoever waits for the daemon in a composition waits as long as the kubelet does, and so does the image itself."""
    (values,) = helm.load_yaml((ROOT / "helm" / "kvlease" / "values.yaml").read_text())
    startup = values["probes"]["startup"]

    (waits,) = re.findall(r"^ +start_period: (\d+)s$", path.read_text(), re.MULTILINE)
    (is_left_alone,) = re.findall(r"--start-period=(\d+)s", _DOCKERFILE)

    assert (
        min(int(waits), int(is_left_alone))
        >= startup["periodSeconds"] * startup["failureThreshold"]
    )


def test_unit_is_hardened() -> None:
    """The unit's exposure, as systemd rates it, is small."""
    done = run("systemd-analyze", "security", "--offline=yes", "--no-pager", _UNIT)

    found = re.search(r"Overall exposure level for \S+ ([\d.]+)", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert float(found[1]) <= _EXPOSURE_MAX


def test_unit_s_settings_are_settings(tmp_path: Path) -> None:
    """The daemon accepts the settings file beside the unit as it is, and with every setting that it only shows."""
    shipped = _DEPLOY / "systemd" / "kvleased.toml"
    settings = load(["--config", str(shipped)])
    everything = tmp_path / "everything.toml"
    everything.write_text(
        re.sub(r"^# (?=[\w[])", "", shipped.read_text().partition("\n")[2], flags=re.MULTILINE)
    )
    chosen = load(["--config", str(everything)])

    assert settings.device_bytes_default == 8 << 30
    assert not settings.tenants
    assert (chosen.tenants["chat"].weight, chosen.probe_host) == (3, "127.0.0.1")
    # The unit's own limit, not the machine's memory, says how much pools may take.
    assert settings.memory_bytes_max == 0
