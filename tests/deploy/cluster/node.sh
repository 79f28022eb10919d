#!/usr/bin/env bash
# Be the first process of a node's own namespaces of processes, mounts and network: node.sh FOLDER. All that it starts, mounts
# and connects ends with it, and it ends with its standard input. CGROUP is the node's own, ADDRESS its address.
set -euo pipefail
folder=$1
cd "$folder"

# Nothing that is written at fixed places, and no setting of the kernel that kubelet changes, is the machine's.
mkdir -p /var/lib/cni
for place in /run /var/log /var/lib/cni; do mount -t tmpfs -o mode=755 node "$place"; done
while read -r name value; do
    echo "$value" >"sysctl-$name"
    mount --bind "sysctl-$name" "/proc/sys/${name//.//}"
done <<END
vm.overcommit_memory 1
vm.panic_on_oom 0
kernel.panic 10
kernel.panic_on_oops 1
kernel.keys.root_maxkeys 1000000
kernel.keys.root_maxbytes 25000000
END

ip link set lo up
ip link add cni0 type bridge
ip address add "$ADDRESS/24" dev cni0
ip link set cni0 up

start() {
    local name=$1
    shift
    "$@" >"log/$name" 2>&1 </dev/null &
}
kubeconfig=--kubeconfig=$folder/kubeconfig
start containerd containerd --config containerd.toml
start etcd etcd --data-dir etcd --unsafe-no-fsync
start apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=127.0.0.1 --advertise-address="$ADDRESS" \
    --cert-dir=certificates --token-auth-file=tokens.csv --authorization-mode=RBAC --allow-privileged=true \
    --kubelet-preferred-address-types=InternalIP --service-cluster-ip-range=10.96.0.0/16 \
    --service-account-issuer=https://kubernetes.default.svc --service-account-key-file=accounts.key \
    --service-account-signing-key-file=accounts.key
for _ in $(seq 600); do
    kubectl "$kubeconfig" get --raw /readyz >/dev/null 2>&1 && break
    sleep 0.1
done
start controllers kube-controller-manager "$kubeconfig" --leader-elect=false --root-ca-file=certificates/apiserver.crt \
    --service-account-private-key-file=accounts.key
start scheduler kube-scheduler "$kubeconfig" --leader-elect=false
endpoint=unix://$folder/containerd.sock
# Secrets and the sizes of volumes are looked at every few seconds instead of each minute.
start kubelet kubelet "$kubeconfig" --root-dir="$folder/kubelet" --cert-dir="$folder/kubelet-certificates" \
    --volume-plugin-dir="$folder/plugins" --hostname-override=node --node-ip="$ADDRESS" --container-runtime=remote \
    --container-runtime-endpoint="$endpoint" --image-service-endpoint="$endpoint" --cgroup-driver=cgroupfs \
    --cgroup-root="$CGROUP" --fail-swap-on=false --eviction-hard= --sync-frequency=5s --volume-stats-agg-period=2s
cat >/dev/null
