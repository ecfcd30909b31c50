{{/* The router's environment. The worker Service's short name is enough, and the quickest to look up: both are in one
namespace. Every address behind it is a worker. */}}
{{- define "stallfree.router.env" -}}
- name: HOME
  value: /tmp
{{- include "stallfree.settingsEnv" (dict
  "port" (include "stallfree.port" .)
  "worker_urls" (printf "dns+http://%s:%s" (include "stallfree.componentName" (dict "root" . "component" "worker")) (include "stallfree.port" .))
  "max_body_bytes" .Values.router.maxBodyBytes
  "drain_delay_seconds" .Values.router.drain.delaySeconds
  "drain_timeout_seconds" .Values.router.drain.timeoutSeconds
) }}
{{- include "stallfree.secret.env" (dict "root" . "secret" .Values.router.apiKey "suffix" "api-key" "env" "STALLFREE_API_KEY") }}
{{- include "stallfree.redis.env" . }}
{{- include "stallfree.settingsEnv" .Values.router.settings }}
{{- with .Values.router.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}
