"""Laws of the chart beside the users' own pods, alerts and runbooks."""

import re
import shutil
from pathlib import Path

import pytest

from tests.deploy.helm.combinations import Values
from tests.deploy.helm.wrong import mistakes_in
from tests.deploy.tools import (
    CHART,
    Helm,
    RefusedError,
    Rendered,
)

pytestmark = pytest.mark.deploy


def test_templates_serve_a_chart_of_the_users_own(helm: Helm, tmp_path: Path) -> None:
    """A chart that depends on this one can include the daemon in its own pod, and gets nothing else."""
    rendered = _own_chart(helm, tmp_path, {"pools": {"deviceMiB": 512}})

    assert [document["kind"] for document in rendered.documents] == ["Pod"]
    assert rendered.daemon["restartPolicy"] == "Always"
    assert rendered.daemon["resources"]["limits"]["memory"] == "1536Mi"
    assert mistakes_in(helm, rendered, "1.29") == []


def test_chart_of_the_users_own_may_have_a_condition(helm: Helm, tmp_path: Path) -> None:
    """The usual value for the condition of a dependency is accepted; false, which would switch off nothing, is not."""
    rendered = _own_chart(helm, tmp_path, {"enabled": True})

    assert [document["kind"] for document in rendered.documents] == ["Pod"]
    with pytest.raises(RefusedError, match="enabled"):
        helm.render({"enabled": False})


def test_monitor_finds_a_pod_of_the_users_own(helm: Helm, tmp_path: Path) -> None:
    """The pod that the README shows is scraped, and its engine has a writable /tmp."""
    rendered = _own_chart(helm, tmp_path, {"podMonitor": {"enabled": True}})

    (pod,) = rendered.of_kind("Pod")
    selector = rendered.one("PodMonitor")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    (engine,) = pod["spec"]["containers"]
    assert engine["securityContext"]["readOnlyRootFilesystem"] is True
    assert "/tmp" in {mount["mountPath"] for mount in engine["volumeMounts"]}


@pytest.mark.parametrize("values", [{}, {"fullnameOverride": "kv"}, {"nameOverride": "cache"}])
def test_alert_knows_the_job(helm: Helm, values: Values) -> None:
    """Whatever the release's name, KvleaseDown looks at its job."""
    monitored = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    rendered = helm.render(values | monitored)
    monitor = rendered.one("PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]

    jobs = [one["replacement"] for one in endpoint["relabelings"] if one["targetLabel"] == "job"]
    job = [f"inference/{monitor['metadata']['name']}", *jobs][-1]
    rules = [
        rule
        for group in rendered.one("PrometheusRule")["spec"]["groups"]
        for rule in group["rules"]
    ]
    (down,) = [rule["expr"] for rule in rules if rule.get("alert") == "KvleaseDown"]
    (pattern,) = re.findall(r'job=~"([^"]*)"', down)

    assert re.fullmatch(pattern, job)
    assert not re.fullmatch(pattern, "kvlease/postgres"), "another job in a namespace of that name"


@pytest.mark.parametrize("mode", ["sidecar", "daemonset"])
def test_releases_alike_share_no_name(helm: Helm, mode: str) -> None:
    """Of two releases whose long names differ only at the end, no two objects have the same kind and name."""
    monitored = {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    values = {"mode": mode, **monitored}
    both = [helm.render(values, release="r" * 52 + end) for end in "ab"]

    one, other = (
        {(found["kind"], found["metadata"]["name"]) for found in rendered.documents}
        for rendered in both
    )
    assert one
    assert not one & other
    assert max(len(name) for _, name in one) <= 63


def test_runbooks_have_the_prefix_that_is_given(helm: Helm) -> None:
    """Each alert links to its runbook below the prefix in the values, and the user's own rules stay."""
    own = {
        "name": "own",
        "rules": [{"alert": "Own", "expr": "up", "annotations": {"runbook_url": "x"}}],
    }
    bare = {"alert": "Bare", "expr": "up", "annotations": None}
    prefix = "https://example.com/kvlease/"
    rendered = helm.render(
        {
            "prometheusRule": {
                "enabled": True,
                "runbookUrlPrefix": prefix,
                "groups": [own, {"name": "bare", "rules": [bare]}],
            }
        }
    )

    groups = rendered.one("PrometheusRule")["spec"]["groups"]
    alerts = {
        rule["alert"]: rule["annotations"]["runbook_url"]
        for group in groups
        for rule in group["rules"]
        if rule.get("annotations")
    }
    assert alerts.pop("Own") == "x"
    assert alerts == {name: f"{prefix}docs/runbooks/{name}.md" for name in alerts}


def _own_chart(helm: Helm, folder: Path, values: Values) -> Rendered:
    """Render the README's chart, which has this one as a dependency."""
    chart = folder / "own"
    shutil.copytree(CHART, chart / "charts" / "kvlease")
    (chart / "Chart.yaml").write_text("apiVersion: v2\nname: own\nversion: 1.0.0\n")
    (chart / "values.yaml").write_text(
        "kvlease: {engine: {enabled: false}, tests: {enabled: false}}\n"
    )
    (chart / "templates").mkdir()
    example = re.search(
        r"```yaml\n(# templates/pod.yaml\n.*?)```", (CHART / "README.md").read_text(), re.DOTALL
    )
    assert example is not None
    (chart / "templates" / "pod.yaml").write_text(example[1])
    return helm.render({"kvlease": values}, chart=chart)
