"""Laws of the chart: for all values, the rendered documents are valid and safe, and configure the daemon right."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvleased.config.sources import load
from tests.deploy.helm.combinations import COMBINATIONS, REFUSED, Values
from tests.deploy.helm.custom_kinds import CUSTOM_KINDS, mistake_in
from tests.deploy.helm.wrong import mistakes_in
from tests.deploy.tools import (
    CHART,
    ROOT,
    Document,
    Helm,
    RefusedError,
    containers_of,
)

pytestmark = pytest.mark.deploy


_VERSIONS: Final = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34", "1.35", "1.36", "1.37")


_CLAIMS_SINCE: Final = {
    "resource.k8s.io/v1beta1": "1.32",
    "resource.k8s.io/v1beta2": "1.33",
    "resource.k8s.io/v1": "1.34",
}


_SAMPLES: Final = sorted((CHART / "ci").glob("*-values.yaml"))


_every = pytest.mark.parametrize("values", COMBINATIONS.values(), ids=COMBINATIONS.keys())


_ROOT_MAY: Final = {"kvleased-host-path"}
"""The only container that is root, with two capabilities, to make a directory of the node."""


def _versions(values: Values, index: int) -> list[str]:
    """Return the oldest version, the first with stable claims, and one more in turn, as far as the values allow."""
    wanted = {"1.29", "1.34", _VERSIONS[index % len(_VERSIONS)]}
    return sorted(wanted & set(_usable(values)))


def _usable(values: Values) -> list[str]:
    """Return the versions that support the claims in the values, or all if there are none."""
    gpu = values.get("gpu", {})
    api_version = gpu.get("dra", {}).get("apiVersion", "resource.k8s.io/v1")
    since = _CLAIMS_SINCE[api_version] if gpu.get("kind") == "dra" else _VERSIONS[0]
    return [version for version in _VERSIONS if version >= since]


def _nulls(defaults: Document, *above: str) -> Iterator[tuple[str, Values]]:
    """Yield the path of each default value and of each section, and values in which it is null."""
    for name, value in defaults.items():
        values: Values = {name: None}
        for one in reversed(above):
            values = {one: values}
        yield "/".join((*above, name)), values
        if isinstance(value, dict):
            yield from _nulls(value, *above, name)


def _expanded(value: str) -> str:
    """Return the value of a variable as Kubernetes gives it to a container in which HOME is /tmp."""
    return re.sub(r"\$(\$|\(HOME\))", lambda found: "$" if found[1] == "$" else "/tmp", value)


def test_there_are_enough_combinations() -> None:
    """There are at least forty combinations, all different."""
    assert len({json.dumps(values, sort_keys=True) for values in COMBINATIONS.values()}) >= 40


@pytest.mark.parametrize(
    ("index", "values"), list(enumerate(COMBINATIONS.values())), ids=COMBINATIONS.keys()
)
def test_rendered_is_valid(helm: Helm, index: int, values: Values) -> None:
    """Old and new versions of Kubernetes accept every document."""
    wrong = [
        mistake
        for version in _versions(values, index)
        for mistake in mistakes_in(helm, helm.render(values, kube_version=f"v{version}.0"), version)
    ]

    assert wrong == []


@_every
def test_linter_is_silent(helm: Helm, values: Values) -> None:
    """The linter gives no error, warning or advice."""
    assert helm.lint(values) == []


@pytest.mark.parametrize("sample", _SAMPLES, ids=lambda path: path.stem)
def test_sample_is_valid(helm: Helm, sample: Path) -> None:
    """Each sample is valid in every version of Kubernetes."""
    (values,) = helm.load_yaml(sample.read_text())

    assert helm.lint(values) == []
    for version in _usable(values):
        assert mistakes_in(helm, helm.render(values, kube_version=f"v{version}.0"), version) == []


@pytest.mark.parametrize(
    ("api_version", "kube_version"),
    [("", "1.28"), *zip(_CLAIMS_SINCE, ("1.31", "1.32", "1.33"), strict=True)],
)
def test_old_kubernetes_is_refused(helm: Helm, api_version: str, kube_version: str) -> None:
    """Values that a version of Kubernetes does not support are refused with the version that they need."""
    values = {"gpu": {"kind": "dra", "dra": {"apiVersion": api_version}}} if api_version else {}

    with pytest.raises(RefusedError, match=f"Kubernetes .*{kube_version}"):
        helm.render(values, kube_version=f"v{kube_version}.0")


@pytest.mark.parametrize(("values", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_wrong_values_are_refused(helm: Helm, values: Values, says: str) -> None:
    """Wrong values are refused, and the refusal names what is wrong."""
    with pytest.raises(RefusedError, match=re.escape(says)):
        helm.render(values)


def test_values_that_are_null_are_refused(helm: Helm) -> None:
    """Each value, and each section, that is set to null is refused by its path, not with a trace of templates."""
    (defaults,) = helm.load_yaml((CHART / "values.yaml").read_text())
    nulls = dict(_nulls(defaults))

    assert {"engine", "engine/image", "engine/connectorConfig", "disk/path", "mode"} <= set(nulls)
    for path, values in nulls.items():
        *above, name = path.split("/")
        says = f"at '{'/'.join(('', *above))}': missing property '{name}'"
        with pytest.raises(RefusedError, match=re.escape(says)):
            helm.render(values)


@pytest.mark.parametrize(
    "cidr",
    [
        *("10.0.0.0/8", "0.0.0.0/0", "192.0.2.255/32", "::/0", "fd00::/8", "2001:db8::1/128"),
        *("::1/128", "1:2:3:4:5:6:7:8/64", "1:2:3:4:5:6:7::/112"),
    ],
)
def test_blocks_of_addresses_are_taken(helm: Helm, cidr: str) -> None:
    """Blocks of addresses of both families are taken as they are."""
    block = {"ipBlock": {"cidr": cidr}}

    policy = helm.render({"networkPolicy": {"metricsFrom": [block]}}).one("NetworkPolicy")

    assert policy["spec"]["ingress"][0]["from"] == [block]


def test_tenants_with_dollars_keep_their_names(helm: Helm) -> None:
    """A tenant's name that looks like a variable of Kubernetes reaches the daemon as it is written."""
    tenants: Values = {"$(HOME)": {"weight": 2}, "a$$b": {}, "$c": {}}

    written = helm.render({"tenants": tenants}).environment["KVLEASED_TENANTS"]

    assert json.loads(_expanded(written)) == tenants


@_every
def test_containers_are_locked(helm: Helm, values: Values) -> None:
    """No container can write its root, gain rights or use a capability, and only one is root."""
    for pod in helm.render(values).pods:
        for container in containers_of(pod):
            context = container["securityContext"]
            is_root = container["name"] in _ROOT_MAY
            assert context["allowPrivilegeEscalation"] is False
            assert context["privileged"] is False
            assert context["readOnlyRootFilesystem"] is True
            assert context["capabilities"]["drop"] == ["ALL"]
            assert context["capabilities"].get("add", []) == (
                ["CHOWN", "FOWNER"] if is_root else []
            )
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert (context["runAsUser"] == 0) is is_root
            assert context["runAsNonRoot"] is not is_root


@pytest.mark.parametrize(
    "values", [COMBINATIONS["limits of CPUs"], COMBINATIONS["daemonset with limits of CPUs"]]
)
def test_all_containers_have_the_limits_that_are_asked_for(helm: Helm, values: Values) -> None:
    """With limits of CPUs no container lacks one, which a namespace with a quota of them would refuse."""
    containers = [one for pod in helm.render(values).pods for one in containers_of(pod)]

    assert {"kvleased", "kvleased-directories", "reaches"} <= {one["name"] for one in containers}
    assert [one["name"] for one in containers if "cpu" not in one["resources"]["limits"]] == []


@_every
def test_numbers_are_written_out(helm: Helm, values: Values) -> None:
    """No number has an exponent, which neither Kubernetes nor the daemon's tools read as a whole number."""
    rendered = helm.render(values)

    assert re.findall(r"\b[0-9.]+e[+-][0-9]+", "".join(rendered.texts.values())) == []


@_every
def test_variable_is_there_once(helm: Helm, values: Values) -> None:
    """No container has a variable twice, which server-side apply refuses."""
    for pod in helm.render(values).pods:
        for container in containers_of(pod):
            names = [variable["name"] for variable in container.get("env", ())]
            assert len(names) == len(set(names))


@_every
def test_names_are_names(helm: Helm, values: Values) -> None:
    """Each document has a name, and each label a value, that Kubernetes takes."""
    part = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    for document in helm.render(values).documents:
        metadata = document["metadata"]
        assert re.fullmatch(rf"{part}(\.{part})*", metadata["name"])
        for label in metadata["labels"].values():
            assert re.fullmatch(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?", label)


@_every
def test_pods_are_modest(helm: Helm, values: Values) -> None:
    """A pod has no token, no variables of services, no namespace of the host, and a group for its volumes."""
    for pod in helm.render(values).pods:
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert not {"hostPID", "hostIPC", "hostNetwork"} & pod.keys()
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 10000
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


@_every
def test_sidecar_needs_no_directory_of_the_node(helm: Helm, values: Values) -> None:
    """Pods of mode sidecar fit Pod Security "restricted", unless the user names a directory of the node."""
    rendered = helm.render(values)
    if values.get("mode") == "daemonset" or values.get("disk", {}).get("kind") == "hostPath":
        return

    assert "hostPath" not in json.dumps(rendered.documents)
    assert all(
        container["name"] not in _ROOT_MAY
        for pod in rendered.pods
        for container in containers_of(pod)
    )


@_every
def test_every_container_has_its_limits(helm: Helm, values: Values) -> None:
    """Memory is requested and limited to the same number, and CPU is requested."""
    for pod in helm.render(values).pods:
        for container in containers_of(pod):
            resources = container["resources"]
            assert resources["requests"]["memory"] == resources["limits"]["memory"]
            assert resources["requests"]["cpu"]


@_every
def test_memory_includes_the_pools(helm: Helm, values: Values) -> None:
    """The container's limit is all pools and what processes need; the daemon is told of the pools."""
    rendered = helm.render(values)
    if not rendered.pods or values.get("engine", {}).get("enabled") is False:
        return
    pools = {"deviceMiB": 8192, "hostMiB": 0, "overheadMiB": 1024, **values.get("pools", {})}

    in_pools = pools["hostMiB"] + (0 if "device" in pools else pools["deviceMiB"])
    limit = rendered.daemon["resources"]["limits"]["memory"]
    assert limit == f"{in_pools + pools['overheadMiB']}Mi"
    assert rendered.environment["KVLEASED_MEMORY_BYTES_MAX"] == str(in_pools << 20)
    assert rendered.environment["KVLEASED_DEVICE_BYTES_DEFAULT"] == str(pools["deviceMiB"] << 20)


@_every
def test_daemon_has_its_probes(helm: Helm, values: Values) -> None:
    """Each probe asks its own path, by port or else by a command; a sidecar that gates no engine has only liveness."""
    rendered = helm.render(values)
    if not rendered.pods:
        return
    has_port = values.get("metrics", {}).get("enabled", True)
    has_api = "tls" in values
    paths = {"startup": "startupz", "liveness": "livez", "readiness": "readyz"}
    if values.get("mode") != "daemonset" and not values.get("probes", {}).get("gateEngine"):
        paths = {"liveness": "livez"}

    assert {name for name in rendered.daemon if name.endswith("Probe")} == {
        f"{probe}Probe" for probe in paths
    }
    for probe, path in paths.items():
        asked = rendered.daemon[f"{probe}Probe"]
        if has_port:
            assert asked["httpGet"] == {"path": f"/{path}", "port": "kvlease-metrics"}
        else:
            assert asked["exec"] == {"command": ["kvleased", "probe", path]}
    assert ("KVLEASED_PROBE_HOST" in rendered.environment) is has_port
    assert ("ports" in rendered.daemon) is (has_port or has_api)


@_every
def test_names_and_selectors_agree(helm: Helm, values: Values) -> None:
    """Names are short enough, and selectors match the rendered pods by labels that never change."""
    rendered = helm.render(values)
    labels = [
        document["spec"]["template"]["metadata"]["labels"]
        for kind in ("Deployment", "DaemonSet")
        for document in rendered.of_kind(kind)
    ]
    selectors = [found for document in rendered.documents for found in _selectors(document)]

    assert all(len(document["metadata"]["name"]) <= 63 for document in rendered.documents)
    assert all(document["metadata"]["namespace"] == "inference" for document in rendered.documents)
    for selector in selectors:
        assert sorted(selector) == ["app.kubernetes.io/instance", "app.kubernetes.io/name"]
        assert all(selector.items() <= found.items() for found in labels)


@_every
def test_mounts_have_their_volumes(helm: Helm, values: Values) -> None:
    """Every volume is mounted, and every mount has a volume."""
    for pod in helm.render(values).pods:
        mounted = {
            mount["name"] for container in containers_of(pod) for mount in container["volumeMounts"]
        }

        assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize(
    ("source", "pattern", "copies"),
    [("prometheus", "*rules*.yaml", "rules"), ("grafana", "*.json", "dashboards")],
)
def test_chart_carries_what_is_deployed(source: str, pattern: str, copies: str) -> None:
    """The chart's rules and boards equal those of deploy/, from which `make chart-files` copies them."""
    wanted = {path.name: path.read_text() for path in (ROOT / "deploy" / source).glob(pattern)}
    found = {
        path.name: path.read_text()
        for path in (CHART / "files" / copies).glob("*.*")
        if path.name != ".gitkeep"
    }

    assert found == wanted


@_every
def test_daemon_takes_what_is_rendered(
    helm: Helm, values: Values, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon accepts the settings in its container's environment."""
    rendered = helm.render(values)
    if not rendered.pods or values.get("engine", {}).get("enabled") is False:
        return
    for name, value in rendered.environment.items():
        if name.startswith("KVLEASED_"):
            monkeypatch.setenv(name, value)

    load([])


def test_readme_lists_every_value(helm: Helm) -> None:
    """The README's table has each value with its default, and no others."""
    (values,) = helm.load_yaml((CHART / "values.yaml").read_text())
    rows = dict(
        re.findall(
            r"^\| `([\w.]+)` \| `([^`]*)` \|", (CHART / "README.md").read_text(), re.MULTILINE
        )
    )

    assert rows == {name: json.dumps(value) for name, value in _flat(values)}


def test_notes_say_what_was_made(helm: Helm) -> None:
    """The notes name the memory, and values that do not work together."""
    rendered = helm.render(
        {
            "mode": "daemonset",
            "pools": {"hostMiB": 64},
            "remote": {"url": "redis://r:6379"},
            "tls": {"existingSecret": "t"},
        }
    )

    assert "9280 MiB" in rendered.notes
    assert "networkPolicy.egress" in rendered.notes
    assert "networkPolicy.apiFrom" in rendered.notes
    assert "sharedSecret" in rendered.notes
    assert "of pools.hostMiB, remote it uses nothing otherwise" in rendered.notes
    assert f"{8192 << 20}, {64 << 20} and 0 bytes" in rendered.notes


@pytest.mark.parametrize(
    ("values", "says"),
    [
        pytest.param(
            {"podMonitor": {"enabled": True}, "networkPolicy": {"metricsFrom": []}},
            "Prometheus in\nnetworkPolicy.metricsFrom",
            id="monitor",
        ),
        pytest.param(
            {"networkPolicy": {"engineFrom": []}}, "networkPolicy.engineFrom", id="engine"
        ),
        pytest.param(
            {"mode": "daemonset", "settings": {"trace_endpoint": "http://collector:4318"}},
            "not its settings.trace_endpoint either",
            id="spans",
        ),
    ],
)
def test_notes_say_whom_the_policy_keeps_out(helm: Helm, values: Values, says: str) -> None:
    """The notes tell whom the policy keeps out if the chart makes one, and not if a user's chart makes the pod."""
    library = {"mode": "sidecar", "engine": {"enabled": False}}

    assert says in helm.render(values).notes
    assert "network policy" not in helm.render(values | library).notes


@_every
def test_notes_speak_of_a_test_that_there_is(helm: Helm, values: Values) -> None:
    """The notes mention `helm test` exactly when there is a test pod."""
    rendered = helm.render(values)

    assert ("helm test rel" in rendered.notes) is bool(rendered.of_kind("Pod"))


def test_test_pod_runs_where_a_daemon_does(helm: Helm) -> None:
    """The test pod is bound to the same nodes as the daemons."""
    node = COMBINATIONS["placed"]["affinity"]

    rendered = helm.render({"mode": "daemonset", "affinity": {**node, "podAntiAffinity": {}}})

    assert rendered.one("Pod")["spec"]["affinity"] == node


def test_own_schemas_find_mistakes(helm: Helm) -> None:
    """The small schemas of custom kinds find mistakes."""
    rendered = helm.render({"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}})

    for kind in CUSTOM_KINDS:
        document = rendered.one(kind)
        assert mistake_in(document) == ""
        assert mistake_in({**document, "spec": {**document["spec"], "selectr": {}}})
        assert mistake_in({**document, "spec": {}})


def _selectors(document: Document) -> list[dict[str, str]]:
    spec = document.get("spec", {})
    if document["kind"] == "Service":
        return [spec["selector"]]
    found = spec.get("podSelector") or spec.get("selector")
    return [found["matchLabels"]] if found else []


def _flat(values: dict[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        inner = (
            isinstance(value, dict) and value and name not in {"startup", "liveness", "readiness"}
        )
        found += _flat(value, f"{above}{name}.") if inner else [(f"{above}{name}", value)]
    return found
