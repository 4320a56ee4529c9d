---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "full" . }}-scheduler
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
data:
  config.yaml: |
    profiles: [{schedulerName: {{ .Values.schedulerName }}}]
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "full" . }}-device-plugin
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
data:
  config.json: |
{{ .Values.devicePlugin.nodeConfiguration.config | indent 4 }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: {{ include "full" . }}-scheduler-device
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
data:
  device-config.yaml: |-
{{- with index .Values "device-config" "content" }}
{{ . | indent 4 }}
{{- else }}
    nvidia:
      resourceCountName: {{ .Values.resourceName }}
      defaultMemory: 0
      defaultCores: 0
      deviceSplitCount: {{ .Values.devicePlugin.deviceSplitCount }}
      deviceMemoryScaling: {{ .Values.devicePlugin.deviceMemoryScaling }}
      deviceCoreScaling: {{ .Values.devicePlugin.deviceCoreScaling }}
      runtimeClassName: "{{ .Values.devicePlugin.runtimeClassName }}"
    others:
      kept: true
{{- end }}
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "full" . }}-scheduler
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
spec:
  type: {{ .Values.scheduler.service.type }}
  selector: {app.kubernetes.io/component: hami-scheduler}
  ports: [{name: http, port: 443, targetPort: 443}]
---
apiVersion: v1
kind: Service
metadata:
  name: {{ include "full" . }}-device-plugin-monitor
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
spec:
  type: {{ .Values.devicePlugin.service.type }}
  selector: {app.kubernetes.io/component: hami-device-plugin}
  ports: [{name: monitor, port: 31992, targetPort: 9394}]
