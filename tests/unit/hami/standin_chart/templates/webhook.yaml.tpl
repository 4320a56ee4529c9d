{{- with .Values.scheduler.admissionWebhook }}
{{- if .enabled }}
apiVersion: admissionregistration.k8s.io/v1
kind: MutatingWebhookConfiguration
metadata:
  name: {{ include "full" $ }}-webhook
webhooks:
  - name: vgpu.hami.io
    admissionReviewVersions: [v1beta1]
    clientConfig:
      {{- if .customURL.enabled }}
      url: https://{{ .customURL.host }}:{{ .customURL.port }}{{ .customURL.path }}
      {{- else }}
      service: {name: {{ include "full" $ }}-scheduler, namespace: {{ $.Release.Namespace }}, path: /webhook, port: 443}
      {{- end }}
    failurePolicy: {{ .failurePolicy }}
    namespaceSelector:
      matchExpressions:
        - {key: hami.io/webhook, operator: NotIn, values: [ignore]}
        {{- with .whitelistNamespaces }}
        - {key: kubernetes.io/metadata.name, operator: NotIn, values: {{ toJson . }}}
        {{- end }}
    objectSelector:
      matchExpressions:
        - {key: hami.io/webhook, operator: NotIn, values: [ignore]}
    rules:
      - {apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods], scope: "*"}
    sideEffects: None
    timeoutSeconds: 10
{{- end }}
{{- end }}
