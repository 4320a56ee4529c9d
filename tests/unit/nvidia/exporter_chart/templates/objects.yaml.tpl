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
      nodeSelector: {{ toJson .Values.nodeSelector }}
      tolerations: {{ toJson .Values.tolerations }}
      containers:
        - {name: exporter, image: "nvcr.io/nvidia/k8s/dcgm-exporter:4.5.3-4.8.2-distroless", env: {{ toJson .Values.extraEnv }}}
{{- if .Values.serviceMonitor.enabled }}
---
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata: {name: {{ .Release.Name }}, namespace: {{ .Release.Namespace }}, labels: {{ toJson $labels }}}
spec:
  selector: {matchLabels: {{ toJson $labels }}}
  endpoints: [{port: metrics, honorLabels: {{ .Values.serviceMonitor.honorLabels }}}]
{{- end }}
