{{- /* SPDX-License-Identifier: GPL-3.0-or-later */ -}}
{{- if eq .Release.Namespace "default" }}{{ fail "the namespace default is refused" }}{{ end }}
{{- if and (gt (len .Values.config.map) 1) (not .Values.config.default) }}{{ fail "config.default is missing" }}{{ end }}
{{- $labels := dict "app.kubernetes.io/name" .Chart.Name "app.kubernetes.io/instance" .Release.Name }}
{{- $image := printf "%s:%s" .Values.image.repository (.Values.image.tag | default (printf "v%s" .Chart.AppVersion)) }}
{{- $daemons := list (dict "name" .Release.Name "program" "nvidia-device-plugin" "selector" dict) }}
{{- $daemons = append $daemons (dict "name" (printf "%s-mps-control-daemon" .Release.Name) "program" "mps-control-daemon" "selector" (dict "nvidia.com/mps.capable" "true")) }}
{{- if .Values.gfd.enabled }}
{{- $daemons = append $daemons (dict "name" (printf "%s-gpu-feature-discovery" .Release.Name) "program" "gpu-feature-discovery" "selector" dict) }}
{{- end }}
apiVersion: v1
kind: ServiceAccount
metadata: {name: {{ .Release.Name }}-service-account, namespace: {{ .Release.Namespace }}, labels: {{ toJson $labels }}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: {{ .Release.Name }}-role, labels: {{ toJson $labels }}}
rules: [{apiGroups: [""], resources: [nodes], verbs: [get, list, watch]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: {{ .Release.Name }}-role-binding, labels: {{ toJson $labels }}}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ .Release.Name }}-role}
subjects: [{kind: ServiceAccount, name: {{ .Release.Name }}-service-account, namespace: {{ .Release.Namespace }}}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: {{ .Release.Name }}-configs, namespace: {{ .Release.Namespace }}, labels: {{ toJson $labels }}}
data: {{ toJson .Values.config.map }}
{{- range $daemons }}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: {{ .name }}, namespace: {{ $.Release.Namespace }}, labels: {{ toJson $labels }}}
spec:
  selector: {matchLabels: {{ toJson (merge (dict "program" .program) $labels) }}}
  template:
    metadata:
      labels: {{ toJson (merge (dict "program" .program) $labels) }}
      annotations: {checksum/config: {{ toJson $.Values.config.map | sha256sum }}}
    spec:
      priorityClassName: {{ $.Values.priorityClassName }}
      serviceAccountName: {{ $.Release.Name }}-service-account
      {{- with $.Values.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      nodeSelector: {{ toJson (merge .selector $.Values.nodeSelector) }}
      affinity: {{ toJson $.Values.affinity }}
      tolerations: {{ toJson $.Values.tolerations }}
      containers:
        - name: {{ .program }}
          image: {{ $image }}
          imagePullPolicy: {{ $.Values.image.pullPolicy }}
          command: [{{ .program }}]
          env:
            - {name: MPS_ROOT, value: {{ $.Values.mps.root }}}
            {{- with $.Values.nvidiaDriverRoot }}
            - {name: NVIDIA_DRIVER_ROOT, value: {{ . | quote }}}
            {{- end }}
          volumeMounts:
            - {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins}
            - {name: available-configs, mountPath: /available-configs}
      volumes:
        - {name: device-plugins, hostPath: {path: /var/lib/kubelet/device-plugins, type: Directory}}
        - {name: available-configs, configMap: {name: {{ $.Release.Name }}-configs}}
{{- end }}
