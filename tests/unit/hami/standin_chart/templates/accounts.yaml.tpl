{{- $all := . }}
{{- range list "scheduler" "device-plugin" }}
{{- $name := printf "%s-%s" (include "full" $all) . }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  namespace: {{ $all.Release.Namespace }}
  labels: {{- include "labels" $all | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels: {{- include "labels" $all | nindent 4 }}
rules:
  - apiGroups: [""]
    resources: [nodes, pods]
    verbs: [get, list, watch, patch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels: {{- include "labels" $all | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: {{ $name }}}
subjects: [{kind: ServiceAccount, name: {{ $name }}, namespace: {{ $all.Release.Namespace }}}]
{{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ include "full" . }}-scheduler
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
rules:
  - apiGroups: [coordination.k8s.io]
    resources: [leases]
    verbs: [get, create, update]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ include "full" . }}-scheduler
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ include "full" . }}-scheduler}
subjects: [{kind: ServiceAccount, name: {{ include "full" . }}-scheduler, namespace: {{ .Release.Namespace }}}]
