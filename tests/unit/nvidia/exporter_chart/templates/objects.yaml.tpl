{{- /* SPDX-License-Identifier: GPL-3.0-or-later */ -}}
{{- $labels := dict "app.kubernetes.io/name" .Chart.Name }}
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}, labels: {{ toJson $labels }}}
spec:
  selector: {matchLabels: {{ toJson $labels }}}
  template:
    metadata: {labels: {{ toJson $labels }}}
    spec:
      {{- with .Values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      {{- with .Values.imagePullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      nodeSelector: {{ toJson .Values.nodeSelector }}
      tolerations: {{ toJson .Values.tolerations }}
      containers:
        - name: exporter
          image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
          env: {{ toJson .Values.extraEnv }}
{{- if .Values.serviceMonitor.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata: {name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}, labels: {{ toJson $labels }}}
spec:
  selector: {matchLabels: {{ toJson $labels }}}
  endpoints: [{port: metrics, honorLabels: {{ .Values.serviceMonitor.honorLabels }}}]
{{- end }}
