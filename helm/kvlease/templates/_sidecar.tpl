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
  {{- if or .Values.metrics.enabled .Values.tls.existingSecret }}
  ports:
    {{- if .Values.metrics.enabled }}
    - {name: kvlease-metrics, containerPort: {{ int64 .Values.metrics.port }}, protocol: TCP}
    {{- end }}
    {{- if .Values.tls.existingSecret }}
    {{- range include "kvlease.apiPorts" . | fromJsonArray }}
    - {name: {{ .name }}, containerPort: {{ .port }}, protocol: TCP}
    {{- end }}
    {{- end }}
  {{- end }}
  {{- range $name, $path := include "kvlease.probePaths" . | fromJson }}
  {{ $name }}Probe:
    {{- if $.Values.metrics.enabled }}
    httpGet: {path: /{{ $path }}, port: kvlease-metrics}
    {{- else }}
    exec: {command: [kvleased, probe, {{ $path }}]}
    {{- end }}
    {{- include "kvlease.patience" (dict "Values" $.Values "name" $name) | nindent 4 }}
  {{- end }}
  resources:
    requests:
      cpu: {{ .Values.resources.cpuRequest | quote }}
      memory: {{ include "kvlease.memoryMiB" . }}Mi
      ephemeral-storage: {{ add 64 (and (eq (include "kvlease.hasDisk" .) "true") (eq .Values.disk.kind "emptyDir") | ternary (add .Values.pools.diskMiB 64) 0) }}Mi
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
    {{- if .Values.tls.existingSecret }}
    - {name: kvlease-tls, mountPath: /etc/kvlease/tls, readOnly: true}
    {{- end }}
    {{- if .Values.remote.filesSecret }}
    - {name: kvlease-remote, mountPath: /etc/kvlease/remote, readOnly: true}
    {{- end }}
    {{- if include "kvlease.tokenSecrets" . }}
    - {name: kvlease-tokens, mountPath: /etc/kvlease/tokens, readOnly: true}
    {{- end }}
{{- end -}}

{{/* The probes that there are. In an engine's pod those of start and readiness would be the engine's gate, too: see install.md. */}}
{{- define "kvlease.probePaths" -}}
{{- $paths := dict "liveness" "livez" -}}
{{- if or (ne .Values.mode "sidecar") .Values.probes.gateEngine -}}
{{- $_ := set $paths "startup" "startupz" -}}
{{- $_ := set $paths "readiness" "readyz" -}}
{{- end -}}
{{- toJson $paths -}}
{{- end -}}

{{/* How patient a probe is; without a probe of the start liveness gives the daemon the same time for it. */}}
{{- define "kvlease.patience" -}}
{{- $probes := .Values.probes -}}
{{- $patience := deepCopy (index $probes .name) -}}
{{- if and (eq .name "liveness") (eq .Values.mode "sidecar") (not $probes.gateEngine) (not (hasKey $patience "initialDelaySeconds")) -}}
{{- $_ := set $patience "initialDelaySeconds" (int64 (mul $probes.startup.periodSeconds $probes.startup.failureThreshold)) -}}
{{- end -}}
{{- toYaml $patience -}}
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
- {name: KVLEASED_PROBE_HOST, value: {{ .Values.metrics.host | quote }}}
- {name: KVLEASED_PROBE_PORT, value: {{ int64 .Values.metrics.port | quote }}}
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
  valueFrom: {secretKeyRef: {name: {{ .Values.remote.existingSecret | quote }}, key: {{ .Values.remote.key | quote }}}}
{{- end }}
{{- if .Values.sharedSecret.existingSecret }}
- {name: KVLEASED_SECRET_FILE, value: /var/lib/kvlease/own/secret}
{{- end }}
{{- if .Values.tls.existingSecret }}
- {name: KVLEASED_TCP_HOST, value: {{ .Values.tls.host | quote }}}
- {name: KVLEASED_TLS_CERT_FILE, value: {{ printf "/etc/kvlease/tls/%s" .Values.tls.certKey | quote }}}
- {name: KVLEASED_TLS_KEY_FILE, value: {{ printf "/etc/kvlease/tls/%s" .Values.tls.keyKey | quote }}}
{{- with .Values.tls.clientCaKey }}
- {name: KVLEASED_TLS_CLIENT_CA_FILE, value: {{ printf "/etc/kvlease/tls/%s" . | quote }}}
{{- end }}
{{- end }}
{{- range $role, $_ := include "kvlease.tokenSecrets" . | fromYaml }}
- {name: KVLEASED_{{ upper $role }}_TOKEN_FILE, value: /etc/kvlease/tokens/{{ $role }}.token}
{{- end }}
{{- with .Values.tenants }}
{{- /* Kubernetes would take $(X) for a variable, and reads $$ as $. */}}
- {name: KVLEASED_TENANTS, value: {{ toJson . | replace "$" "$$" | quote }}}
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
    {{- include "kvlease.helperResources" (dict "Values" .Values "cpu" "10m" "mebibytes" 32) | nindent 4 }}
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
- {name: kvlease-run, hostPath: {path: {{ .Values.daemonset.hostPath | quote }}, type: {{ ternary "DirectoryOrCreate" "Directory" .Values.daemonset.prepareHostPath }}}}
{{ end -}}
- {name: kvlease-tmp, emptyDir: {sizeLimit: 64Mi}}
{{- if include "kvlease.hasHostDir" . }}
- {name: kvlease-host, emptyDir: {medium: Memory, sizeLimit: {{ add .Values.pools.hostMiB (div .Values.pools.hostMiB 64) 64 }}Mi}}
{{- end }}
{{- if include "kvlease.hasDisk" . }}
- name: kvlease-disk
  {{- if eq .Values.disk.kind "persistentVolumeClaim" }}
  persistentVolumeClaim: {claimName: {{ .Values.disk.claimName | quote }}}
  {{- else if eq .Values.disk.kind "hostPath" }}
  hostPath: {path: {{ .Values.disk.path | quote }}, type: Directory}
  {{- else }}
  emptyDir: {sizeLimit: {{ add .Values.pools.diskMiB 64 }}Mi}
  {{- end }}
{{- end }}
{{- if .Values.sharedSecret.existingSecret }}
- {name: kvlease-own, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- name: kvlease-secret
  secret: {secretName: {{ .Values.sharedSecret.existingSecret | quote }}, defaultMode: 0440, items: [{key: {{ .Values.sharedSecret.key | quote }}, path: secret}]}
{{- end }}
{{- /* Whole directories and no subPath: so a renewed secret comes to the daemon, which takes it while it runs. */}}
{{- if .Values.tls.existingSecret }}
- {name: kvlease-tls, secret: {secretName: {{ .Values.tls.existingSecret | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.remote.filesSecret }}
- {name: kvlease-remote, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with include "kvlease.tokenSecrets" . | fromYaml }}
- name: kvlease-tokens
  projected:
    defaultMode: 0440
    sources:
      {{- range $role, $secret := . }}
      - secret: {name: {{ $secret | quote }}, items: [{key: {{ $.Values.tokens.key | quote }}, path: {{ $role }}.token}]}
      {{- end }}
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
- {name: kvlease-gpu, resourceClaimTemplateName: {{ include "kvlease.claimName" . }}}
{{- end -}}
{{- end -}}
