{{/* The worker's environment. The device is named, never guessed: a worker without its GPU must fail, not crawl. */}}
{{- define "stallfree.worker.env" -}}
- name: HOME
  value: /tmp
- name: HF_HOME
  value: /cache/huggingface
{{- include "stallfree.secret.env" (dict "root" . "secret" .Values.worker.huggingFaceToken "suffix" "hf-token" "env" "HF_TOKEN") }}
{{- include "stallfree.settingsEnv" (dict
  "port" (include "stallfree.port" .)
  "model" .Values.worker.model
  "device" (ternary "cuda" "cpu" .Values.worker.gpu.enabled)
  "cache_dir" "/cache/stallfree"
  "engine_start_timeout_seconds" .Values.worker.maxStartSeconds
  "drain_delay_seconds" .Values.worker.drain.delaySeconds
  "drain_timeout_seconds" .Values.worker.drain.timeoutSeconds
) }}
{{- include "stallfree.settingsEnv" .Values.worker.settings }}
{{- with .Values.worker.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Seconds that a worker gets to start: a minute more than it gives itself, so that it can say why it gave up. */}}
{{- define "stallfree.worker.startupSeconds" -}}
{{- add (ceil .Values.worker.maxStartSeconds) 60 -}}
{{- end -}}

{{/* The worker's resources, and its GPU: requests and limits of an extended resource must be equal. */}}
{{- define "stallfree.worker.resources" -}}
{{- $resources := deepCopy .Values.worker.resources -}}
{{- if .Values.worker.gpu.enabled -}}
{{- $gpu := dict .Values.worker.gpu.resourceName "1" -}}
{{- $resources = mergeOverwrite $resources (dict "requests" $gpu "limits" (deepCopy $gpu)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* The name that clients use for the model: as the worker itself takes it from a hub id or a path. */}}
{{- define "stallfree.servedModel" -}}
{{- $model := .Values.worker.model -}}
{{- .Values.worker.settings.served_model_name | default (ternary (base $model) $model (hasPrefix "/" $model)) -}}
{{- end -}}
