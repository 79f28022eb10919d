"""Laws of hygiene as checkov knows them: each finding in shipped files is a failure, or excused here with a reason."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.tools import CHART, ROOT, VENV, Helm

pytestmark = pytest.mark.deploy

_CHECKOV: Final = VENV.parent.parent / "venv-checkov" / "bin" / "checkov"
_EXCUSED: Final[Mapping[str, str]] = {
    "CKV_K8S_11": "a limit of processor time would stall the loop; requests are there, and cpuLimit is a value",
    "CKV_K8S_15": "pullPolicy is a value; with a digest there is nothing to pull twice",
    "CKV_K8S_43": "digest is a value; of an image that the user builds there is none to ship",
    "CKV_DOCKER_7": "the tag is in the argument's default, which is not looked at",
}
_EXCUSED_OF: Final[Mapping[tuple[str, str], str]] = {
    ("CKV_K8S_8", "Pod.inference.rel-kvlease-test"): "the test of a release runs once and ends",
    ("CKV_K8S_9", "Pod.inference.rel-kvlease-test"): "the same",
    (
        "CKV_K8S_25",
        "DaemonSet.inference.rel-kvlease",
    ): "the init container that makes the node's directory the daemon's own, and nothing else, may CHOWN and FOWNER",
    (
        "CKV_K8S_35",
        "DaemonSet.inference.rel-kvlease",
    ): "the address of a remote store is a setting, and settings are read from the environment",
    ("CKV_K8S_8", "Pod.default.inference"): "the worker's probes are its own image's",
    ("CKV_K8S_9", "Pod.default.inference"): "the same",
    ("CKV2_K8S_6", "Pod.inference.rel-kvlease-test"): "nothing listens in it",
    (
        "CKV2_K8S_6",
        "Pod.default.inference",
    ): "only loopback listens; the worker's policy is its own",
    ("CKV_K8S_14", "Pod.default.inference"): "the worker's image is a placeholder",
    ("CKV_K8S_21", "Pod.default.inference"): "the namespace is told to kubectl",
    (
        "CKV_DOCKER_2",
        "examples/vllm/Dockerfile.",
    ): "vLLM's image is what it is, and its users probe /health",
    (
        "CKV_DOCKER_3",
        "examples/vllm/Dockerfile.",
    ): "the user is told where it runs; vLLM's image has none",
}


def test_checkov_finds_nothing_that_is_not_excused(helm: Helm, tmp_path: Path) -> None:
    """Checkov's findings in all samples, the pod without Helm and both Dockerfiles are exactly the excused ones."""
    for path in sorted((CHART / "ci").glob("*.yaml")):
        (values,) = helm.load_yaml(path.read_text())
        texts = helm.render(values).texts.items()
        documents = [text for name, text in texts if name.endswith(".yaml") and text.strip()]
        (tmp_path / path.name).write_text("\n---\n".join(documents))
    (tmp_path / "sidecar.yaml").write_text((ROOT / "deploy" / "sidecar.yaml").read_text())
    for name in ("Dockerfile", "examples/vllm/Dockerfile"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    options = ["--framework", "kubernetes", "dockerfile", "--skip-download", "--output", "json"]

    done = subprocess.run(
        [_CHECKOV, "--directory", ".", "--quiet", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    reports = json.loads(done.stdout)
    assert {report["check_type"] for report in reports} == {"kubernetes", "dockerfile"}
    assert all(report["summary"]["passed"] > 100 for report in reports)
    assert not [
        report["summary"]["parsing_errors"]
        for report in reports
        if report["summary"]["parsing_errors"]
    ]
    found = {
        (one["check_id"], one["resource"].removeprefix("/"))
        for report in reports
        for one in report["results"]["failed_checks"]
    }
    assert {pair for pair in found if pair[0] not in _EXCUSED} == _EXCUSED_OF.keys()
    assert {check for check, _ in found} >= _EXCUSED.keys()
