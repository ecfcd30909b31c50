{{/*
What all pods have in common. Each helper takes a dict of root (the chart's context) and component (router, worker,
redis), unless it says otherwise.
*/}}

{{/* The port that both services listen on, and their Services lead to. */}}
{{- define "stallfree.port" -}}8000{{- end -}}

{{- define "stallfree.image" -}}
{{- $image := (index .root.Values .component).image -}}
{{- $registry := .root.Values.global.imageRegistry | default $image.registry -}}
{{- $version := ternary (printf "@%s" $image.digest) (printf ":%s" ($image.tag | default .root.Chart.AppVersion)) (ne $image.digest "") -}}
{{- with $registry }}{{ . }}/{{ end }}{{ $image.repository }}{{ $version }}
{{- end -}}

{{/* The metadata of a pod template. Also takes secrets: a list of secret values, whose change must roll the pods. */}}
{{- define "stallfree.podMetadata" -}}
{{- $values := index .root.Values .component -}}
labels:
  {{- include "stallfree.podLabels" (dict "root" .root "component" .component "extra" $values.podLabels) | nindent 2 }}
annotations:
  checksum/secrets: {{ toJson .secrets | sha256sum }}
  {{- with merge (dict) $values.podAnnotations .root.Values.commonAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* What every pod has, Helm's test pod too. No token: nothing here talks to Kubernetes. No service links: those of a
Service named `stallfree` would set STALLFREE_PORT=tcp://…, which our programs read as a setting. */}}
{{- define "stallfree.podBase" -}}
serviceAccountName: {{ include "stallfree.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- end -}}

{{/* Where a component's pods may run. */}}
{{- define "stallfree.placement" -}}
{{- $values := index .root.Values .component -}}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $tolerations := $values.tolerations }}
{{- if ($values.gpu | default dict).enabled }}
{{- $tolerations = concat $values.gpu.tolerations $tolerations }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $selector := dict "labelSelector" (dict "matchLabels" (include "stallfree.selectorLabels" . | fromYaml)) }}
  {{- range $values.topologySpreadConstraints }}
  - {{- merge (dict) . $selector | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Seconds that a pod gets to leave: its whole drain, and 30 for closing connections and for the kubelet's own delays.
The programs drain by themselves on SIGTERM, so there is no preStop hook to add. Takes a drain value. */}}
{{- define "stallfree.gracePeriodSeconds" -}}
{{- add (ceil (addf .delaySeconds .timeoutSeconds)) 30 -}}
{{- end -}}

{{/* Seconds without progress after which a rollout counts as stuck. A new worker may wait for an old one to drain, pull
a large image, and load its model; and a router is not ready before a worker is. Takes the chart's context. */}}
{{- define "stallfree.progressDeadlineSeconds" -}}
{{- add (include "stallfree.gracePeriodSeconds" .Values.worker.drain) 1800 (include "stallfree.worker.startupSeconds" .) -}}
{{- end -}}

{{/* Takes a strategy value. Recreate stands alone, though the defaults' rollingUpdate is still among the values. */}}
{{- define "stallfree.strategy" -}}
type: {{ .type }}
{{- if eq .type "RollingUpdate" }}
rollingUpdate:
  {{- toYaml .rollingUpdate | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Takes path, periodSeconds, failureThreshold. */}}
{{- define "stallfree.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
periodSeconds: {{ .periodSeconds }}
timeoutSeconds: 5
failureThreshold: {{ .failureThreshold }}
{{- end -}}
