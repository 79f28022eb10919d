"""Own images: how buildah builds one from the unchanged Dockerfile, and what its archive contains."""

import json
import os
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.deploy.tools import ROOT

PLACE: Final = ROOT / "build" / "containers"
NAME: Final = "localhost/kvlease:deploy"
_CERTIFICATES: Final = Path("/etc/ssl/certs")
_LINES_SHOWN: Final = 20


class BuildError(Exception):
    """The build failed; the message is the end of its output."""


@dataclass(frozen=True, slots=True)
class File:
    """A file of a layer."""

    path: str
    mode: int
    owner: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Image:
    """The contents and configuration of an archived image."""

    archive: Path
    config: dict[str, Any]
    layers: Sequence[Sequence[File]]

    @property
    def added(self) -> Sequence[File]:
        """Return the files of all layers but the base's: those that the Dockerfile's last stage adds."""
        return [file for layer in self.layers[1:] for file in layer]


def build(target: str, *options: str, context: Path = ROOT) -> None:
    """Build a stage of the Dockerfile, with a base that stands in for Python's image.

    Raises:
        BuildError: a step failed.
    """
    done = _buildah(
        "bud",
        # Stages are cached for the next build if that needs no copies.
        f"--layers={str(driver() == 'overlay').lower()}",
        "--pull=false",
        "--format=docker",
        "--network=host",
        f"--target={target}",
        *_sources(),
        *options,
        str(context),
    )
    if done.returncode:
        raise BuildError("\n".join((done.stdout + done.stderr).splitlines()[-_LINES_SHOWN:]))


def archived(name: str, archive: Path) -> Image:
    """Write an image into an archive, and read the archive."""
    archive.unlink(missing_ok=True)
    buildah("push", "-q", name, f"docker-archive:{archive}:{name}")
    with tarfile.open(archive) as outer:
        (manifest,) = json.loads(_read(outer, "manifest.json"))
        config = json.loads(_read(outer, manifest["Config"]))
        layers = [_files(outer, layer) for layer in manifest["Layers"]]
    return Image(archive=archive, config=config["config"], layers=layers)


def forget(name: str) -> None:
    """Remove an image, and what failed builds have left."""
    _buildah("rm", "--all")
    _buildah("rmi", "--force", name)
    _buildah("rmi", "--prune")


def buildah(*command: str) -> str:
    """Carry out a command, which must succeed, and return what it prints."""
    done = _buildah(*command)
    assert done.returncode == 0, done.stderr
    return done.stdout


def driver() -> str:
    """Return the storage driver that tests/deploy/containers/base.sh has found."""
    return (PLACE / "driver").read_text().strip()


def _sources() -> list[str]:
    """Return the options that mount pip's certificates and index settings in a build; none stays in the image."""
    options = []
    if _CERTIFICATES.is_dir():
        options.append(f"--volume={_CERTIFICATES}:{_CERTIFICATES}:ro")
    if index := os.environ.get("PIP_INDEX_URL"):
        path = PLACE / "pip.conf"
        path.write_text(f"[global]\nindex-url = {index}\n")
        options.append(f"--volume={path}:/etc/pip.conf:ro")
    return options


def _buildah(*command: str) -> "subprocess.CompletedProcess[str]":
    stores = ["--root", str(PLACE / "images"), "--runroot", str(PLACE / "images-run")]
    environment = {**os.environ, "BUILDAH_ISOLATION": "chroot", "TMPDIR": str(PLACE / "tmp")}
    return subprocess.run(
        ["buildah", *stores, "--storage-driver", driver(), *command],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, f"{name} is no file"
    return file.read()


def _files(archive: tarfile.TarFile, layer: str) -> list[File]:
    file = archive.extractfile(layer)
    with tarfile.open(fileobj=file) as inner:
        return [File(one.name, one.mode, one.uid, one.size) for one in inner]
