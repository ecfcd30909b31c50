{{/*
Names and labels. Every name is a DNS label of at most 63 characters, unique to the release: where the wish had to be
changed to become one, a hash of the wish stands at its end. 38 characters leave room for `-worker` and for what
Kubernetes adds to a pod's name.
*/}}

{{- define "stallfree.fullname" -}}
{{- $own := ternary .Chart.Name (printf "%s-%s" .Release.Name .Chart.Name) (eq .Release.Name .Chart.Name) -}}
{{- $wish := .Values.fullnameOverride | default $own -}}
{{- $name := regexReplaceAll "[^a-z0-9]+" (lower $wish) "-" | trimAll "-" -}}
{{- if not (regexMatch "^[a-z]" $name) -}}{{- $name = printf "s-%s" $name -}}{{- end -}}
{{- if or (ne $name $wish) (gt (len $name) 38) -}}
{{- $name = printf "%s-%s" (trunc 29 $name | trimSuffix "-") (sha256sum $wish | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Takes root and component. */}}
{{- define "stallfree.componentName" -}}
{{- printf "%s-%s" (include "stallfree.fullname" .root) .component -}}
{{- end -}}

{{/* Takes root and component. Selectors are immutable: nothing that an upgrade or a value changes may stand here. */}}
{{- define "stallfree.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Takes root and component, and extra: labels that may not replace ours. The chart's version is on no pod: a change of
the chart alone must not make every worker load its model anew. */}}
{{- define "stallfree.podLabels" -}}
{{- $own := include "stallfree.selectorLabels" . | fromYaml -}}
{{- $_ := set $own "app.kubernetes.io/version" (include "stallfree.labelValue" .root.Chart.AppVersion) -}}
{{- $_ = set $own "app.kubernetes.io/part-of" "stallfree" -}}
{{- $_ = set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- merge $own (.extra | default dict) .root.Values.commonLabels | toYaml -}}
{{- end -}}

{{/* Takes root and component. */}}
{{- define "stallfree.labels" -}}
{{ include "stallfree.podLabels" . }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | include "stallfree.labelValue" }}
{{- end -}}

{{- define "stallfree.labelValue" -}}
{{- regexReplaceAll "[^A-Za-z0-9._-]" . "_" | trunc 63 | trimAll "-_." -}}
{{- end -}}

{{/* The metadata of an object. Takes root, component, and optionally name and annotations. */}}
{{- define "stallfree.metadata" -}}
name: {{ .name | default (include "stallfree.componentName" .) }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "stallfree.labels" (dict "root" .root "component" .component) | nindent 2 }}
{{- with merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "stallfree.serviceAccountName" -}}
{{- $account := (index .root.Values .component).serviceAccount -}}
{{- $account.name | default (ternary (include "stallfree.componentName" .) "default" $account.create) -}}
{{- end -}}
