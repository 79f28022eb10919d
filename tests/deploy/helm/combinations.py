"""Own the combinations of values with which the chart is rendered, and those that it must refuse."""

from typing import Any, Final

from kvleased.config.settings import Settings

Values = dict[str, Any]
_ENGINE_OFF: Final[Values] = {"engine": {"enabled": False}}
_DAEMONSET: Final[Values] = {"mode": "daemonset"}
_DISK: Final[Values] = {"pools": {"hostMiB": 512, "diskMiB": 1024}}
_HOST: Final[Values] = {"pools": {"hostMiB": 64}}
_TLS: Final[Values] = {"tls": {"existingSecret": "kvlease-tls"}}
_TENANTS_MAX: Final = Settings.model_fields["max_tenants"].default
_DIGEST: Final = "sha256:" + "0123456789abcdef" * 4


def _group(name: str) -> Values:
    """Return a group of one rule."""
    return {"name": name, "rules": [{"record": "kvlease:up", "expr": "up"}]}


COMBINATIONS: Final[dict[str, Values]] = {
    "defaults": {},
    "daemonset": _DAEMONSET,
    "library": _ENGINE_OFF,
    "names": {"nameOverride": "cache", "fullnameOverride": "a" * 63},
    "name over": {"nameOverride": "cache"},
    "digests": {"image": {"digest": _DIGEST}, "engine": {"image": {"digest": _DIGEST}}},
    "pull secrets": {"imagePullSecrets": [{"name": "registry"}], "image": {"pullPolicy": "Always"}},
    "pod words": {"podLabels": {"team": "x"}, "podAnnotations": {"note": "true"}, "serviceAccountName": "s"},
    "daemonset words": {**_DAEMONSET, "podLabels": {"team": "x"}, "podAnnotations": {"note": "1"},
                        "imagePullSecrets": [{"name": "registry"}], "priorityClassName": "system-node-critical"},
    "placed": {"nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}],
               "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                   {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}}},
    "daemonset placed": {**_DAEMONSET, "nodeSelector": {"disk": "ssd"}, "tolerations": [{"operator": "Exists"}]},
    "another user": {"securityContext": {"runAsUser": 20001, "runAsGroup": 20002}},
    "daemonset another user": {**_DAEMONSET, "securityContext": {"runAsUser": 20001, "runAsGroup": 20002}},
    "one process namespace": {"shareProcessNamespace": True},
    "small": {"pools": {"deviceMiB": 64, "overheadMiB": 256}, "resources": {"cpuRequest": "250m", "cpuLimit": "2"}},
    "huge": {"pools": {"deviceMiB": 1 << 20, "hostMiB": 1 << 21, "overheadMiB": 8192}},
    "host": {"pools": {"hostMiB": 4096}},
    "host on tmpfs": {"pools": {"hostMiB": 4096, "hostOutlivesContainer": True}},
    "no host to outlive": {"pools": {"hostMiB": 0, "hostOutlivesContainer": True}},
    "disk": _DISK,
    "disk of a claim": {**_DISK, "disk": {"kind": "persistentVolumeClaim", "claimName": "nvme"}},
    "disk of the node": {**_DISK, "disk": {"kind": "hostPath", "path": "/mnt/nvme/kvlease"}},
    "daemonset, disk of the node": {**_DAEMONSET, **_DISK, "disk": {"kind": "hostPath", "path": "/mnt/nvme"}},
    "daemonset, all tiers": {**_DAEMONSET, "remote": {"url": "redis://redis:6379"},
                             "sharedSecret": {"existingSecret": "s"},
                             "pools": {"hostMiB": 64, "hostOutlivesContainer": True, "diskMiB": 64}},
    "remote": {**_HOST, "remote": {"url": "rediss://redis:6379/1", "capacityMiB": 4096}},
    "remote with an authority of its own": {**_HOST, "remote": {
        "url": "rediss://redis:6379?ssl_ca_certs=/etc/kvlease/remote/ca.crt", "filesSecret": "redis-tls"}},
    "remote of a secret with files": {**_HOST, "remote": {"existingSecret": "redis", "filesSecret": "redis-tls"}},
    "remote of a secret": {**_HOST, "remote": {"existingSecret": "redis", "key": "address"}},
    "shared secret": {"sharedSecret": {"existingSecret": "s", "key": "bytes"}},
    "tenants": {"tenants": {"chat": {"min_percent": 40, "weight": 3}, 'a "b" <c>': {"max_percent": 50.5}}},
    "settings": {"settings": {"lease_seconds": 60.5, "max_leases": 1048576, "serve_grpc": False, "log_level": "debug"}},
    "large numbers": {"settings": {"populate_chunk_bytes": 1 << 40}},
    "no ports but the daemon's": {**_DAEMONSET, "engine": {"port": 7072}},
    "ports of the API that nobody has": {"settings": {"listen_tcp": False}, "engine": {"port": 7070}},
    "port of REST left to chance": {"settings": {"http_port": 0, "grpc_port": 0}},
    "no port of metrics": {"metrics": {"enabled": False}, "engine": {"port": 7072}},
    "one address of metrics": {"metrics": {"host": "10.0.0.7"}},
    "no TCP": {"settings": {"listen_tcp": False, "serve_grpc": False}, "metrics": {"enabled": False}},
    "no metrics": {"metrics": {"enabled": False}},
    "daemonset without metrics": {**_DAEMONSET, "metrics": {"enabled": False}},
    "other ports": {"metrics": {"port": 9100}, "engine": {"port": 8080}},
    "patient probes": {"probes": {"startup": {"failureThreshold": 900, "initialDelaySeconds": 5}}},
    "device plugin": {"gpu": {"kind": "devicePlugin", "count": 2}},
    "MIG": {"gpu": {"kind": "devicePlugin", "resourceName": "nvidia.com/mig-3g.40gb"}},
    "claim": {"gpu": {"kind": "dra", "count": 2}},
    "claim of v1beta2": {"gpu": {"kind": "dra", "dra": {"apiVersion": "resource.k8s.io/v1beta2"}}},
    "claim of v1beta1": {"gpu": {"kind": "dra", "dra": {"apiVersion": "resource.k8s.io/v1beta1"}}},
    "runtime class": {"gpu": {"kind": "runtimeClass", "visibleDevices": "0,1"}},
    "pools on a GPU": {**_DAEMONSET, "gpu": {"kind": "runtimeClass"}, "pools": {"device": "cuda:0", "hostMiB": 4096}},
    "daemonset with a runtime class": {**_DAEMONSET, "gpu": {"kind": "runtimeClass", "runtimeClassName": "nvidia-cdi"}},
    "owned": {"engine": {"connector": "owned", "kvCacheMiB": 8192}},
    "shared": {"engine": {"connector": "shared", "kvCacheMiB": 4096, "connectorConfig": {"magazine_blocks": 64}}},
    "engine's words": {"engine": {"args": ["--max-model-len=8192", "--served-model-name=it's"], "replicas": 3,
                       "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
                       "models": {"kind": "persistentVolumeClaim", "claimName": "models"}}},
    "more for the connector": {
        "pools": {"deviceMiB": 65536, "hostMiB": 65536},
        "engine": {"connectorConfig": {"host_bytes": 1 << 36, "tenant": "chat", "verify": False}}},
    "other shares for the connector": {
        "engine": {"connectorConfig": {"pool_bytes": 1 << 32, "host_bytes": 1 << 32}}},
    "no service": {"engine": {"service": {"enabled": False}}},
    "budget": {"engine": {"podDisruptionBudget": {"enabled": True}}},
    "no policy": {"networkPolicy": {"enabled": False}},
    "closed policy": {"networkPolicy": {"metricsFrom": [], "engineFrom": []}},
    "daemonset with a closed policy": {**_DAEMONSET, "networkPolicy": {"metricsFrom": []}},
    "policy of blocks": {**_DAEMONSET, "networkPolicy": {"egress": [
        {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 6379, "protocol": "TCP"}]}]}},
    "monitored": {"podMonitor": {"enabled": True, "labels": {"release": "p"}}, "prometheusRule": {"enabled": True},
                  "dashboards": {"enabled": True}},
    "daemonset monitored": {**_DAEMONSET, "podMonitor": {"enabled": True}, "prometheusRule": {
        "enabled": True, "labels": {"release": "p"}}, "dashboards": {"enabled": True, "folder": "LLM"}},
    "monitored by another name": {
        "fullnameOverride": "kv", "podMonitor": {"enabled": True},
        "prometheusRule": {"enabled": True, "runbookUrlPrefix": "https://example.com/kvlease/"}},
    "rules of one's own": {"prometheusRule": {"enabled": True, "groups": [_group("mine"), _group("ours")]}},
    "blocks of addresses with holes": {"networkPolicy": {"metricsFrom": [
        {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]}},
    "policy of names and ranges": {"networkPolicy": {
        "engineFrom": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}]}}],
        "egress": [{"ports": [{"port": "dns", "protocol": "UDP"}, {"port": 6379, "endPort": 6400}]}]}},
    "tolerations of all kinds": {"tolerations": [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "present", "effect": "NoSchedule"},
        {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}]},
    "a large cache on a GPU": {"gpu": {"kind": "devicePlugin"}, "engine": {"kvCacheMiB": 65536}},
    "memory for a cache of vLLM's own": {"engine": {"kvCacheMiB": 15359}},
    "as many tenants as may have limits": {
        "tenants": {f"tenant-{number}": {"weight": 2} for number in range(_TENANTS_MAX)}},
    "minima of all": {"tenants": {"chat": {"min_percent": 60}, "batch": {"min_percent": 40}}},
    "short leases": {"settings": {"lease_seconds": 5, "heartbeat_seconds": 2.5}},
    "a user of the store": {**_HOST, "remote": {"url": "redis://u@x:6379"}},
    "own path": {**_DAEMONSET, "daemonset": {
        "hostPath": "/var/run/kv", "prepareHostPath": False, "maxUnavailable": "10%"}},
    "no tests": {"tests": {"enabled": False}},
    "TLS": _TLS,
    "TLS with clients' certificates": {
        "tls": {"existingSecret": "t", "certKey": "cert.pem", "keyKey": "key.pem", "clientCaKey": "ca.crt"},
        "settings": {"http_port": 7443, "serve_grpc": False}, "metrics": {"enabled": False},
        "networkPolicy": {"apiFrom": [{"podSelector": {"matchLabels": {"role": "operator"}}}]}},
    "daemonset with TLS and tokens": {
        **_DAEMONSET, **_TLS, "tokens": {"operatorSecret": "o", "joinerSecret": "j", "readerSecret": "r"},
        "networkPolicy": {"apiFrom": [{"podSelector": {}}], "metricsFrom": []}},
    "a token": {"tokens": {"readerSecret": "reader", "key": "bytes"}},
    "engine that waits": {"probes": {"gateEngine": True}},
    "liveness of one's own": {"probes": {"liveness": {"initialDelaySeconds": 30}}},
    "surge": {"engine": {"replicas": 4, "maxSurge": "25%", "maxUnavailable": 0, "progressDeadlineSeconds": 7200}},
    "addresses of one family": {**_DAEMONSET, "tls": {"existingSecret": "t", "host": "fd00::7"}, "metrics": {
        "host": "0.0.0.0"}},  # noqa: S104 - what a user may name
    "loopback that is not served": {"metrics": {"enabled": False, "host": "127.0.0.1"}, "engine": {"port": 7072}},
    "bytes with a unit": {
        "tenants": {"chat": {"min_bytes": "1.5 GiB", "max_bytes": "8GiB"}, "batch": {"max_bytes": 1 << 34}},
        "settings": {"key_counts_bytes_max": "64MiB"}},
    "the ends of ranges": {"settings": {
        "drain_seconds": 0, "control_silent_seconds_max": 0, "http_port": 65535, "max_copies_a_batch": 4096},
        "terminationGracePeriodSeconds": 5, "tenants": {"a": {"min_percent": 0, "max_percent": 0}},
        "resources": {"cpuRequest": "1500m", "cpuLimit": "1.5"},
        "podMonitor": {"enabled": True, "interval": "1m", "scrapeTimeout": "60s"}},
    "labels beside ours": {"podLabels": {"app.kubernetes.io/part-of": "x"}},
    "a dotted name without a service": {**_DAEMONSET, "fullnameOverride": "x.y"},
    "large numbers of Kubernetes": {
        "securityContext": {"runAsUser": 1000700000, "runAsGroup": 1000700000}, "engine": {
            "progressDeadlineSeconds": 2000000, "tmpMiB": 1 << 20, "shmMiB": 1 << 20,
            "resources": {"memoryMiB": 1 << 21}, "models": {"capacityMiB": 1 << 21}}},
    "daemonset with large numbers": {
        **_DAEMONSET, "securityContext": {"runAsUser": 1000700000, "runAsGroup": 1000700000}},
    "names that look like numbers": {
        **_DAEMONSET, **_HOST, "nameOverride": "123", "fullnameOverride": "1e3", "serviceAccountName": "7",
        "priorityClassName": "0x1", "remote": {"existingSecret": "1", "key": "0755"}, "sharedSecret": {
            "existingSecret": "1e3", "key": "null"}, "tls": {"existingSecret": "2"}, "tokens": {
            "readerSecret": "007", "key": "123"}, "podMonitor": {"enabled": True}, "dashboards": {"enabled": True}},
    "claims that look like numbers": {
        **_DISK, "disk": {"kind": "persistentVolumeClaim", "claimName": "1e3"},
        "engine": {"models": {"kind": "persistentVolumeClaim", "claimName": "123"}}},
    "names that are cut": {**_DAEMONSET, "nameOverride": "a" * 70, "fullnameOverride": "a" * 48 + "--b"},
    "names that are cut at a dot": {**_DAEMONSET, "nameOverride": "a" * 62 + ".b", "fullnameOverride": "a" * 49 + ".b"},
    "paths with signs": {**_DAEMONSET, **_DISK, "daemonset": {"hostPath": "/run/a, b: c #d"}, "disk": {
        "kind": "hostPath", "path": "/mnt/{a}, b"}},
    "words with signs": {"engine": {"model": "/models/x: y # z", "connectorConfig": {"tenant": "it's"}}},
    "variables of the chart's own": {
        "gpu": {"kind": "runtimeClass"}, "engine": {"env": [
            {"name": "HF_HOME", "value": "/models/hf"}, {"name": "NVIDIA_VISIBLE_DEVICES", "value": "0"},
            {"name": "KVLEASE_ADDRESS", "value": "/run/kvlease/kvlease/kvlease.sock"}]}},
    "the default runtime": {"gpu": {"kind": "runtimeClass", "runtimeClassName": ""}},
    "minima as large as the pool": {"tenants": {
        "chat": {"min_bytes": "4GiB"}, "batch": {"min_percent": 49.9}, "rest": {"min_percent": 0.1, "min_bytes": 1}}},
    "minima on a GPU": {
        **_DAEMONSET, "gpu": {"kind": "runtimeClass"}, "pools": {"device": "cuda:0"},
        "tenants": {"chat": {"min_bytes": "64GiB"}}},
    "a registry with a port": {"image": {"repository": "registry.example.com:5000/team/kvlease"}},
    "a store without a port": {**_HOST, "remote": {"url": "redis://[fd00::9999]"}},
    "the last port of a store": {**_HOST, "remote": {"url": "redis://[::1]:65535?db=70000"}},
    "affinities of all kinds": {"affinity": {
        "nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {
            "matchExpressions": [{"key": "nvidia.com/gpu.memory", "operator": "Gt", "values": ["40000"]}],
            "matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node"]}]}}]},
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{
                "topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": {"team": "x"}}}],
            "preferredDuringSchedulingIgnoredDuringExecution": [
                {"weight": 100, "podAffinityTerm": {"topologyKey": "topology.kubernetes.io/zone"}}]}}},
    "blocks of addresses with holes of all kinds": {"networkPolicy": {
        "metricsFrom": [{"ipBlock": {"cidr": "192.168.0.0/16", "except": ["192.168.255.0/24", "192.168.0.1/32"]}}],
        "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0", "except": ["169.254.169.254/32"]}},
                           {"ipBlock": {"cidr": "::/0", "except": ["fd00::/8"]}}], "ports": [
            {"port": 443, "endPort": 443}]}]}},
    "variables of all kinds": {"engine": {"env": [
        {"name": "A", "value": ""},
        {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['team']"}}},
        {"name": "C", "valueFrom": {"resourceFieldRef": {"resource": "limits.memory", "divisor": "1Mi"}}},
        {"name": "D", "valueFrom": {"configMapKeyRef": {"name": "x", "key": ".y", "optional": True}}}]}},
    "the longest names": {
        **_HOST, "serviceAccountName": "a" * 253, "remote": {"existingSecret": "a" * 253},
        "podLabels": {"a" * 253 + "/" + "b" * 63: "c" * 63}},
    "limits of CPUs": {
        "pools": {"hostMiB": 64, "hostOutlivesContainer": True}, "resources": {"cpuLimit": "2"},
        "engine": {"resources": {"cpuLimit": "4"}}},
    "daemonset with limits of CPUs": {
        **_DAEMONSET, "sharedSecret": {"existingSecret": "s"}, "resources": {"cpuRequest": "0.1", "cpuLimit": "0.1"}},
    "closed sidecar": {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]}},
}  # fmt: skip

REFUSED: Final[dict[str, tuple[Values, str]]] = {
    "unknown key": ({"replicas": 2}, "replicas"),
    "unknown key below": ({"pools": {"gpuMiB": 1}}, "gpuMiB"),
    "unknown setting": ({"settings": {"lease_secs": 1}}, "lease_secs"),
    "a setting that the chart makes": ({"settings": {"runtime_dir": "/x"}}, "runtime_dir"),
    "unknown key of a tenant": ({"tenants": {"chat": {"min": 1}}}, "min"),
    "wrong mode": ({"mode": "statefulset"}, "/mode"),
    "wrong connector": ({"engine": {"connector": "copy"}}, "/engine/connector"),
    "pools on no device": ({"pools": {"device": "gpu"}}, "/pools/device"),
    "pools on a GPU that is not seen": ({"pools": {"device": "cuda:0"}}, "use runtimeClass, or dra in mode sidecar"),
    "pools on a GPU under vLLM": (
        {"pools": {"device": "cuda:0"}, "gpu": {"kind": "dra"}}, "set engine.enabled to false"),
    "wrong kind of GPU": ({"gpu": {"kind": "mps"}}, "/gpu/kind"),
    "text for a number": ({"pools": {"deviceMiB": "8Gi"}}, "/pools/deviceMiB"),
    "negative pool": ({"pools": {"hostMiB": -1}}, "/pools/hostMiB"),
    "root": ({"securityContext": {"runAsUser": 0}}, "/securityContext/runAsUser"),
    "privileged port": ({"metrics": {"port": 80}}, "/metrics/port"),
    "relative path": ({"daemonset": {"hostPath": "run"}}, "/daemonset/hostPath"),
    "no digest": ({"image": {"digest": "latest"}}, "/image/digest"),
    "unknown store": ({"remote": {"url": "http://x"}}, "/remote/url"),
    "owned on a GPU": ({"gpu": {"kind": "dra"}, "engine": {"connector": "owned"}}, "CPU memory"),
    "cache above its pool": (
        {"engine": {"connector": "shared", "kvCacheMiB": 9000}}, "(9000) must be at most pools.deviceMiB (8192)"),
    "daemonset that takes GPUs": ({**_DAEMONSET, "gpu": {"kind": "devicePlugin"}}, "take GPUs away"),
    "daemonset that claims GPUs": ({**_DAEMONSET, "gpu": {"kind": "dra"}}, "that no engine shares"),
    "tiers without a user": (
        {**_DISK, "engine": {"connector": "owned"}}, "pools.hostMiB, pools.diskMiB would be reserved"),
    "host pool without a user": ({**_HOST, "engine": {"connector": "shared"}}, "no tier below its pool"),
    "disk without a way": ({"pools": {"diskMiB": 1024}}, "pools.diskMiB needs pools.hostMiB"),
    "remote store without a way": ({**_DAEMONSET, "remote": {"url": "redis://x"}}, "remote needs pools.hostMiB"),
    "certificate without TCP": (
        {**_TLS, "settings": {"listen_tcp": False}}, "tls.existingSecret is for callers over TCP"),
    "token without TCP": (
        {"tokens": {"readerSecret": "r"}, "settings": {"listen_tcp": False}}, "tokens is for callers over TCP"),
    "one token for two roles": (
        {"tokens": {"joinerSecret": "k", "operatorSecret": "o", "readerSecret": "k"}},
        "tokens.joinerSecret and tokens.readerSecret are both k"),
    "authority without TLS": ({"tls": {"clientCaKey": "ca.crt"}}, "tls.existingSecret is empty"),
    "unknown key of TLS": ({"tls": {"secret": "x"}}, "secret"),
    "port of REST twice": (
        {**_TLS, "engine": {"port": 7070}}, "engine.port and settings.http_port are both 7070"),
    "port of REST twice, on loopback": (
        {"engine": {"port": 7070}}, "engine.port and settings.http_port are both 7070"),
    "port of gRPC twice, on loopback": (
        {"engine": {"port": 7071}}, "engine.port and settings.grpc_port are both 7071"),
    "port of metrics twice, on loopback": (
        {"metrics": {"port": 7070}}, "metrics.port and settings.http_port are both 7070"),
    "port of a daemonset twice": (
        {**_DAEMONSET, "settings": {"http_port": 7072}}, "metrics.port and settings.http_port are both 7072"),
    "port of REST and gRPC": (
        {"settings": {"grpc_port": 7070}}, "settings.http_port and settings.grpc_port are both 7070"),
    "port of REST left to chance": ({**_TLS, "settings": {"http_port": 0}}, "settings.http_port is 0"),
    "port of REST that needs a capability": (
        {**_TLS, "settings": {"http_port": 443}}, "settings.http_port is 443, and ports below 1024 need a capability"),
    "more for the connector than the pools have": (
        {"engine": {"connectorConfig": {"host_bytes": 1 << 36}}},
        "asks for pools of 77309411328 bytes, pool_bytes and host_bytes together, but"),
    "more in the host pool than its tmpfs has": (
        {"pools": {"hostMiB": 1024, "hostOutlivesContainer": True},
         "engine": {"connectorConfig": {"pool_bytes": 1 << 30, "host_bytes": 1 << 31}}}, "a tmpfs of pools.hostMiB"),
    "a store among the sockets": (
        {**_DAEMONSET, "pools": {"hostMiB": 64, "diskMiB": 64}, "disk": {"kind": "hostPath", "path": "/var/lib/x/"},
         "daemonset": {"hostPath": "/var/lib//x"}}, "a directory of its own"),
    "more disk for the connector than there is": (
        {"pools": {"hostMiB": 1024, "diskMiB": 1024}, "engine": {"connectorConfig": {"disk_bytes": 1 << 31}}},
        "disk_bytes of 2147483648, but pools.diskMiB is 1073741824 bytes"),
    "remote bytes for the connector without a remote store": (
        {"pools": {"hostMiB": 1024}, "engine": {"connectorConfig": {"remote_bytes": 1 << 30}}},
        "remote_bytes of 1073741824, but there is no remote store"),
    "a store for the connector without a host pool": (
        {"pools": {"hostMiB": 1024, "diskMiB": 1024}, "engine": {"connectorConfig": {"host_bytes": 0}}},
        "host_bytes 0 beside a disk or remote store"),
    "no way to upgrade": ({"engine": {"maxSurge": 0, "maxUnavailable": "0%"}}, "both 0"),
    "impatient upgrade": ({"engine": {"progressDeadlineSeconds": 600}}, "(600) must be more than 1800"),
    "monitor of nothing": ({"podMonitor": {"enabled": True}, "metrics": {"enabled": False}}, "metrics.enabled"),
    "claim without a name": ({**_DISK, "disk": {"kind": "persistentVolumeClaim"}}, "disk.claimName"),
    "path without a name": ({**_DISK, "disk": {"kind": "hostPath"}}, "disk.path"),
    "one claim for all nodes": (
        {**_DAEMONSET, **_DISK, "disk": {"kind": "persistentVolumeClaim", "claimName": "x"}}, "several nodes"),
    "one claim for all replicas": (
        {**_DISK, "disk": {"kind": "persistentVolumeClaim", "claimName": "x"}, "engine": {"replicas": 2}},
        "needs its own store"),
    "one directory for all replicas": (
        {**_DISK, "disk": {"kind": "hostPath", "path": "/data/kv"}, "engine": {"replicas": 3}},
        "disk.path names one directory of a node, and engine.replicas is 3"),
    "one directory for an upgrade": (
        {**_DISK, "disk": {"kind": "hostPath", "path": "/data/kv"}, "engine": {"maxSurge": 1}},
        "set engine.maxSurge to 0"),
    "one claim for an upgrade": (
        {**_DISK, "disk": {"kind": "persistentVolumeClaim", "claimName": "x"}, "engine": {"maxSurge": "25%"}},
        "engine.maxSurge is 25%"),
    "a file that grows": ({"settings": {"trace_file": "/tmp/spans"}}, "trace_file"),
    "models without a claim": ({"engine": {"models": {"kind": "persistentVolumeClaim"}}}, "engine.models.claimName"),
    "two addresses": ({**_HOST, "remote": {"url": "redis://x", "existingSecret": "y"}}, "set only one of them"),
    "no memory beside /dev/shm": ({"engine": {"shmMiB": 16384}}, "engine.shmMiB (16384)"),
    "no memory beside vLLM's cache": (
        {"engine": {"kvCacheMiB": 15360}}, "engine.kvCacheMiB (15360) and engine.shmMiB (1024) together must be less"),
    "one port twice": ({"engine": {"port": 7072}}, "both 7072"),
    "drain longer than the pod": ({"settings": {"drain_seconds": 60}}, "terminationGracePeriodSeconds (60)"),
    "minima above all": (
        {"tenants": {"chat": {"min_percent": 60}, "batch": {"min_percent": 60}}}, "add up to 120"),
    "least bytes above the pool": (
        {"tenants": {"chat": {"min_bytes": "8GiB"}, "batch": {"min_bytes": 1}}},
        "8589934593 bytes, but pools.deviceMiB (8192) is 8589934592 bytes"),
    "least bytes and percents above the pool": (
        {"tenants": {"chat": {"min_bytes": "5GiB"}, "batch": {"min_percent": 50}}}, "raise pools.deviceMiB"),
    "user that is none": ({"securityContext": {"runAsUser": 1 << 31}}, "/securityContext/runAsUser"),
    "name of two dots": ({"fullnameOverride": "a..b"}, "/fullnameOverride"),
    "secret of two dots": ({"tls": {"existingSecret": "a.-b"}}, "/tls/existingSecret"),
    "key that no secret has": ({"tokens": {"readerSecret": "r", "key": "a/b"}}, "/tokens/key"),
    "label that is none": ({"podLabels": {"team": "a b"}}, "/podLabels/team"),
    "name of a label that is none": ({"podLabels": {"a b": "c"}}, "a b"),
    "node's label that is none": ({"nodeSelector": {"disk": "a b"}}, "/nodeSelector/disk"),
    "image with two tags": ({"image": {"repository": "kvlease:0.1"}}, "/image/repository"),
    "tag that is none": ({"image": {"tag": "-x"}}, "/image/tag"),
    "label of pods that is there": (
        {"podLabels": {"app.kubernetes.io/component": "x"}}, "podLabels has app.kubernetes.io/component, which the"),
    "label of the monitor that is there": (
        {"podMonitor": {"enabled": True, "labels": {"helm.sh/chart": "x"}}}, "podMonitor.labels has helm.sh/chart"),
    "label of rules that is there": (
        {"prometheusRule": {"enabled": True, "labels": {"app.kubernetes.io/name": "x"}}}, "prometheusRule.labels has"),
    "label of boards that is there": (
        {"dashboards": {"enabled": True, "label": "app.kubernetes.io/name"}}, "dashboards.label has app.kubernetes.io"),
    "variable that is there twice": (
        {"engine": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}}, "engine.env has A twice"),
    "variable of two values": (
        {"engine": {"env": [{"name": "A", "value": "1", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]}},
        "A has a value and a valueFrom"),
    "selector of a word that there is not": (
        {"networkPolicy": {"engineFrom": [{"podSelector": {"matchLabel": {"a": "b"}}}]}}, "'matchLabel' not allowed"),
    "port of a word that there is not": (
        {"networkPolicy": {"egress": [{"ports": [{"prt": 53}]}]}}, "/networkPolicy/egress/0/ports/0"),
    "affinity of a word that there is not": ({"affinity": {"nodeAffinty": {}}}, "'nodeAffinty' not allowed"),
    "toleration of no kind": ({"tolerations": [{"operator": "Exist"}]}, "/tolerations/0/operator"),
    "variable from nowhere": ({"engine": {"env": [{"name": "A", "valueFrom": {}}]}}, "/engine/env/0/valueFrom"),
    "block of no addresses": (
        {"networkPolicy": {"metricsFrom": [{"ipBlock": {}}]}}, "/networkPolicy/metricsFrom/0/ipBlock"),
    "block of too long a prefix": (
        {"networkPolicy": {"metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/99"}}]}},
        "/networkPolicy/metricsFrom/0/ipBlock/cidr"),
    "block of too long a prefix, outwards": (
        {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "fd00::/129"}}]}]}},
        "/networkPolicy/egress/0/to/0/ipBlock/cidr"),
    "exception of no addresses": (
        {"networkPolicy": {"apiFrom": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.300.0.0/16"]}}]}},
        "/networkPolicy/apiFrom/0/ipBlock/except/0"),
    "block of addresses with pods": (
        {"networkPolicy": {"metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "podSelector": {}}]}},
        "/networkPolicy/metricsFrom/0"),
    "block of addresses with pods, outwards": (
        {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}, "namespaceSelector": {}}]}]}},
        "/networkPolicy/egress/0/to/0"),
    "port of the store that is none": ({**_HOST, "remote": {"url": "redis://x:65536/0"}}, "remote.url has port 65536"),
    "port of the engine by its words": ({"engine": {"args": ["--port=9000"]}}, "set engine.port instead"),
    "port of the engine by two words": ({"engine": {"args": ["--port", "9000"]}}, "set engine.port instead"),
    "cache of the engine by its words": (
        {"engine": {"args": ["--kv_cache_memory_bytes=1"]}}, "set engine.kvCacheMiB instead"),
    "connector of the engine by its words": (
        {"engine": {"args": ["--kv-transfer-config", "{}"]}}, "set engine.connectorConfig instead"),
    "no way to upgrade, written long": ({"engine": {"maxSurge": 0, "maxUnavailable": "00%"}}, "/engine/maxUnavailable"),
    "lease shorter than two heartbeats": ({"settings": {"lease_seconds": 5}}, "lease_seconds (5)"),
    "ticks too far apart": ({"settings": {"tick_seconds": 31}}, "tick_seconds (31)"),
    "heartbeats too far apart": ({"settings": {"heartbeat_seconds": 20}}, "heartbeat_seconds (20)"),
    "files of a store without a secret": (
        {**_HOST, "remote": {"url": "rediss://x?ssl_ca_certs=/ca.crt"}}, "in remote.filesSecret"),
    "files of a store elsewhere": (
        {**_HOST, "remote": {"url": "rediss://x?db=1&ssl_keyfile=/etc/../k", "filesSecret": "t"}},
        "/etc/kvlease/remote/KEY"),
    "files of no store": ({"remote": {"filesSecret": "t"}}, "set remote.url or remote.existingSecret"),
    "misspelt setting of the connector": ({"engine": {"connectorConfig": {"host_byte": 1}}}, "/engine/connectorConfig"),
    "setting of the connector out of range": (
        {"engine": {"connectorConfig": {"deadline_ms": 0}}}, "/engine/connectorConfig/deadline_ms"),
    "store of a socket": ({**_HOST, "remote": {"url": "unix:///run/redis.sock"}}, "over TCP"),
    "one process namespace of nobody": ({**_DAEMONSET, "shareProcessNamespace": True}, "leave it false"),
    "password in the clear": ({**_HOST, "remote": {"url": "redis://u:secret@x"}}, "remote.existingSecret"),
    "password without a user": ({**_HOST, "remote": {"url": "rediss://:secret@x:6379/1"}}, "remote.existingSecret"),
    "runbooks nowhere": ({"prometheusRule": {"runbookUrlPrefix": "docs"}}, "runbookUrlPrefix"),
    "no rules": ({"prometheusRule": {"enabled": True, "groups": [{"name": "x"}]}}, "rules"),
    "a group of rules that is there": (
        {"prometheusRule": {"enabled": True, "groups": [_group("kvlease.alerts")]}},
        "prometheusRule.groups has kvlease.alerts, which is also the name of a group that the chart carries"),
    "a group of rules twice": (
        {"prometheusRule": {"enabled": True, "groups": [_group("a"), _group("a")]}}, "the name of another of them"),
    "a rule without an expression": (
        {"prometheusRule": {"enabled": True, "groups": [{"name": "a", "rules": [{"alert": "A"}]}]}}, "'expr'"),
    "a rule of neither kind": (
        {"prometheusRule": {"enabled": True, "groups": [{"name": "a", "rules": [{"expr": "1"}]}]}},
        "/prometheusRule/groups/0/rules/0"),
    "probes where no kubelet comes": ({"metrics": {"host": "127.0.0.1"}}, "metrics.host is 127.0.0.1, where"),
    "probes at loopback, written out": ({"metrics": {"host": "0:0:0:0:0:0:0:1"}}, "set it to ::, or set metrics"),
    "probes at loopback, mapped": ({"metrics": {"host": "::ffff:127.0.0.1"}}, "set it to ::, or set metrics"),
    "no address of probes": ({"metrics": {"host": "nonsense host"}}, "/metrics/host"),
    "no address of TLS": ({"tls": {"host": "example.com"}}, "/tls/host"),
    "TLS for nobody": ({"tls": {"existingSecret": "t", "host": "::1"}}, "tls.host is ::1, which cannot be reached"),
    "a mover without time": ({"settings": {"mover_seconds_max": 0}}, "/settings/mover_seconds_max"),
    "leases without time": ({"settings": {"lease_seconds": 0}}, "/settings/lease_seconds"),
    "no heartbeat": ({"settings": {"heartbeat_seconds": 0}}, "/settings/heartbeat_seconds"),
    "no time for the store": ({"settings": {"remote_ms_max": 0}}, "/settings/remote_ms_max"),
    "no connections": ({"settings": {"max_connections": 0}}, "/settings/max_connections"),
    "chunks of a byte": ({"settings": {"populate_chunk_bytes": 1}}, "/settings/populate_chunk_bytes"),
    "a tick a day and more": ({"settings": {"tick_seconds": 90000}}, "/settings/tick_seconds"),
    "port that is none": ({"settings": {"http_port": 65536}}, "/settings/http_port"),
    "silence between beats": ({"settings": {"control_silent_seconds_max": 1}}, "/settings/control_silent_seconds_max"),
    "spans to a file": ({"settings": {"trace_endpoint": "file:///tmp/x"}}, "/settings/trace_endpoint"),
    "a tenant of the metrics": ({"tenants": {"(x": {}}}, "names that begin with ( are reserved for metrics"),
    "a tenant without a name": ({"tenants": {"": {}}}, "at least one character"),
    "a tenant of two lines": ({"tenants": {"a\nb": {}}}, "all of them printable"),
    "a tenant with a long name": ({"tenants": {"a" * 129: {}}}, "maxLength: got 129, want 128"),
    "least above most": (
        {"tenants": {"a": {"min_percent": 50, "max_percent": 10}}}, "(50) must be at most its max_percent (10)"),
    "least bytes above most": (
        {"tenants": {"a": {"min_bytes": "8GiB", "max_bytes": 1 << 30}}}, "(8GiB) must be at most its max_bytes"),
    "bytes of no unit": ({"tenants": {"a": {"max_bytes": "8Gx"}}}, "/tenants/a/max_bytes"),
    "bytes of half a unit": ({"tenants": {"a": {"max_bytes": "8Gi"}}}, "write for example 8GiB"),
    "part of a byte": ({"tenants": {"a": {"max_bytes": "1.0001KB"}}}, '"1.0001KB" is not a whole number of bytes'),
    "more bytes than can be said": (
        {"tenants": {"a": {"max_bytes": "8192TiB"}}}, '"8192TiB" is more than 9007199254740991'),
    "more tenants than may have limits": (
        {"tenants": {"a": {"weight": 2}, "b": {"weight": 3}}, "settings": {"max_tenants": 1}},
        "settings.max_tenants (1) must be at least the 2 tenants of tenants"),
    "more tenants than have limits by default": (
        {"tenants": {f"tenant-{number}": {"weight": 2} for number in range(_TENANTS_MAX + 1)}},
        "settings.max_tenants (256) must be at least the 257 tenants of tenants"),
    "label that finds pods": (
        {"podLabels": {"app.kubernetes.io/name": "other"}}, "podLabels has app.kubernetes.io/name, which the chart"),
    "name of no service": ({"fullnameOverride": "x.y"}, "x.y would be the name of a Service"),
    "name that begins with a digit": ({"fullnameOverride": "1demo"}, "set fullnameOverride"),
    "monitor that is passed over": (
        {"podMonitor": {"enabled": True, "interval": "5s", "scrapeTimeout": "10s"}},
        "podMonitor.scrapeTimeout (10s) must be at most podMonitor.interval (5s)"),
    "request above its limit": (
        {"resources": {"cpuLimit": "100m", "cpuRequest": "1"}}, "resources.cpuRequest (1) must be at most"),
    "engine's request above its limit": (
        {"engine": {"resources": {"cpuLimit": "1"}}}, "engine.resources.cpuRequest (2) must be at most"),
    "path that is the root": ({**_DAEMONSET, "daemonset": {"hostPath": "/./"}}, "(/./) is the root of the node"),
    "path that goes up": ({**_DAEMONSET, "daemonset": {"hostPath": "/run/x/../y"}}, "(/run/x/../y) contains .."),
    "disk that goes up": (
        {**_DISK, "disk": {"kind": "hostPath", "path": "/run/.."}, "engine": {"maxSurge": 0}}, "(/run/..) contains .."),
    "toleration of any value and one": (
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]}, "operator Exists, which takes any value"),
    "toleration of no key": ({"tolerations": [{"value": "b"}]}, "tolerations[0] has no key, which only"),
    "toleration for a time of what drives out nobody": (
        {"tolerations": [{"operator": "Exists"}, {"operator": "Exists", "tolerationSeconds": 9}]},
        "tolerations[1] has tolerationSeconds, which only effect NoExecute may have"),
    "toleration above no number": (
        {"tolerations": [{"key": "a", "operator": "Gt", "value": "b"}]}, "operator Gt, which compares whole numbers"),
    "key of a toleration that is none": ({"tolerations": [{"key": "a b", "operator": "Exists"}]}, "/tolerations/0/key"),
    "value of a toleration that is none": ({"tolerations": [{"key": "a", "value": "a b"}]}, "/tolerations/0/value"),
    "affinity for no nodes": (
        {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}},
        "nodeSelectorTerms"),
    "affinity in no place": (
        {"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"labelSelector": {}}]}}},
        "missing property 'topologyKey'"),
    "affinity of no weight": (
        {"affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 0, "podAffinityTerm": {"topologyKey": "a"}}]}}}, "weight': minimum: got 0, want 1"),
    "affinity of a misspelt kind": (
        {"affinity": {"podAffinity": {"requiredDuringScheduling": []}}}, "'requiredDuringScheduling' not allowed"),
    "expression without values": (
        {"networkPolicy": {"engineFrom": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]}},
        "missing property 'values'"),
    "expression with values for nothing": (
        {"networkPolicy": {"engineFrom": [{"podSelector": {"matchExpressions": [
            {"key": "a", "operator": "Exists", "values": ["b"]}]}}]}}, "values': maxItems: got 1, want 0"),
    "label of peers that is none": (
        {"networkPolicy": {"apiFrom": [{"podSelector": {"matchLabels": {"a": "b c"}}}]}}, "matchLabels/a"),
    "ports that end before they begin": (
        {"networkPolicy": {"egress": [{"ports": [{"port": 6400, "endPort": 6379}]}]}},
        "egress[0] has endPort 6379, which is below its port 6400"),
    "ports from a name on": (
        {"networkPolicy": {"egress": [{"ports": [{"port": "dns", "endPort": 53}]}]}}, "beside port dns, which is"),
    "ports from nowhere on": (
        {"networkPolicy": {"egress": [{"ports": [{"endPort": 53}]}]}}, "'port' required, if 'endPort' exists"),
    "exception elsewhere": (
        {"networkPolicy": {"metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]}},
        "networkPolicy.metricsFrom has a block 10.0.0.0/8 except 11.0.0.0/16, which is no smaller part of it"),
    "block with a colon too few": (
        {"networkPolicy": {"apiFrom": [{"ipBlock": {"cidr": "fd00:/8"}}]}}, "/networkPolicy/apiFrom/0/ipBlock/cidr"),
    "block with colons too many": (
        {"networkPolicy": {"apiFrom": [{"ipBlock": {"cidr": "fd00::1::/64"}}]}}, "apiFrom/0/ipBlock/cidr"),
    "secret of a registry twice": ({"imagePullSecrets": [{"name": "a"}, {"name": "a"}]}, "/imagePullSecrets"),
    "exception of everything": (
        {"networkPolicy": {"egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.0.0.0/8"]}}]}]}},
        "networkPolicy.egress[0].to has a block 10.0.0.0/8 except 10.0.0.0/8"),
    "exception of another family": (
        {"networkPolicy": {"apiFrom": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["fd00::/16"]}}]}}, "fd00::/16"),
    "variable with an equals sign": ({"engine": {"env": [{"name": "A=B"}]}}, "/engine/env/0/name"),
    "variable of half a secret": (
        {"engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"key": "a"}}}]}}, "missing property 'name'"),
    "variable of a field that there is not": (
        {"engine": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]}}, "fieldRef/fieldPath"),
    "hardly a CPU": ({"resources": {"cpuRequest": "10m", "cpuLimit": "50m"}}, "(50m) must be at least 100m"),
    "less than a thousandth of a CPU": ({"resources": {"cpuRequest": "0.0005"}}, "/resources/cpuRequest"),
    "secret with a long name": ({"tls": {"existingSecret": "a" * 254}}, "/tls/existingSecret': maxLength"),
    "account with a long name": ({"serviceAccountName": "a" * 254}, "/serviceAccountName': maxLength"),
    "name of a label with a long prefix": ({"podLabels": {"a" * 254 + "/b": "c"}}, "invalid propertyName"),
    "secret of a registry that is none": ({"imagePullSecrets": [{"name": "a b"}]}, "/imagePullSecrets/0/name"),
    "key that goes up": ({"tokens": {"readerSecret": "r", "key": ".."}}, "/tokens/key"),
    "resource that is none": ({"gpu": {"kind": "devicePlugin", "resourceName": "a..b/c"}}, "/gpu/resourceName"),
    "more pods than can be counted": ({"engine": {"maxSurge": 1 << 31}}, "/engine/maxSurge"),
    "misspelt word of a group": (
        {"prometheusRule": {"enabled": True, "groups": [{**_group("a"), "intervall": "1m"}]}}, "'intervall' not"),
    "rule for no time": (
        {"prometheusRule": {"enabled": True, "groups": [
            {"name": "a", "rules": [{"alert": "A", "expr": "1", "for": "soon"}]}]}}, "/rules/0/for"),
}  # fmt: skip
