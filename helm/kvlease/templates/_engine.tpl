{{/* vLLM of the example: its container and its volumes. */}}

{{- define "kvlease.connectorName" -}}
{{- get (dict "offload" "KVLeaseOffloadingConnector" "owned" "KVLeaseOwnedConnector" "shared" "KVLeaseSharedConnector") .Values.engine.connector -}}
{{- end -}}

{{- define "kvlease.transferConfig" -}}
{{- $extra := dict "socket" "/run/kvlease/kvlease/kvlease.sock" -}}
{{- if eq .Values.engine.connector "offload" -}}
{{- $tiers := dict "pool_bytes" .Values.pools.deviceMiB "host_bytes" .Values.pools.hostMiB "disk_bytes" .Values.pools.diskMiB -}}
{{- if include "kvlease.hasRemote" . }}{{ $_ := set $tiers "remote_bytes" .Values.remote.capacityMiB }}{{ end -}}
{{- range $name, $mebibytes := $tiers -}}
{{- if $mebibytes }}{{ $_ := set $extra $name (int64 (mul $mebibytes 1048576)) }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $extra = mergeOverwrite $extra (deepCopy .Values.engine.connectorConfig) -}}
{{- dict "kv_connector" (include "kvlease.connectorName" .) "kv_connector_module_path" "kvlease.integrations.vllm" "kv_role" "kv_both" "kv_load_failure_policy" "recompute" "kv_connector_extra_config" $extra | toJson -}}
{{- end -}}

{{/* What the engine is told by the chart; engine.env counts more, and a name that is there twice is refused by some who apply it. */}}
{{- define "kvlease.engineEnv" -}}
{{ include "kvlease.clientEnv" . }}
- {name: HOME, value: /tmp}
- {name: HF_HOME, value: /models}
{{- if eq .Values.gpu.kind "runtimeClass" }}
- {name: NVIDIA_VISIBLE_DEVICES, value: {{ .Values.gpu.visibleDevices | quote }}}
- {name: NVIDIA_DRIVER_CAPABILITIES, value: {{ .Values.gpu.driverCapabilities | quote }}}
{{- end }}
{{- end -}}

{{- define "kvlease.engine" -}}
{{- $engine := .Values.engine -}}
- name: engine
  image: {{ include "kvlease.image" (dict "image" $engine.image "default" "latest") }}
  imagePullPolicy: {{ $engine.image.pullPolicy }}
  args:
    - {{ printf "--model=%s" $engine.model | quote }}
    - --port={{ int64 $engine.port }}
    - --kv-cache-memory-bytes={{ include "kvlease.bytes" $engine.kvCacheMiB }}
    - '--kv-transfer-config={{ include "kvlease.transferConfig" . | replace "'" "''" }}'
    {{- range $engine.args }}
    - {{ . | quote }}
    {{- end }}
  env:
    {{- $named := list }}
    {{- range $engine.env }}{{ $named = append $named .name }}{{ end }}
    {{- range include "kvlease.engineEnv" . | fromYamlArray }}
    {{- if not (has .name $named) }}
    - {{ toJson . }}
    {{- end }}
    {{- end }}
    {{- with $engine.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: http, containerPort: {{ int64 $engine.port }}, protocol: TCP}
  startupProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 5
    timeoutSeconds: 3
    failureThreshold: 360
  livenessProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  readinessProbe:
    httpGet: {path: /health, port: http}
    periodSeconds: 5
    timeoutSeconds: 3
  resources:
    requests:
      cpu: {{ $engine.resources.cpuRequest | quote }}
      memory: {{ int64 $engine.resources.memoryMiB }}Mi
      ephemeral-storage: {{ add $engine.tmpMiB (eq $engine.models.kind "emptyDir" | ternary $engine.models.capacityMiB 0) }}Mi
      {{- if eq .Values.gpu.kind "devicePlugin" }}
      {{ .Values.gpu.resourceName | quote }}: {{ int64 .Values.gpu.count }}
      {{- end }}
    limits:
      {{- with $engine.resources.cpuLimit }}
      cpu: {{ . | quote }}
      {{- end }}
      memory: {{ int64 $engine.resources.memoryMiB }}Mi
      {{- if eq .Values.gpu.kind "devicePlugin" }}
      {{ .Values.gpu.resourceName | quote }}: {{ int64 .Values.gpu.count }}
      {{- end }}
    {{- if eq .Values.gpu.kind "dra" }}
    claims: [{name: kvlease-gpu}]
    {{- end }}
  securityContext:
    {{- include "kvlease.securityContext" . | nindent 4 }}
  volumeMounts:
    {{- include "kvlease.clientMounts" . | nindent 4 }}
    - {name: engine-tmp, mountPath: /tmp}
    - {name: engine-shm, mountPath: /dev/shm}
    - {name: engine-models, mountPath: /models}
{{- end -}}

{{- define "kvlease.engineVolumes" -}}
- {name: engine-tmp, emptyDir: {sizeLimit: {{ int64 .Values.engine.tmpMiB }}Mi}}
- {name: engine-shm, emptyDir: {medium: Memory, sizeLimit: {{ int64 .Values.engine.shmMiB }}Mi}}
- name: engine-models
  {{- if eq .Values.engine.models.kind "persistentVolumeClaim" }}
  persistentVolumeClaim: {claimName: {{ .Values.engine.models.claimName | quote }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ int64 .Values.engine.models.capacityMiB }}Mi}
  {{- end }}
{{- end -}}

{{/* What both kinds of pods have. */}}
{{- define "kvlease.podSettings" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.serviceAccountName }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if eq .Values.gpu.kind "runtimeClass" }}
{{- with .Values.gpu.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- end }}
{{- with include "kvlease.resourceClaims" . }}
resourceClaims: {{- . | nindent 2 }}
{{- end }}
terminationGracePeriodSeconds: {{ int64 .Values.terminationGracePeriodSeconds }}
securityContext: {{- include "kvlease.podSecurityContext" . | nindent 2 }}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "kvlease.podMetadata" -}}
labels:
  {{- include "kvlease.selectorLabels" . | nindent 2 }}
  app.kubernetes.io/component: {{ ternary "sidecar" "daemon" (eq .Values.mode "sidecar") }}
  {{- with .Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
