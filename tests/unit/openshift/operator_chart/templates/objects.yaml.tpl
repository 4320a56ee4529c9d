{{- /* SPDX-License-Identifier: GPL-3.0-or-later */ -}}
apiVersion: v1
kind: ServiceAccount
metadata: {name: gpu-operator, namespace: {{ .Release.Namespace }}}
---
apiVersion: nvidia.com/v1
kind: ClusterPolicy
metadata: {name: cluster-policy}
spec: {{ toJson (pick .Values "driver" "toolkit" "devicePlugin" "cdi" "validator" "daemonsets") }}
