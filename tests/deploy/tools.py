"""Own the tests' side of the tools: their paths, and the calls to the real Helm SDK in its own process."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "helm" / "kvlease"
VENV: Final = ROOT / "build" / "venv-deploy" / "bin"
KUBE_VERSION: Final = "v1.34.0"
Document = dict[str, Any]


class RefusedError(Exception):
    """Helm refused the values; the message is what a user would see."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """The rendered documents of a chart."""

    texts: Mapping[str, str]
    documents: Sequence[Document]

    def of_kind(self, kind: str) -> list[Document]:
        """Return the documents of one kind."""
        return [document for document in self.documents if document["kind"] == kind]

    def one(self, kind: str) -> Document:
        """Return the only document of a kind."""
        (document,) = self.of_kind(kind)
        return document

    @property
    def pods(self) -> list[Document]:
        """Return the specifications of all pods, including test pods."""
        found = [document["spec"] for document in self.of_kind("Pod")]
        for kind in ("Deployment", "DaemonSet"):
            found += [document["spec"]["template"]["spec"] for document in self.of_kind(kind)]
        return found

    @property
    def daemon(self) -> Document:
        """Return the daemon's container."""
        (found,) = (
            container
            for pod in self.pods
            for container in (*pod.get("initContainers", ()), *pod["containers"])
            if container["name"] == "kvleased"
        )
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Return the daemon's environment variables whose values stand in the document."""
        return {entry["name"]: entry.get("value", "") for entry in self.daemon["env"]}

    @property
    def notes(self) -> str:
        """Return the notes that the user reads after an install."""
        (text,) = (text for path, text in self.texts.items() if path.endswith("/NOTES.txt"))
        return text


def run(*command: str | Path) -> "subprocess.CompletedProcess[str]":
    """Run a program, which may fail."""
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def containers_of(pod: Document) -> list[Document]:
    """Return all containers of a pod's specification, init containers first."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


class Helm:
    """The Helm SDK in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Remember the process to ask."""
        self._process = process

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Self]:
        """Start the process, and end it."""
        assert (VENV / "python").exists(), "run make test-deploy, which installs what this needs"
        with subprocess.Popen(
            [VENV / "python", ROOT / "tests" / "deploy" / "helm" / "server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            yield cls(process)
            assert process.stdin is not None
            process.stdin.close()

    def render(
        self,
        values: Mapping[str, Any],
        *,
        chart: Path = CHART,
        release: str = "rel",
        kube_version: str = KUBE_VERSION,
    ) -> Rendered:
        """Return the chart rendered with these values.

        Raises:
            RefusedError: the values are refused.
        """
        answer = self._ask(
            "render", chart=str(chart), values=values, name=release, kube_version=kube_version
        )
        if "error" in answer:
            raise RefusedError(answer["error"])
        return Rendered(texts=answer["texts"], documents=answer["documents"])

    def lint(self, values: Mapping[str, Any], *, kube_version: str = KUBE_VERSION) -> list[Any]:
        """Return all messages of the linter."""
        answer = self._ask("lint", chart=str(CHART), values=values, kube_version=kube_version)
        return [*answer["messages"], *answer["errors"]]

    def validate(self, document: Document, kube_version: str) -> str:
        """Return what a version of Kubernetes finds wrong with a document, or an empty string."""
        answer: str = self._ask("validate", document=document, kube_version=kube_version)
        return answer

    def load_yaml(self, text: str) -> list[Any]:
        """Return the documents of a YAML text, which must have no duplicate key."""
        answer: list[Any] = self._ask("load_yaml", text=text)
        return answer

    def _ask(self, what: str, **arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"ask": what, **arguments}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process of the Helm SDK has ended; its own words are above"
        return json.loads(line)
