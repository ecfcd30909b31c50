{{/* Environment variables: settings as STALLFREE_…, and values that stand in Secrets. */}}

{{/* A value as text, an object as JSON. Helm reads every number as a float, and would write 1000000 as 1e+06. */}}
{{- define "stallfree.text" -}}
{{- if kindIs "map" . -}}{{ toJson . }}{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}{{ printf "%.0f" . }}{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{/* Takes a map of settings by name; gives a list of environment variables. */}}
{{- define "stallfree.settingsEnv" -}}
{{- range $name, $value := . }}
- name: STALLFREE_{{ upper $name }}
  value: {{ include "stallfree.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* Takes a list of environment variables, as text; gives it back, or fails where two have one name: the later would
win in silence, and a server-side apply refuses both. */}}
{{- define "stallfree.uniqueEnv" -}}
{{- $seen := dict -}}
{{- range . | fromYamlArray -}}
{{- if hasKey $seen .name -}}
{{- fail (printf "extraEnv sets %s, which the chart sets from another value already" .name) -}}
{{- end -}}
{{- $_ := set $seen .name true -}}
{{- end -}}
{{- . -}}
{{- end -}}

{{/* True where a secret value was given in either way. Takes the secret value. */}}
{{- define "stallfree.secret.isGiven" -}}
{{- if or .value .existingSecret -}}true{{- end -}}
{{- end -}}

{{/* An environment variable out of a secret value, or nothing where none was given. Takes root, secret, suffix (of the
chart's own Secret), env. */}}
{{- define "stallfree.secret.env" -}}
{{- if include "stallfree.secret.isGiven" .secret }}
- name: {{ .env }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.existingSecret | default (printf "%s-%s" (include "stallfree.fullname" .root) .suffix) }}
      key: {{ .secret.key }}
{{- end }}
{{- end -}}

{{/* The chart's own Secret for a secret value that was given as a value. Takes root, component, secret, suffix. */}}
{{- define "stallfree.secret.object" -}}
{{- if .secret.value }}
---
apiVersion: v1
kind: Secret
metadata:
  {{- include "stallfree.metadata" (merge (dict "name" (printf "%s-%s" (include "stallfree.fullname" .root) .suffix)) .) | nindent 2 }}
type: Opaque
stringData:
  {{ .secret.key }}: {{ .secret.value | quote }}
{{- end }}
{{- end -}}

{{/* Where the routers find the store, as environment variables. The password's variable comes first: Kubernetes fills
$(…) only from those before. */}}
{{- define "stallfree.redis.env" -}}
{{- if .Values.redis.enabled }}
{{- include "stallfree.secret.env" (dict "root" . "secret" .Values.redis.password "suffix" "redis-password" "env" "REDIS_PASSWORD") }}
- name: STALLFREE_REDIS_URL
  value: redis://{{ if include "stallfree.secret.isGiven" .Values.redis.password }}:$(REDIS_PASSWORD)@{{ end }}{{ include "stallfree.componentName" (dict "root" . "component" "redis") }}:6379/0
{{- else }}
{{- include "stallfree.secret.env" (dict "root" . "secret" .Values.externalRedis.url "suffix" "redis-url" "env" "STALLFREE_REDIS_URL") }}
{{- end }}
{{- end -}}
