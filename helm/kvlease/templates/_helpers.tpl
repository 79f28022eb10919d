{{/* Names, labels, and numbers that are computed. */}}

{{/* A name that was cut, without the - or . at which it may have been. */}}
{{- define "kvlease.ended" -}}
{{- regexReplaceAll "[-.]+$" . "" -}}
{{- end -}}

{{/* A name of at most 50 characters: of a longer one the beginning, with a hash that tells it from others alike. */}}
{{- define "kvlease.cut" -}}
{{- if gt (len .) 50 -}}
{{- printf "%s-%s" (trunc 41 . | include "kvlease.ended") (sha256sum . | trunc 8) -}}
{{- else -}}
{{- include "kvlease.ended" . -}}
{{- end -}}
{{- end -}}

{{- define "kvlease.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | include "kvlease.ended" -}}
{{- end -}}

{{- define "kvlease.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | include "kvlease.cut" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | include "kvlease.cut" -}}
{{- end -}}
{{- end -}}

{{- define "kvlease.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvlease.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "kvlease.labels" -}}
{{ include "kvlease.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: {{ ternary "sidecar" "daemon" (eq .Values.mode "sidecar") }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An image by digest or by tag: (dict "image" … "default" …). */}}
{{- define "kvlease.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .default }}
{{- end -}}
{{- end -}}

{{- define "kvlease.daemonImage" -}}
{{- include "kvlease.image" (dict "image" .Values.image "default" .Chart.AppVersion) -}}
{{- end -}}

{{/* Whether there is a network policy: it is for pods that the chart makes. */}}
{{- define "kvlease.hasPolicy" -}}
{{- if and .Values.networkPolicy.enabled (or (ne .Values.mode "sidecar") .Values.engine.enabled) }}true{{ end -}}
{{- end -}}

{{/* Whether there is a pod for helm test: it asks a daemon of a node, or the service. */}}
{{- define "kvlease.hasTest" -}}
{{- if and .Values.tests.enabled (or (ne .Values.mode "sidecar") (and .Values.engine.enabled .Values.engine.service.enabled)) }}true{{ end -}}
{{- end -}}

{{/* The memory of all pools together, MiB. */}}
{{- define "kvlease.poolsMiB" -}}
{{- add (eq .Values.pools.device "cpu" | ternary .Values.pools.deviceMiB 0) .Values.pools.hostMiB -}}
{{- end -}}

{{/* The memory of the daemon's container, MiB: memory of tmpfs counts, too. */}}
{{- define "kvlease.memoryMiB" -}}
{{- add (include "kvlease.poolsMiB" .) .Values.pools.overheadMiB -}}
{{- end -}}

{{/* Of a container that only helps: (dict "Values" … "cpu" … "mebibytes" …). A quota of CPU limits wants one of each container. */}}
{{- define "kvlease.helperResources" -}}
requests: {cpu: {{ .cpu }}, memory: {{ .mebibytes }}Mi}
limits: {{ "{" }}{{ with .Values.resources.cpuLimit }}cpu: {{ . | quote }}, {{ end }}memory: {{ .mebibytes }}Mi}
{{- end -}}

{{- define "kvlease.bytes" -}}
{{- mul . 1048576 -}}
{{- end -}}

{{- define "kvlease.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.securityContext.runAsUser }}
runAsGroup: {{ int64 .Values.securityContext.runAsGroup }}
fsGroup: {{ int64 .Values.securityContext.runAsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvlease.securityContext" -}}
allowPrivilegeEscalation: false
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: {{ int64 .Values.securityContext.runAsUser }}
runAsGroup: {{ int64 .Values.securityContext.runAsGroup }}
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* What the daemon keeps in directories of its own, which must be private: "host", "disk", "secret". */}}
{{- define "kvlease.hasHostDir" -}}
{{- if and .Values.pools.hostOutlivesContainer (gt (int .Values.pools.hostMiB) 0) }}true{{ end -}}
{{- end -}}
{{- define "kvlease.hasDisk" -}}
{{- if gt (int .Values.pools.diskMiB) 0 }}true{{ end -}}
{{- end -}}

{{- define "kvlease.hasRemote" -}}
{{- if or .Values.remote.url .Values.remote.existingSecret }}true{{ end -}}
{{- end -}}
{{/* The tiers that are asked for below the device pool, by their values. */}}
{{- define "kvlease.lowerTiers" -}}
{{- $asked := list -}}
{{- if gt (int .Values.pools.hostMiB) 0 }}{{ $asked = append $asked "pools.hostMiB" }}{{ end -}}
{{- if include "kvlease.hasDisk" . }}{{ $asked = append $asked "pools.diskMiB" }}{{ end -}}
{{- if include "kvlease.hasRemote" . }}{{ $asked = append $asked "remote" }}{{ end -}}
{{- join ", " $asked -}}
{{- end -}}

{{/* A template of claims cannot be changed: one for other claims has another name. Versions of the API say the same in other words. */}}
{{- define "kvlease.claimName" -}}
{{- printf "%s-gpu-%s" (include "kvlease.fullname" .) (printf "%s %d" .Values.gpu.dra.deviceClassName (int64 .Values.gpu.count) | sha256sum | trunc 8) -}}
{{- end -}}

{{/* The roles whose tokens are secrets, each with its secret, as lines "operator: name". */}}
{{- define "kvlease.tokenSecrets" -}}
{{- range $role := list "operator" "joiner" "reader" -}}
{{- with get $.Values.tokens (printf "%sSecret" $role) }}
{{ $role }}: {{ . | quote }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- define "kvlease.listensTcp" -}}
{{- if ne (toString (get .Values.settings "listen_tcp")) "false" }}true{{ end -}}
{{- end -}}
{{/* The ports of REST and, where it is served, gRPC: a list, as JSON. */}}
{{- define "kvlease.apiPorts" -}}
{{- $settings := merge (dict) .Values.settings (dict "http_port" 7070 "grpc_port" 7071) -}}
{{- $ports := list (dict "name" "kvlease-rest" "value" "settings.http_port" "port" $settings.http_port) -}}
{{- if ne (toString (get .Values.settings "serve_grpc")) "false" -}}
{{- $ports = append $ports (dict "name" "kvlease-grpc" "value" "settings.grpc_port" "port" $settings.grpc_port) -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}
{{/* All ports that are listened at in one pod, with the values that name them: a list, as JSON. Those on loopback are the pod's, too. */}}
{{- define "kvlease.podPorts" -}}
{{- $ports := list -}}
{{- if and (eq .Values.mode "sidecar") .Values.engine.enabled -}}
{{- $ports = append $ports (dict "value" "engine.port" "port" .Values.engine.port) -}}
{{- end -}}
{{- if .Values.metrics.enabled -}}
{{- $ports = append $ports (dict "value" "metrics.port" "port" .Values.metrics.port) -}}
{{- end -}}
{{- if include "kvlease.listensTcp" . -}}
{{- $ports = concat $ports (include "kvlease.apiPorts" . | fromJsonArray) -}}
{{- end -}}
{{- toJson $ports -}}
{{- end -}}

{{/* Refuse values that are each good and together wrong. */}}
{{- define "kvlease.check" -}}
{{- $values := .Values -}}
{{- $kube := .Capabilities.KubeVersion.Version -}}
{{- if semverCompare "<1.29.0-0" $kube -}}
{{- fail (printf "Kubernetes %s has no native sidecars; kvlease needs 1.29 or later" $kube) -}}
{{- end -}}
{{- if eq $values.gpu.kind "dra" -}}
{{- $since := get (dict "resource.k8s.io/v1" "1.34" "resource.k8s.io/v1beta2" "1.33" "resource.k8s.io/v1beta1" "1.32") $values.gpu.dra.apiVersion -}}
{{- if semverCompare (printf "<%s.0-0" $since) $kube -}}
{{- fail (printf "gpu.dra.apiVersion %s is available from Kubernetes %s, but this is %s; set an older one, or another gpu.kind" $values.gpu.dra.apiVersion $since $kube) -}}
{{- end -}}
{{- end -}}
{{- if and (ne $values.engine.connector "offload") (eq $values.mode "sidecar") $values.engine.enabled -}}
{{- if ne $values.gpu.kind "none" -}}
{{- fail (printf "engine.connector %s lends the engine the daemon's memory, which is CPU memory; use connector offload with gpu.kind %s" $values.engine.connector $values.gpu.kind) -}}
{{- end -}}
{{- if gt (int $values.engine.kvCacheMiB) (int $values.pools.deviceMiB) -}}
{{- fail (printf "engine.kvCacheMiB (%d) must be at most pools.deviceMiB (%d): with connector %s it is part of that pool" (int $values.engine.kvCacheMiB) (int $values.pools.deviceMiB) $values.engine.connector) -}}
{{- end -}}
{{- end -}}
{{- with include "kvlease.lowerTiers" . -}}
{{- if and (ne $values.engine.connector "offload") (eq $values.mode "sidecar") $values.engine.enabled -}}
{{- fail (printf "engine.connector %s has no tier below its pool, so %s would be reserved and stay empty; leave it out, or use connector offload" $values.engine.connector .) -}}
{{- end -}}
{{- if eq (int $values.pools.hostMiB) 0 -}}
{{- fail (printf "%s needs pools.hostMiB above 0: blocks reach a store only through the host pool" .) -}}
{{- end -}}
{{- end -}}
{{- if ne $values.pools.device "cpu" -}}
{{- if not (has $values.gpu.kind (list "dra" "runtimeClass")) -}}
{{- fail (printf "pools.device %s is a GPU, which the daemon cannot see with gpu.kind %s; use runtimeClass, or dra in mode sidecar" $values.pools.device $values.gpu.kind) -}}
{{- end -}}
{{- if and (eq $values.mode "sidecar") $values.engine.enabled -}}
{{- fail (printf "vLLM's connectors use pools in CPU memory; with pools.device %s set engine.enabled to false" $values.pools.device) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.mode "daemonset") (eq $values.gpu.kind "devicePlugin") -}}
{{- fail "gpu.kind devicePlugin would take GPUs away from engines; with mode daemonset use none or runtimeClass" -}}
{{- end -}}
{{- if and (eq $values.mode "daemonset") (eq $values.gpu.kind "dra") -}}
{{- fail "gpu.kind dra would give each daemon a claim, and so a GPU, that no engine shares; with mode daemonset use none or runtimeClass" -}}
{{- end -}}
{{- $needTcp := list -}}
{{- if $values.tls.existingSecret }}{{ $needTcp = append $needTcp "tls.existingSecret" }}{{ end -}}
{{- if include "kvlease.tokenSecrets" . }}{{ $needTcp = append $needTcp "tokens" }}{{ end -}}
{{- if and $needTcp (not (include "kvlease.listensTcp" .)) -}}
{{- fail (printf "%s is for callers over TCP, but settings.listen_tcp is false" (join " and " $needTcp)) -}}
{{- end -}}
{{- if and $values.tls.clientCaKey (not $values.tls.existingSecret) -}}
{{- fail "tls.clientCaKey names a key of tls.existingSecret, but tls.existingSecret is empty" -}}
{{- end -}}
{{- if and (eq (toString $values.engine.maxSurge | trimSuffix "%") "0") (eq (toString $values.engine.maxUnavailable | trimSuffix "%") "0") -}}
{{- fail "engine.maxSurge and engine.maxUnavailable are both 0, so no upgrade could begin; raise one of them" -}}
{{- end -}}
{{- if le (int $values.engine.progressDeadlineSeconds) 1800 -}}
{{- fail (printf "engine.progressDeadlineSeconds (%d) must be more than 1800, the seconds that vLLM may take to start" (int $values.engine.progressDeadlineSeconds)) -}}
{{- end -}}
{{- if and $values.podMonitor.enabled (not $values.metrics.enabled) -}}
{{- fail "podMonitor.enabled needs metrics.enabled: otherwise nothing outside the pod can read the metrics" -}}
{{- end -}}
{{- if and (eq $values.disk.kind "persistentVolumeClaim") (include "kvlease.hasDisk" .) (not $values.disk.claimName) -}}
{{- fail "disk.kind persistentVolumeClaim needs disk.claimName" -}}
{{- end -}}
{{- if and (eq $values.disk.kind "hostPath") (include "kvlease.hasDisk" .) (not $values.disk.path) -}}
{{- fail "disk.kind hostPath needs disk.path, a directory that belongs to securityContext.runAsUser" -}}
{{- end -}}
{{- if and (eq $values.disk.kind "hostPath") (include "kvlease.hasDisk" .) (eq $values.mode "daemonset") -}}
{{- if eq (clean $values.disk.path) (clean $values.daemonset.hostPath) -}}
{{- fail (printf "disk.path and daemonset.hostPath are both %s, but the engines, which see the sockets' directory, must not see the disk store; give each a directory of its own" (clean $values.disk.path)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.disk.kind "persistentVolumeClaim") (include "kvlease.hasDisk" .) (eq $values.mode "daemonset") -}}
{{- fail "one claim cannot serve the daemons of several nodes: with mode daemonset use disk.kind hostPath or emptyDir" -}}
{{- end -}}
{{- /* A store is one daemon's: a second one there ends, also beside a pod that is about to go. */ -}}
{{- if and (ne $values.disk.kind "emptyDir") (include "kvlease.hasDisk" .) (eq $values.mode "sidecar") $values.engine.enabled -}}
{{- $one := eq $values.disk.kind "hostPath" | ternary "disk.path names one directory of a node" "disk.claimName names one claim" -}}
{{- if gt (int $values.engine.replicas) 1 -}}
{{- fail (printf "%s, and engine.replicas is %d: each daemon needs its own store; use disk.kind emptyDir, or a release for each replica" $one (int $values.engine.replicas)) -}}
{{- end -}}
{{- if ne (toString $values.engine.maxSurge | trimSuffix "%") "0" -}}
{{- fail (printf "%s, and engine.maxSurge is %v: the pods of an upgrade would need it at the same time; set engine.maxSurge to 0" $one $values.engine.maxSurge) -}}
{{- end -}}
{{- end -}}
{{- $drain := hasKey $values.settings "drain_seconds" | ternary $values.settings.drain_seconds 10 -}}
{{- if ge (float64 $drain) (float64 $values.terminationGracePeriodSeconds) -}}
{{- fail (printf "settings.drain_seconds (%v) must be less than terminationGracePeriodSeconds (%d)" $drain (int $values.terminationGracePeriodSeconds)) -}}
{{- end -}}
{{- if and (eq $values.engine.models.kind "persistentVolumeClaim") (not $values.engine.models.claimName) -}}
{{- fail "engine.models.kind persistentVolumeClaim needs engine.models.claimName" -}}
{{- end -}}
{{- if and $values.remote.url $values.remote.existingSecret -}}
{{- fail "remote.url and remote.existingSecret give the same setting; set only one of them" -}}
{{- end -}}
{{- if regexMatch "://[^/?]*:[^/?]*@" $values.remote.url -}}
{{- fail "remote.url has a password, which would be visible in the pod's environment; put the address into a secret, and name the secret in remote.existingSecret" -}}
{{- end -}}
{{- if hasPrefix "unix:" $values.remote.url -}}
{{- fail "remote.url is a Unix socket, but the daemon's container has no directory with one; name a store that is reached over TCP" -}}
{{- end -}}
{{- if and $values.remote.filesSecret (not (include "kvlease.hasRemote" .)) -}}
{{- fail "remote.filesSecret has the files that a remote store's address names, and there is none; set remote.url or remote.existingSecret" -}}
{{- end -}}
{{- include "kvlease.checkRemoteFiles" . -}}
{{- if and $values.shareProcessNamespace (eq $values.mode "daemonset") -}}
{{- fail "shareProcessNamespace is for pods with an engine; with mode daemonset the daemon is alone in its pod: leave it false" -}}
{{- end -}}
{{- $lease := float64 (default 30 $values.settings.lease_seconds) -}}
{{- $heartbeat := float64 (default 5 $values.settings.heartbeat_seconds) -}}
{{- if lt $lease (mulf 2 $heartbeat) -}}
{{- fail (printf "settings.lease_seconds (%v) must be at least twice settings.heartbeat_seconds (%v)" $lease $heartbeat) -}}
{{- end -}}
{{- $tick := float64 (default 0.25 $values.settings.tick_seconds) -}}
{{- if gt $tick $lease -}}
{{- fail (printf "settings.tick_seconds (%v) must be at most settings.lease_seconds (%v)" $tick $lease) -}}
{{- end -}}
{{- if ge (int $values.engine.shmMiB) (int $values.engine.resources.memoryMiB) -}}
{{- fail (printf "engine.shmMiB (%d) must be less than engine.resources.memoryMiB (%d), which it is part of" (int $values.engine.shmMiB) (int $values.engine.resources.memoryMiB)) -}}
{{- end -}}
{{- /* On CPUs vLLM's own cache is memory of its container, unless it is in the daemon's pool. */}}
{{- if and (eq $values.engine.connector "offload") (eq $values.gpu.kind "none") (eq $values.mode "sidecar") $values.engine.enabled -}}
{{- $engine := add (int $values.engine.kvCacheMiB) (int $values.engine.shmMiB) -}}
{{- if ge $engine (int64 $values.engine.resources.memoryMiB) -}}
{{- fail (printf "engine.kvCacheMiB (%d) and engine.shmMiB (%d) together must be less than engine.resources.memoryMiB (%d), which they are part of with gpu.kind none; lower them or raise it" (int $values.engine.kvCacheMiB) (int $values.engine.shmMiB) (int $values.engine.resources.memoryMiB)) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $values.engine.connector "offload") (eq $values.mode "sidecar") $values.engine.enabled -}}
{{- include "kvlease.checkConnector" . -}}
{{- end -}}
{{- $seen := dict -}}
{{- range include "kvlease.podPorts" . | fromJsonArray -}}
{{- $port := int .port -}}
{{- $value := .value -}}
{{- if and $port (lt $port 1024) -}}
{{- fail (printf "%s is %d, and ports below 1024 need a capability that the daemon does not have; set it to 1024 or more" $value $port) -}}
{{- end -}}
{{- with get $seen (toString $port) -}}
{{- fail (printf "%s and %s are both %d, but a pod has each port only once; set one of these values to another port" . $value $port) -}}
{{- end -}}
{{- if $port }}{{ $_ := set $seen (toString $port) .value }}{{ end -}}
{{- end -}}
{{- if $values.tls.existingSecret -}}
{{- range $name := list "http_port" "grpc_port" -}}
{{- if eq (toString (get $values.settings $name)) "0" -}}
{{- fail (printf "settings.%s is 0, which means any free port, but with tls.existingSecret callers must know the port; set one" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- include "kvlease.checkNames" . -}}
{{- include "kvlease.checkAddresses" . -}}
{{- include "kvlease.checkTenants" . -}}
{{- include "kvlease.checkPairs" . -}}
{{- include "kvlease.checkTolerations" . -}}
{{- include "kvlease.checkPolicy" . -}}
{{- include "kvlease.checkTokens" . -}}
{{- if .Values.prometheusRule.enabled }}{{ include "kvlease.checkGroups" . }}{{ end -}}
{{- end -}}
