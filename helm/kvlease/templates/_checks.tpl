{{/* Refuse what Kubernetes would refuse, or the daemon at each start; all of it is a part of kvlease.check. */}}

{{- define "kvlease.checkNames" -}}
{{- range $label := include "kvlease.selectorLabels" . | fromYaml | keys | sortAlpha -}}
{{- if hasKey $.Values.podLabels $label -}}
{{- fail (printf "podLabels has %s, which the chart itself sets to find pods; use another label, or nameOverride" $label) -}}
{{- end -}}
{{- end -}}
{{- $given := dict "podLabels" .Values.podLabels -}}
{{- if .Values.podMonitor.enabled }}{{ $_ := set $given "podMonitor.labels" .Values.podMonitor.labels }}{{ end -}}
{{- if .Values.prometheusRule.enabled }}{{ $_ := set $given "prometheusRule.labels" .Values.prometheusRule.labels }}{{ end -}}
{{- if .Values.dashboards.enabled }}{{ $_ := set $given "dashboards.label" (dict .Values.dashboards.label "") }}{{ end -}}
{{- range $value, $labels := $given -}}
{{- $own := eq $value "podLabels" | ternary (dict "app.kubernetes.io/component" "") (include "kvlease.labels" $ | fromYaml) -}}
{{- range $label, $_ := $own -}}
{{- if hasKey $labels $label -}}
{{- fail (printf "%s has %s, which the chart itself sets, so it would be there twice; use another label" $value $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $named := list -}}
{{- range .Values.engine.env -}}
{{- if has .name $named -}}
{{- fail (printf "engine.env has %s twice; leave one of them out" .name) -}}
{{- end -}}
{{- if and .value .valueFrom -}}
{{- fail (printf "engine.env: %s has a value and a valueFrom; leave one of them out" .name) -}}
{{- end -}}
{{- $named = append $named .name -}}
{{- end -}}
{{- range .Values.engine.args -}}
{{- $name := regexReplaceAll "=.*$" . "" | replace "_" "-" -}}
{{- with get (dict "--port" "port" "--model" "model" "--kv-cache-memory-bytes" "kvCacheMiB" "--kv-transfer-config" "connectorConfig") $name -}}
{{- fail (printf "engine.args has %s, which would override what the rest of the chart goes by; set engine.%s instead" $name .) -}}
{{- end -}}
{{- end -}}
{{- if and (eq .Values.mode "sidecar") .Values.engine.enabled .Values.engine.service.enabled -}}
{{- $name := include "kvlease.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%s would be the name of a Service, which must begin with a letter and have only lower-case letters, digits and -; set fullnameOverride" $name) -}}
{{- end -}}
{{- end -}}
{{- $paths := dict "daemonset.hostPath" .Values.daemonset.hostPath "disk.path" .Values.disk.path -}}
{{- range $value, $path := $paths -}}
{{- if regexMatch "(^|/)\\.\\.(/|$)" $path -}}
{{- fail (printf "%s (%s) contains .., which Kubernetes refuses in a path of the node; write the path that it leads to" $value $path) -}}
{{- end -}}
{{- if and $path (eq (clean $path) "/") -}}
{{- fail (printf "%s (%s) is the root of the node; name a directory that is kvlease's own" $value $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvlease.isLoopback" -}}
{{- if regexMatch "^(::[fF]{4}:)?127\\.|^[0:]*:0*1$" . }}true{{ end -}}
{{- end -}}

{{/* The daemon does not start with files that it cannot read; those that an address in a secret names are not seen here. */}}
{{- define "kvlease.checkRemoteFiles" -}}
{{- range regexFindAll "[?&]ssl_(ca_certs|certfile|keyfile)=[^&]*" .Values.remote.url -1 -}}
{{- $option := regexFind "ssl_[a-z_]+" . -}}
{{- $path := . | splitList "=" | last -}}
{{- if not $.Values.remote.filesSecret -}}
{{- fail (printf "remote.url names a file (%s), which the daemon's container does not have; put it into a secret, and name the secret in remote.filesSecret" $option) -}}
{{- end -}}
{{- if not (regexMatch "^(/|%2[fF])etc(/|%2[fF])kvlease(/|%2[fF])remote(/|%2[fF])[-._A-Za-z0-9]+$" $path) -}}
{{- fail (printf "%s of remote.url is %s; the secret's files are at /etc/kvlease/remote/KEY" $option $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvlease.checkAddresses" -}}
{{- if and .Values.metrics.enabled (include "kvlease.isLoopback" .Values.metrics.host) -}}
{{- fail (printf "metrics.host is %s, where the kubelet's probes cannot reach the daemon, so it would be killed again and again; set it to ::, or set metrics.enabled to false, so that probes are commands" .Values.metrics.host) -}}
{{- end -}}
{{- if and .Values.tls.existingSecret (include "kvlease.isLoopback" .Values.tls.host) -}}
{{- fail (printf "tls.host is %s, which cannot be reached from outside the pod; set it to ::, or leave tls.existingSecret out: loopback needs no TLS" .Values.tls.host) -}}
{{- end -}}
{{- $port := regexFind ":[0-9]+([/?]|$)" .Values.remote.url | regexFind "[0-9]+" -}}
{{- if gt (int64 $port) 65535 -}}
{{- fail (printf "remote.url has port %s; a port must be at most 65535" $port) -}}
{{- end -}}
{{- end -}}

{{/* A number of bytes that may be written with a unit, as kvlease reads it: 8GiB, "1.5 GB", 4096. */}}
{{- define "kvlease.writtenBytes" -}}
{{- $written := toString . -}}
{{- if kindIs "string" . -}}
{{- $units := dict "" 1 "B" 1 "KB" 1e3 "MB" 1e6 "GB" 1e9 "TB" 1e12 "KIB" 1024 "MIB" 1048576 "GIB" 1073741824 "TIB" 1099511627776 -}}
{{- $unit := regexFind "[A-Za-z]+" $written | upper -}}
{{- if not (hasKey $units $unit) -}}
{{- fail (printf "%q is not a number of bytes; write for example 8GiB, 500MB or 4096" $written) -}}
{{- end -}}
{{- $bytes := mulf (float64 (regexFind "[0-9.]+" $written)) (get $units $unit) -}}
{{- if gt $bytes 9007199254740991.0 -}}
{{- fail (printf "%q is more than 9007199254740991 bytes, the most that can be written with a unit; write less" $written) -}}
{{- end -}}
{{- if ne (floor $bytes) $bytes -}}
{{- fail (printf "%q is not a whole number of bytes; write for example 8GiB, 500MB or 4096" $written) -}}
{{- end -}}
{{- int64 $bytes -}}
{{- else -}}
{{- int64 . -}}
{{- end -}}
{{- end -}}

{{- define "kvlease.checkTenants" -}}
{{- $tenantsMax := default 256 .Values.settings.max_tenants | int64 -}}
{{- if gt (len .Values.tenants | int64) $tenantsMax -}}
{{- fail (printf "settings.max_tenants (%d) must be at least the %d tenants of tenants; raise it, or name fewer" $tenantsMax (len .Values.tenants)) -}}
{{- end -}}
{{- $percent := 0.0 -}}
{{- $minima := 0.0 -}}
{{- $poolBytes := include "kvlease.bytes" .Values.pools.deviceMiB | int64 -}}
{{- range $name, $limits := .Values.tenants -}}
{{- if hasPrefix "(" $name -}}
{{- fail (printf "tenants has %q, and names that begin with ( are reserved for metrics; choose another name" $name) -}}
{{- end -}}
{{- if not (regexMatch "^( |[^\\pC\\pZ])+$" $name) -}}
{{- fail (printf "tenants has %q; a tenant's name must have at least one character, all of them printable" $name) -}}
{{- end -}}
{{- $most := hasKey $limits "max_percent" | ternary $limits.max_percent 100 -}}
{{- $least := default 0 $limits.min_percent -}}
{{- if gt (float64 $least) (float64 $most) -}}
{{- fail (printf "tenants: min_percent of %q (%v) must be at most its max_percent (%v)" $name $least $most) -}}
{{- end -}}
{{- $mostBytes := default 0 $limits.max_bytes | include "kvlease.writtenBytes" | int64 -}}
{{- $leastBytes := default 0 $limits.min_bytes | include "kvlease.writtenBytes" | int64 -}}
{{- if and $mostBytes (gt $leastBytes $mostBytes) -}}
{{- fail (printf "tenants: min_bytes of %q (%v) must be at most its max_bytes (%v)" $name $limits.min_bytes $limits.max_bytes) -}}
{{- end -}}
{{- $percent = addf $percent $least -}}
{{- $minima = addf $minima (maxf (divf (mulf $least $poolBytes) 100) $leastBytes) -}}
{{- end -}}
{{- if gt $percent 100.0 -}}
{{- fail (printf "the min_percent of all tenants add up to %v; the sum must be at most 100" $percent) -}}
{{- end -}}
{{- /* On a GPU a cache may name a larger pool than this. */}}
{{- if and (eq .Values.pools.device "cpu") (gt $minima (float64 $poolBytes)) -}}
{{- fail (printf "the minima of all tenants add up to %d bytes, but pools.deviceMiB (%d) is %d bytes, so no cache could be registered; lower min_bytes or min_percent, or raise pools.deviceMiB" (ceil $minima | int64) (int64 .Values.pools.deviceMiB) $poolBytes) -}}
{{- end -}}
{{- end -}}

{{/* The daemon ends where two roles have one token, as it could not tell them apart. */}}
{{- define "kvlease.checkTokens" -}}
{{- $seen := dict -}}
{{- range $role, $secret := include "kvlease.tokenSecrets" . | fromYaml -}}
{{- with get $seen $secret -}}
{{- fail (printf "tokens.%sSecret and tokens.%sSecret are both %s, but each role needs a token of its own; name another secret" . $role $secret) -}}
{{- end -}}
{{- $_ := set $seen $secret $role -}}
{{- end -}}
{{- end -}}

{{/* The daemon refuses a cache beyond what its pools may take, and the engine would run without one. */}}
{{- define "kvlease.checkConnector" -}}
{{- $config := .Values.engine.connectorConfig -}}
{{- $bytes := dict -}}
{{- range $name, $value := dict "pool_bytes" "deviceMiB" "host_bytes" "hostMiB" "disk_bytes" "diskMiB" -}}
{{- $asked := get $config $name -}}
{{- $_ := set $bytes $name (or (not $asked) (kindIs "string" $asked) | ternary (mul (get $.Values.pools $value) 1048576) $asked | int64) -}}
{{- end -}}
{{- $asked := add $bytes.pool_bytes $bytes.host_bytes -}}
{{- $there := mul (add .Values.pools.deviceMiB .Values.pools.hostMiB) 1048576 -}}
{{- if gt $asked $there -}}
{{- fail (printf "engine.connectorConfig asks for pools of %d bytes, pool_bytes and host_bytes together, but pools.deviceMiB and pools.hostMiB together are %d bytes, so the daemon would refuse the engine's cache; raise these, or lower those" $asked $there) -}}
{{- end -}}
{{- $there = mul .Values.pools.hostMiB 1048576 -}}
{{- if and (include "kvlease.hasHostDir" .) (gt $bytes.host_bytes $there) -}}
{{- fail (printf "engine.connectorConfig asks for host_bytes of %d, but with pools.hostOutlivesContainer the host pool lies in a tmpfs of pools.hostMiB, which is %d bytes; raise the one, or lower the other" $bytes.host_bytes $there) -}}
{{- end -}}
{{- $there = mul .Values.pools.diskMiB 1048576 -}}
{{- if gt $bytes.disk_bytes $there -}}
{{- fail (printf "engine.connectorConfig asks for disk_bytes of %d, but pools.diskMiB is %d bytes, so the daemon would refuse the engine's cache; raise the one, or lower the other" $bytes.disk_bytes $there) -}}
{{- end -}}
{{- if and $config.remote_bytes (not (include "kvlease.hasRemote" .)) -}}
{{- fail (printf "engine.connectorConfig asks for remote_bytes of %d, but there is no remote store, so the daemon would refuse the engine's cache; set remote.existingSecret or remote.url, or leave remote_bytes out" (int64 $config.remote_bytes)) -}}
{{- end -}}
{{- $disk := hasKey $config "disk_bytes" | ternary (get $config "disk_bytes") .Values.pools.diskMiB -}}
{{- $remote := hasKey $config "remote_bytes" | ternary (get $config "remote_bytes") (include "kvlease.hasRemote" .) -}}
{{- if and (or $disk $remote) (hasKey $config "host_bytes") (not $config.host_bytes) -}}
{{- fail "engine.connectorConfig has host_bytes 0 beside a disk or remote store, which blocks reach only through the host pool, so the daemon would refuse the engine's cache; leave host_bytes out, or set disk_bytes and remote_bytes to 0, too" -}}
{{- end -}}
{{- end -}}

{{/* Prometheus reads no file in which two groups have one name. */}}
{{- define "kvlease.checkGroups" -}}
{{- $seen := dict -}}
{{- range $path, $_ := .Files.Glob "files/rules/*.yaml" -}}
{{- range get (fromYaml ($.Files.Get $path)) "groups" -}}
{{- $_ := set $seen .name "a group that the chart carries" -}}
{{- end -}}
{{- end -}}
{{- range .Values.prometheusRule.groups -}}
{{- $name := .name -}}
{{- with get $seen $name -}}
{{- fail (printf "prometheusRule.groups has %s, which is also the name of %s, and Prometheus reads no file with a name twice; use another name" $name .) -}}
{{- end -}}
{{- $_ := set $seen $name "another of them" -}}
{{- end -}}
{{- end -}}

{{/* CPUs of a quantity such as 250m, in thousandths. */}}
{{- define "kvlease.thousandths" -}}
{{- if hasSuffix "m" . }}{{ trimSuffix "m" . | int64 }}{{ else }}{{ mulf (float64 .) 1000 | int64 }}{{ end -}}
{{- end -}}

{{/* Milliseconds of a duration such as 30s. */}}
{{- define "kvlease.milliseconds" -}}
{{- $number := regexFind "^[0-9]+" . | int64 -}}
{{- mul $number (get (dict "ms" 1 "s" 1000 "m" 60000 "h" 3600000) (regexFind "[a-z]+$" .)) -}}
{{- end -}}

{{- define "kvlease.checkPairs" -}}
{{- $monitor := .Values.podMonitor -}}
{{- if and $monitor.enabled (gt (include "kvlease.milliseconds" $monitor.scrapeTimeout | int64) (include "kvlease.milliseconds" $monitor.interval | int64)) -}}
{{- fail (printf "podMonitor.scrapeTimeout (%s) must be at most podMonitor.interval (%s), or Prometheus ignores the monitor" $monitor.scrapeTimeout $monitor.interval) -}}
{{- end -}}
{{- with .Values.resources.cpuLimit -}}
{{- if lt (include "kvlease.thousandths" . | int64) 100 -}}
{{- fail (printf "resources.cpuLimit (%s) must be at least 100m, or empty for none" .) -}}
{{- end -}}
{{- end -}}
{{- range $value, $resources := dict "resources" .Values.resources "engine.resources" .Values.engine.resources -}}
{{- if $resources.cpuLimit -}}
{{- if gt (include "kvlease.thousandths" $resources.cpuRequest | int64) (include "kvlease.thousandths" $resources.cpuLimit | int64) -}}
{{- fail (printf "%s.cpuRequest (%s) must be at most %s.cpuLimit (%s)" $value $resources.cpuRequest $value $resources.cpuLimit) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Refuse tolerations whose words are each good and together wrong. */}}
{{- define "kvlease.checkTolerations" -}}
{{- range $index, $one := .Values.tolerations -}}
{{- $operator := default "Equal" $one.operator -}}
{{- if and (eq $operator "Exists") $one.value -}}
{{- fail (printf "tolerations[%d] has operator Exists, which takes any value, and the value %s; leave the value out, or use operator Equal" $index $one.value) -}}
{{- end -}}
{{- if and (not $one.key) (ne $operator "Exists") -}}
{{- fail (printf "tolerations[%d] has no key, which only operator Exists may lack; add the key, or use operator Exists" $index) -}}
{{- end -}}
{{- if and (hasKey $one "tolerationSeconds") (ne (default "" $one.effect) "NoExecute") -}}
{{- fail (printf "tolerations[%d] has tolerationSeconds, which only effect NoExecute may have; leave it out, or set the effect" $index) -}}
{{- end -}}
{{- if and (has $operator (list "Gt" "Lt")) (not (regexMatch "^(0|-?[1-9][0-9]{0,17})$" (default "" $one.value))) -}}
{{- fail (printf "tolerations[%d] has operator %s, which compares whole numbers; write one as the value, as text" $index $operator) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The number of the network of IPv4 that the first bits of a block's address name: (dict "block" … "bits" …). */}}
{{- define "kvlease.network" -}}
{{- $number := 0 -}}
{{- range splitList "/" .block | first | splitList "." }}{{ $number = add (mul $number 256) (int64 .) }}{{ end -}}
{{- range until (sub 32 .bits | int) }}{{ $number = div $number 2 }}{{ end -}}
{{- $number -}}
{{- end -}}

{{/* Of blocks of IPv6 only the lengths are compared. */}}
{{- define "kvlease.checkPolicy" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $peers := dict "metricsFrom" $policy.metricsFrom "engineFrom" $policy.engineFrom "apiFrom" $policy.apiFrom -}}
{{- range $index, $rule := $policy.egress -}}
{{- $_ := set $peers (printf "egress[%d].to" $index) (default list $rule.to) -}}
{{- range $rule.ports -}}
{{- if .endPort -}}
{{- if kindIs "string" .port -}}
{{- fail (printf "networkPolicy.egress[%d] has endPort %d beside port %s, which is a name; write the first port as a number" $index (int .endPort) .port) -}}
{{- end -}}
{{- if lt (int .endPort) (int .port) -}}
{{- fail (printf "networkPolicy.egress[%d] has endPort %d, which is below its port %d; raise the one, or lower the other" $index (int .endPort) (int .port)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $value, $from := $peers -}}
{{- range $from -}}
{{- with .ipBlock -}}
{{- $block := .cidr -}}
{{- $bits := splitList "/" $block | last | int64 -}}
{{- range .except -}}
{{- $isWithin := and (eq (contains ":" .) (contains ":" $block)) (gt (splitList "/" . | last | int64) $bits) -}}
{{- if and $isWithin (not (contains ":" $block)) -}}
{{- $isWithin = eq (include "kvlease.network" (dict "block" . "bits" $bits)) (include "kvlease.network" (dict "block" $block "bits" $bits)) -}}
{{- end -}}
{{- if not $isWithin -}}
{{- fail (printf "networkPolicy.%s has a block %s except %s, which is no smaller part of it; leave the exception out, or correct it" $value $block .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
