"""Laws of single values of the chart: modes, connectors, GPUs, settings, policies."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvlease.integrations.vllm.settings import ConnectorSettings
from kvleased.access import tokens
from kvleased.access.roles import Role
from kvleased.config.sources import load, unknown_variables
from tests.deploy.helm.combinations import COMBINATIONS
from tests.deploy.tools import ROOT, Document, Helm, containers_of

pytestmark = pytest.mark.deploy


def test_default_daemon_is_a_native_sidecar(helm: Helm) -> None:
    """A native sidecar starts before the engine and ends after it, and the engine finds its socket and pool."""
    (pod,) = (
        pod
        for pod in helm.render({}).pods
        if len(pod["containers"]) == 1 and "initContainers" in pod
    )

    (daemon,), (engine,) = pod["initContainers"], pod["containers"]
    assert daemon["restartPolicy"] == "Always"
    config = _transfer_config(engine)
    assert config["kv_connector_module_path"] == "kvlease.integrations.vllm"
    assert config["kv_connector"] == "KVLeaseOffloadingConnector"
    assert config["kv_connector_extra_config"] == {
        "socket": "/run/kvlease/kvlease/kvlease.sock",
        "pool_bytes": 8192 << 20,
    }
    assert {"name": "kvlease-run", "mountPath": "/run/kvlease"} in engine["volumeMounts"]


def test_engine_asks_for_every_tier_that_is_paid_for(helm: Helm) -> None:
    """The connector gets the bytes of each tier below its pool, unless the user sets others."""
    values = {
        "pools": {"deviceMiB": 65536, "hostMiB": 32768, "diskMiB": 204800},
        "remote": {"existingSecret": "r"},
        "engine": {"connectorConfig": {"disk_bytes": 1 << 30}},
    }

    (engine,) = helm.render(values).one("Deployment")["spec"]["template"]["spec"]["containers"]

    extra = _transfer_config(engine)["kv_connector_extra_config"]
    assert extra == {
        "socket": "/run/kvlease/kvlease/kvlease.sock",
        "pool_bytes": 65536 << 20,
        "host_bytes": 32768 << 20,
        "disk_bytes": 1 << 30,
        "remote_bytes": 1 << 40,
    }
    # The connector must know each of these names.
    ConnectorSettings.read(extra)


def test_words_of_the_engine_arrive(helm: Helm) -> None:
    """Characters special to YAML arrive unchanged, and the user's variables replace the chart's."""
    (words,) = _engines(helm, "words with signs")
    (variables,) = _engines(helm, "variables of the chart's own")

    assert "--model=/models/x: y # z" in words["args"]
    assert _transfer_config(words)["kv_connector_extra_config"]["tenant"] == "it's"
    assert {one["name"]: one["value"] for one in variables["env"]} == {
        "HOME": "/tmp",
        "HF_HOME": "/models/hf",
        "KVLEASE_ADDRESS": "/run/kvlease/kvlease/kvlease.sock",
        "NVIDIA_VISIBLE_DEVICES": "0",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }


def test_daemon_gates_no_engine_unless_told_to(helm: Helm) -> None:
    """By default no probe of the sidecar delays an engine, and liveness allows a start as long as a start probe."""
    default, gated = helm.render({}).daemon, helm.render({"probes": {"gateEngine": True}}).daemon

    assert "startupProbe" not in default
    assert "readinessProbe" not in default
    assert default["livenessProbe"]["initialDelaySeconds"] == 300
    assert "startupProbe" in gated
    assert "readinessProbe" in gated
    assert "initialDelaySeconds" not in gated["livenessProbe"]


def test_probes_are_served_to_both_families(helm: Helm) -> None:
    """Probes listen on IPv4 and IPv6, unless the user names one of them."""
    default, one = helm.render({}), helm.render(COMBINATIONS["one address of metrics"])

    assert default.environment["KVLEASED_PROBE_HOST"] == "::"
    assert one.environment["KVLEASED_PROBE_HOST"] == "10.0.0.7"


def test_upgrade_needs_no_second_gpu(helm: Helm) -> None:
    """On an upgrade a pod ends before the next starts, which gets longer to become ready than vLLM may take."""
    spec = helm.render({}).one("Deployment")["spec"]

    (engine,) = spec["template"]["spec"]["containers"]
    probe = engine["startupProbe"]
    assert spec["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert spec["progressDeadlineSeconds"] > probe["periodSeconds"] * probe["failureThreshold"]


def test_disk_of_the_node_is_asked_for(helm: Helm) -> None:
    """Pods request the disk space that their emptyDirs may take, and every emptyDir has a limit."""
    rendered = helm.render({"pools": {"hostMiB": 64, "diskMiB": 204800}})

    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    asked = sum(
        int(container["resources"]["requests"].get("ephemeral-storage", "0Mi").removesuffix("Mi"))
        for container in containers_of(pod)
    )
    on_disk = [
        int(volume["emptyDir"]["sizeLimit"].removesuffix("Mi"))
        for volume in pod["volumes"]
        if "emptyDir" in volume and volume["emptyDir"].get("medium") != "Memory"
    ]
    assert asked == sum(on_disk) == 64 + 204800 + 64 + 10240 + 51200


def test_certificate_and_tokens_come_from_secrets(
    helm: Helm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Secrets are mounted as whole directories for owner and group; the daemon accepts their modes and renewals."""
    rendered = helm.render(COMBINATIONS["daemonset with TLS and tokens"])
    spec = rendered.one("DaemonSet")["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["name"]: mount for mount in rendered.daemon["volumeMounts"]}

    assert volumes["kvlease-tls"]["secret"] == {"secretName": "kvlease-tls", "defaultMode": 0o440}
    assert volumes["kvlease-tokens"]["projected"]["defaultMode"] == 0o440
    for name in ("kvlease-tls", "kvlease-tokens"):
        assert mounts[name]["readOnly"] is True
        assert "subPath" not in mounts[name]
    assert [port["containerPort"] for port in rendered.daemon["ports"]] == [7072, 7070, 7071]
    (rule,) = rendered.one("NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in rule["ports"]] == [7070, 7071]

    for name, value in rendered.environment.items():
        if name.startswith("KVLEASED_"):
            monkeypatch.setenv(name, value)
    settings = load([])
    assert settings.tcp_host == "::", "IPv4 too, and clusters of IPv6 alone"
    assert str(settings.tls_key_file) == "/etc/kvlease/tls/tls.key"
    paths = {
        role: tmp_path / path.relative_to("/etc/kvlease/tokens")
        for role, path in settings.token_paths.items()
    }
    sources = volumes["kvlease-tokens"]["projected"]["sources"]
    items = [source["secret"]["items"][0]["path"] for source in sources]
    assert sorted(items) == sorted(path.name for path in paths.values())
    _mount(tmp_path, "..1", items)
    keyring = tokens.load(paths)
    _mount(tmp_path, "..2", items)
    renewed = tokens.load(paths)
    assert keyring.role_of(f"..1-operator.token-{'x' * 16}") is Role.OPERATOR
    assert renewed.role_of(f"..2-operator.token-{'x' * 16}") is Role.OPERATOR


def test_egress_of_a_sidecar_is_closed_where_it_is_named(helm: Helm) -> None:
    """A pod with an engine may connect anywhere, to load models, unless the user names what it may reach."""
    default = helm.render({}).one("NetworkPolicy")["spec"]
    closed = helm.render(COMBINATIONS["closed sidecar"]).one("NetworkPolicy")["spec"]

    assert default["policyTypes"] == ["Ingress"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert closed["egress"] == [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]


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
    """With DRA both containers have one claim, and neither asks the device plugin."""
    rendered = helm.render({"gpu": {"kind": "dra", "count": 2}})

    pod = rendered.one("Deployment")["spec"]["template"]["spec"]
    claims = [container["resources"]["claims"] for container in containers_of(pod)]
    template = rendered.one("ResourceClaimTemplate")
    assert claims == [[{"name": "kvlease-gpu"}]] * 2
    assert pod["resourceClaims"] == [
        {"name": "kvlease-gpu", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    assert "nvidia.com/gpu" not in json.dumps(rendered.documents)


def test_other_claims_have_another_template(helm: Helm) -> None:
    """An upgrade changes no template of claims, as Kubernetes refuses that; a newer version of the API is no change."""

    def name(count: int, api_version: str = "resource.k8s.io/v1") -> str:
        gpu = {"kind": "dra", "count": count, "dra": {"apiVersion": api_version}}
        template = helm.render({"gpu": gpu}).one("ResourceClaimTemplate")
        return str(template["metadata"]["name"])

    assert name(1) != name(2)
    assert name(1) == name(1, "resource.k8s.io/v1beta1")


def test_device_plugin_gives_to_the_engine_alone(helm: Helm) -> None:
    """Only the engine asks the device plugin, because two containers that ask would get two devices."""
    rendered = helm.render({"gpu": {"kind": "devicePlugin", "count": 2}})

    (engine,) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert "nvidia.com/gpu" not in rendered.daemon["resources"]["limits"]


def test_pools_on_a_gpu_are_no_memory_of_the_container(helm: Helm) -> None:
    """The daemon is told of the GPU, and its container's memory covers only what lies on the host."""
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
    """With a runtime class the node's daemon sees all GPUs and claims none."""
    rendered = helm.render({"mode": "daemonset", "gpu": {"kind": "runtimeClass"}})

    assert rendered.environment["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert rendered.one("DaemonSet")["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
    assert "limits: {nvidia" not in "".join(rendered.texts.values())


def test_settings_become_environment(helm: Helm) -> None:
    """Settings become environment variables with names and numbers that the daemon reads."""
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
    for variable, value in helm.render(COMBINATIONS[name]).environment.items():
        monkeypatch.setenv(variable, value)

    load([])

    assert not unknown_variables()


def test_directories_are_made_private(helm: Helm) -> None:
    """The daemon's directories are made private before it starts, because it accepts no others."""
    rendered = helm.render(COMBINATIONS["daemonset, all tiers"])

    made = rendered.one("DaemonSet")["spec"]["template"]["spec"]["initContainers"][1]["args"][0]
    for variable in ("KVLEASED_HOST_DIR", "KVLEASED_DISK_DIR"):
        assert rendered.environment[variable] in made.splitlines()[0]
    assert made.startswith("install -d -m 0700 ")
    assert made.splitlines()[1].endswith(f" {rendered.environment['KVLEASED_SECRET_FILE']}")


def test_policy_of_daemonset_closes_all_but_metrics(helm: Helm) -> None:
    """The policy of a daemonset allows no egress, and ingress only to the metrics port."""
    policy = helm.render({"mode": "daemonset"}).one("NetworkPolicy")["spec"]

    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == []
    assert [rule["ports"] for rule in policy["ingress"]] == [[{"port": 7072, "protocol": "TCP"}]]


def test_rules_keep_their_own_templates(helm: Helm) -> None:
    """Helm leaves the templates that Prometheus fills in alone."""
    rule = helm.render({"prometheusRule": {"enabled": True}}).one("PrometheusRule")

    assert "{{ $labels.instance }}" in json.dumps(rule)


def _engines(helm: Helm, name: str) -> list[Document]:
    """Return the containers of a combination's engine."""
    found: list[Document] = helm.render(COMBINATIONS[name]).one("Deployment")["spec"]["template"][
        "spec"
    ]["containers"]
    return found


def _transfer_config(engine: Document) -> dict[str, Any]:
    """Return vLLM's configuration of its connector."""
    (argument,) = (word for word in engine["args"] if word.startswith("--kv-transfer-config="))
    config: dict[str, Any] = json.loads(argument.partition("=")[2])
    return config


def _mount(directory: Path, version: str, names: Sequence[str]) -> None:
    """Lay out files as a kubelet mounts a secret: links through a link that a rename redirects."""
    (directory / version).mkdir()
    for name in names:
        (directory / version / name).write_text(f"{version}-{name}-{'x' * 16}\n")
        (directory / version / name).chmod(0o440)
        if not (directory / name).is_symlink():
            (directory / name).symlink_to(f"..data/{name}")
    (directory / "..data_tmp").symlink_to(version)
    (directory / "..data_tmp").rename(directory / "..data")
