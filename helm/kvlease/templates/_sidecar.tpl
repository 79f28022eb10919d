{{/*
Templates for pods of your own. With this chart as a dependency and engine.enabled false:

  metadata:
    labels: {{- include "kvlease.selectorLabels" .Subcharts.kvlease | nindent 6 }}
  spec:
    securityContext: {{- include "kvlease.podSecurityContext" .Subcharts.kvlease | nindent 6 }}
    initContainers: {{- include "kvlease.sidecar" .Subcharts.kvlease | nindent 6 }}
    containers:
      - name: engine
        env: {{- include "kvlease.clientEnv" .Subcharts.kvlease | nindent 10 }}
        volumeMounts: {{- include "kvlease.clientMounts" .Subcharts.kvlease | nindent 10 }}
    volumes: {{- include "kvlease.volumes" .Subcharts.kvlease | nindent 6 }}
*/}}

{{/* The init containers: directories, where there are any, then the daemon, which runs as long as the pod. */}}
{{- define "kvlease.sidecar" -}}
{{- include "kvlease.check" . -}}
{{- with include "kvlease.directories" . -}}
{{ . }}
{{ end -}}
{{ include "kvlease.container" . }}
  restartPolicy: Always
{{- end -}}

{{/* The daemon's container. */}}
{{- define "kvlease.container" -}}
- name: kvleased
  image: {{ include "kvlease.daemonImage" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [serve]
  env:
    {{- include "kvlease.env" . | nindent 4 }}
  {{- if .Values.metrics.enabled }}
  ports:
    - {name: kvlease-metrics, containerPort: {{ .Values.metrics.port }}, protocol: TCP}
  {{- end }}
  {{- range $name, $path := dict "startup" "startupz" "liveness" "livez" "readiness" "readyz" }}
  {{ $name }}Probe:
    {{- if $.Values.metrics.enabled }}
    httpGet: {path: /{{ $path }}, port: kvlease-metrics}
    {{- else }}
    exec: {command: [kvleased, probe, {{ $path }}]}
    {{- end }}
    {{- toYaml (index $.Values.probes $name) | nindent 4 }}
  {{- end }}
  resources:
    requests:
      cpu: {{ .Values.resources.cpuRequest | quote }}
      memory: {{ include "kvlease.memoryMiB" . }}Mi
    limits:
      {{- with .Values.resources.cpuLimit }}
      cpu: {{ . | quote }}
      {{- end }}
      memory: {{ include "kvlease.memoryMiB" . }}Mi
    {{- if eq .Values.gpu.kind "dra" }}
    claims: [{name: kvlease-gpu}]
    {{- end }}
  securityContext:
    {{- include "kvlease.securityContext" . | nindent 4 }}
  volumeMounts:
    - {name: kvlease-run, mountPath: /run/kvlease}
    - {name: kvlease-tmp, mountPath: /tmp}
    {{- if include "kvlease.hasHostDir" . }}
    - {name: kvlease-host, mountPath: /var/lib/kvlease/host}
    {{- end }}
    {{- if include "kvlease.hasDisk" . }}
    - {name: kvlease-disk, mountPath: /var/lib/kvlease/disk}
    {{- end }}
    {{- if .Values.sharedSecret.existingSecret }}
    - {name: kvlease-own, mountPath: /var/lib/kvlease/own}
    {{- end }}
{{- end -}}

{{- define "kvlease.env" -}}
- {name: XDG_RUNTIME_DIR, value: /run/kvlease}
- {name: KVLEASED_RUNTIME_DIR, value: /run/kvlease/kvlease}
{{- if ne .Values.pools.device "cpu" }}
- {name: KVLEASED_DEVICE, value: {{ .Values.pools.device | quote }}}
{{- end }}
- {name: KVLEASED_MEMORY_BYTES_MAX, value: {{ include "kvlease.bytes" (include "kvlease.poolsMiB" .) | quote }}}
- {name: KVLEASED_DEVICE_BYTES_DEFAULT, value: {{ include "kvlease.bytes" .Values.pools.deviceMiB | quote }}}
{{- if .Values.metrics.enabled }}
- {name: KVLEASED_PROBE_HOST, value: "0.0.0.0"}
- {name: KVLEASED_PROBE_PORT, value: {{ .Values.metrics.port | quote }}}
{{- end }}
{{- if include "kvlease.hasHostDir" . }}
- {name: KVLEASED_HOST_DIR, value: /var/lib/kvlease/host/pools}
{{- end }}
{{- if include "kvlease.hasDisk" . }}
- {name: KVLEASED_DISK_DIR, value: /var/lib/kvlease/disk/stores}
- {name: KVLEASED_DISK_BYTES_MAX, value: {{ include "kvlease.bytes" .Values.pools.diskMiB | quote }}}
{{- end }}
{{- with .Values.remote.url }}
- {name: KVLEASED_REMOTE_URL, value: {{ . | quote }}}
{{- end }}
{{- if .Values.remote.existingSecret }}
- name: KVLEASED_REMOTE_URL
  valueFrom: {secretKeyRef: {name: {{ .Values.remote.existingSecret }}, key: {{ .Values.remote.key }}}}
{{- end }}
{{- if .Values.sharedSecret.existingSecret }}
- {name: KVLEASED_SECRET_FILE, value: /var/lib/kvlease/own/secret}
{{- end }}
{{- with .Values.tenants }}
- {name: KVLEASED_TENANTS, value: {{ toJson . | quote }}}
{{- end }}
{{- range $name, $value := .Values.settings }}
- {name: KVLEASED_{{ upper $name }}, value: {{ include "kvlease.plain" $value | quote }}}
{{- end }}
{{- if eq .Values.gpu.kind "runtimeClass" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ .Values.gpu.visibleDevices | quote }}}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: {{ .Values.gpu.driverCapabilities | quote }}}
{{- end }}
{{- end -}}

{{/* A number without the exponent that a large one would get. */}}
{{- define "kvlease.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* An init container for directories that must be the daemon's own and private; nothing where there are none. */}}
{{- define "kvlease.directories" -}}
{{- $make := list -}}
{{- if include "kvlease.hasHostDir" . }}{{ $make = append $make "/var/lib/kvlease/host/pools" }}{{ end -}}
{{- if include "kvlease.hasDisk" . }}{{ $make = append $make "/var/lib/kvlease/disk/stores" }}{{ end -}}
{{- $secret := .Values.sharedSecret.existingSecret -}}
{{- if or $make $secret -}}
- name: kvleased-directories
  image: {{ include "kvlease.daemonImage" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [sh, -euc]
  args:
    - |-
      {{- if $make }}
      install -d -m 0700 {{ join " " $make }}
      {{- end }}
      {{- if $secret }}
      install -m 0600 /etc/kvlease/secret/secret /var/lib/kvlease/own/secret
      {{- end }}
  resources:
    requests: {cpu: 10m, memory: 32Mi}
    limits: {memory: 32Mi}
  securityContext:
    {{- include "kvlease.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- if include "kvlease.hasHostDir" . }}
    - {name: kvlease-host, mountPath: /var/lib/kvlease/host}
    {{- end }}
    {{- if include "kvlease.hasDisk" . }}
    - {name: kvlease-disk, mountPath: /var/lib/kvlease/disk}
    {{- end }}
    {{- if $secret }}
    - {name: kvlease-own, mountPath: /var/lib/kvlease/own}
    - {name: kvlease-secret, mountPath: /etc/kvlease/secret, readOnly: true}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* The volumes of the daemon; that of the sockets is the engine's, too. */}}
{{- define "kvlease.volumes" -}}
{{- if eq .Values.mode "sidecar" -}}
- {name: kvlease-run, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
{{ else -}}
- {name: kvlease-run, hostPath: {path: {{ .Values.daemonset.hostPath }}, type: {{ ternary "DirectoryOrCreate" "Directory" .Values.daemonset.prepareHostPath }}}}
{{ end -}}
- {name: kvlease-tmp, emptyDir: {sizeLimit: 64Mi}}
{{- if include "kvlease.hasHostDir" . }}
- {name: kvlease-host, emptyDir: {medium: Memory, sizeLimit: {{ .Values.pools.hostMiB }}Mi}}
{{- end }}
{{- if include "kvlease.hasDisk" . }}
- name: kvlease-disk
  {{- if eq .Values.disk.kind "persistentVolumeClaim" }}
  persistentVolumeClaim: {claimName: {{ .Values.disk.claimName }}}
  {{- else if eq .Values.disk.kind "hostPath" }}
  hostPath: {path: {{ .Values.disk.path }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ add .Values.pools.diskMiB 64 }}Mi}
  {{- end }}
{{- end }}
{{- if .Values.sharedSecret.existingSecret }}
- {name: kvlease-own, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- name: kvlease-secret
  secret: {secretName: {{ .Values.sharedSecret.existingSecret }}, defaultMode: 0440, items: [{key: {{ .Values.sharedSecret.key }}, path: secret}]}
{{- end }}
{{- end -}}

{{/* How a client in the same pod finds the daemon. */}}
{{- define "kvlease.clientEnv" -}}
- {name: KVLEASE_ADDRESS, value: "unix:///run/kvlease/kvlease/kvlease.sock"}
{{- end -}}

{{- define "kvlease.clientMounts" -}}
- {name: kvlease-run, mountPath: /run/kvlease}
{{- end -}}

{{/* The pod's claim of a GPU that daemon and engine share; nothing without DRA. */}}
{{- define "kvlease.resourceClaims" -}}
{{- if eq .Values.gpu.kind "dra" -}}
- {name: kvlease-gpu, resourceClaimTemplateName: {{ include "kvlease.fullname" . }}-gpu}
{{- end -}}
{{- end -}}
