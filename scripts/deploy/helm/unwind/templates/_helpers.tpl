{{/* The name of all objects: fullnameOverride, or that of the release, with that of the chart in it. */}}
{{- define "unwind.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- .Values.fullnameOverride | default $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "unwind.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "unwind.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* Where the kubelet probes: $(HOST_IP) is the pod's address, which is the default. */}}
{{- define "unwind.probed" -}}
{{- if not (contains "HOST_IP" .Values.listen) }}
host: {{ trimAll "[]" .Values.listen | default "127.0.0.1" | quote }}
{{- end }}
port: {{ .Values.port }}
{{- end }}

{{/* The name of the objects outside of namespaces: releases of the same name in two namespaces need different ones. */}}
{{- define "unwind.clusterName" -}}
{{ .Release.Namespace }}:{{ include "unwind.fullname" . }}
{{- end }}

{{/* The labels that select the agents of a release. kubectl unwind selects by the first. */}}
{{- define "unwind.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "unwind.labels" -}}
{{ include "unwind.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end }}

{{/* Nobody publishes an image without a registry's name, so it is never pulled. */}}
{{- define "unwind.pullPolicy" -}}
{{ .Values.image.pullPolicy | default (ternary "Never" "" (regexMatch "^(docker\\.io/library/)?[^/]+$" .Values.image.repository)) }}
{{- end }}
