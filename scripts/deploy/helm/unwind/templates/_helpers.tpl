{{/* The name of all objects: fullnameOverride, or else the release's name, plus the chart's name if the release's name lacks it. */}}
{{- define "unwind.fullname" -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}
{{- .Values.fullnameOverride | default $name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "unwind.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "unwind.fullname" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{/* The address and port that the kubelet probes. Without host, it probes the pod's address, which $(HOST_IP) stands for. */}}
{{- define "unwind.probed" -}}
{{- if not (contains "HOST_IP" .Values.listen) }}
host: {{ trimAll "[]" .Values.listen | default "127.0.0.1" | quote }}
{{- end }}
port: {{ .Values.port }}
{{- end }}

{{/* The labels that select the agents of a release. kubectl unwind selects by the first label. */}}
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

{{/* The image's name and tag, without the digest. */}}
{{- define "unwind.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* If an image's name has neither a registry nor an owner, no registry has the image, so it is never pulled. */}}
{{- define "unwind.pullPolicy" -}}
{{ .Values.image.pullPolicy | default (ternary "Never" "" (regexMatch "^(docker\\.io/library/)?[^/]+$" .Values.image.repository)) }}
{{- end }}
