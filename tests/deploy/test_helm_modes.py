"""Laws of what single values of the chart are for: modes, connectors, GPUs, settings, policies."""

import json

import pytest

from tests.deploy.helm.combinations import COMBINATIONS
from tests.deploy.tools import ROOT, Helm, containers_of

pytestmark = pytest.mark.deploy


def test_default_daemon_is_a_native_sidecar(helm: Helm) -> None:
    """It starts before the engine and ends after it; the engine finds its socket and its pool."""
    (pod,) = (
        pod
        for pod in helm.render({}).pods
        if len(pod["containers"]) == 1 and "initContainers" in pod
    )

    (daemon,), (engine,) = pod["initContainers"], pod["containers"]
    assert daemon["restartPolicy"] == "Always"
    (argument,) = (word for word in engine["args"] if word.startswith("--kv-transfer-config="))
    config = json.loads(argument.partition("=")[2])
    assert config["kv_connector_module_path"] == "kvlease.integrations.vllm"
    assert config["kv_connector"] == "KVLeaseOffloadingConnector"
    assert config["kv_connector_extra_config"] == {
        "socket": "/run/kvlease/kvlease/kvlease.sock",
        "pool_bytes": 8192 << 20,
    }
    assert {"name": "kvlease-run", "mountPath": "/run/kvlease"} in engine["volumeMounts"]


@pytest.mark.parametrize(
    ("connector", "name"),
    [
        ("offload", "KVLeaseOffloadingConnector"),
        ("owned", "KVLeaseOwnedConnector"),
        ("shared", "KVLeaseSharedConnector"),
    ],
)
def test_connectors_exist(helm: Helm, connector: str, name: str) -> None:
    """Each mode names a connector that the integration exports."""
    package = (ROOT / "client" / "kvlease" / "integrations" / "vllm" / "__init__.py").read_text()

    rendered = helm.render({"engine": {"connector": connector}})

    assert f'"kv_connector":"{name}"' in "".join(rendered.texts.values())
    assert name in package


def test_claim_is_shared(helm: Helm) -> None:
    """With DRA both containers have one claim, and nobody asks the device plugin."""
    rendered = helm.render({"gpu": {"kind": "dra", "count": 2}})

    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    claims = [container["resources"]["claims"] for container in containers_of(pod)]
    template = rendered.one("ResourceClaimTemplate")
    assert claims == [[{"name": "kvlease-gpu"}]] * 2
    assert pod["resourceClaims"] == [
        {"name": "kvlease-gpu", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    assert "nvidia.com/gpu" not in json.dumps(rendered.documents)


def test_device_plugin_gives_to_the_engine_alone(helm: Helm) -> None:
    """Two containers that ask get two devices, so the daemon does not ask."""
    rendered = helm.render({"gpu": {"kind": "devicePlugin", "count": 2}})

    (engine,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in rendered.daemon["resources"]["limits"]


def test_pools_on_a_gpu_are_no_memory_of_the_container(helm: Helm) -> None:
    """The daemon is told of the GPU, and its container's memory is what lies on the host."""
    values = {
        "mode": "daemonset",
        "gpu": {"kind": "runtimeClass"},
        "pools": {"device": "cuda:1", "deviceMiB": 65536, "hostMiB": 4096},
    }

    rendered = helm.render(values)

    assert rendered.environment["KVLEASED_DEVICE"] == "cuda:1"
    assert rendered.environment["KVLEASED_DEVICE_BYTES_DEFAULT"] == str(65536 << 20)
    assert rendered.environment["KVLEASED_MEMORY_BYTES_MAX"] == str(4096 << 20)
    assert rendered.daemon["resources"]["limits"]["memory"] == "5120Mi"


def test_runtime_class_claims_nothing(helm: Helm) -> None:
    """A daemon of the node sees its GPUs and takes none away."""
    rendered = helm.render({"mode": "daemonset", "gpu": {"kind": "runtimeClass"}})

    assert rendered.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert rendered.one("DaemonSet")["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert "limits: {nvidia" not in "".join(rendered.texts.values())


def test_settings_become_environment(helm: Helm) -> None:
    """Names and numbers arrive as the daemon reads them."""
    values = {
        "settings": {"lease_seconds": 60.5, "populate_chunk_bytes": 1 << 40, "serve_grpc": False},
        "tenants": {"chat": {"min_percent": 40}},
    }

    found = helm.render(values).environment

    assert found["KVLEASED_LEASE_SECONDS"] == "60.5"
    assert found["KVLEASED_POPULATE_CHUNK_BYTES"] == str(1 << 40)
    assert found["KVLEASED_SERVE_GRPC"] == "false"
    assert json.loads(found["KVLEASED_TENANTS"]) == {"chat": {"min_percent": 40}}


@pytest.mark.parametrize(
    "name", ["tenants", "settings", "daemonset, all tiers", "large numbers", "no TCP"]
)
def test_daemon_takes_its_environment(
    helm: Helm, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's own settings accept what the chart tells it."""
    from kvleased.sources import load, unknown_variables  # noqa: PLC0415 - after the environment

    for variable, value in helm.render(COMBINATIONS[name]).environment.items():
        monkeypatch.setenv(variable, value)

    load([])

    assert not unknown_variables()


def test_directories_are_made_private(helm: Helm) -> None:
    """The daemon takes only directories of its own; they are made before it starts."""
    rendered = helm.render(COMBINATIONS["daemonset, all tiers"])

    made = rendered.one("DaemonSet")["spec"]["template"]["spec"]["initContainers"][1]["args"][0]
    for variable in ("KVLEASED_HOST_DIR", "KVLEASED_DISK_DIR"):
        assert rendered.environment[variable] in made.splitlines()[0]
    assert made.startswith("install -d -m 0700 ")
    assert made.splitlines()[1].endswith(f" {rendered.environment['KVLEASED_SECRET_FILE']}")


def test_policy_of_daemonset_closes_all_but_metrics(helm: Helm) -> None:
    """Nothing goes out; only the port of metrics lets in."""
    policy = helm.render({"mode": "daemonset"}).one("NetworkPolicy")["spec"]

    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": 7072, "protocol": "TCP"}]]


def test_rules_keep_their_own_templates(helm: Helm) -> None:
    """What Prometheus is to fill in is not touched by Helm."""
    rule = helm.render({"prometheusRule": {"enabled": True}}).one("PrometheusRule")

    assert "{{ $labels.instance }}" in json.dumps(rule)
