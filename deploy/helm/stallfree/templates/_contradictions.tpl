{{/* Values that are each right and cannot be true together. The schema refuses what is wrong by itself. */}}
{{- define "stallfree.refuseContradictions" -}}
{{- if and .Values.redis.enabled (include "stallfree.secret.isGiven" .Values.externalRedis.url) -}}
{{- fail "redis.enabled is true and externalRedis.url is given: choose one store, and set redis.enabled to false for your own" -}}
{{- end -}}
{{- $secrets := dict
  "router.apiKey" .Values.router.apiKey
  "worker.huggingFaceToken" .Values.worker.huggingFaceToken
  "redis.password" .Values.redis.password
  "externalRedis.url" .Values.externalRedis.url -}}
{{- range $path, $secret := $secrets -}}
{{- if and $secret.value $secret.existingSecret -}}
{{- fail (printf "%s.value and %s.existingSecret are both given: choose one" $path $path) -}}
{{- end -}}
{{- end -}}
{{- range $component := list "router" "worker" -}}
{{- $strategy := (index $.Values $component).strategy -}}
{{- if eq $strategy.type "RollingUpdate" -}}
{{- $step := $strategy.rollingUpdate -}}
{{- if and (has (toString $step.maxSurge) (list "0" "0%")) (has (toString $step.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "%s.strategy.rollingUpdate has maxSurge 0 and maxUnavailable 0: no pod could ever be replaced" $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
