{{- define "full" -}}{{ ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) }}{{- end -}}
{{- define "labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
{{- define "image" -}}
{{ with .image.registry }}{{ . }}/{{ end }}{{ .image.repository }}:{{ .image.tag | default .tag }}
{{- end -}}
