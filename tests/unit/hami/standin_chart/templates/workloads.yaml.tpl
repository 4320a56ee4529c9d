---
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "full" . }}-scheduler
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
spec:
  replicas: {{ .Values.scheduler.replicas }}
  selector:
    matchLabels: {app.kubernetes.io/component: hami-scheduler, app.kubernetes.io/instance: {{ .Release.Name }}}
  template:
    metadata:
      labels:
        app.kubernetes.io/component: hami-scheduler
        app.kubernetes.io/instance: {{ .Release.Name }}
        hami.io/webhook: ignore
    spec:
      serviceAccountName: {{ include "full" . }}-scheduler
      tolerations: {{- toYaml .Values.scheduler.tolerations | nindent 8 }}
      containers:
        - name: kube-scheduler
          image: {{ include "image" (dict "image" .Values.scheduler.kubeScheduler.image "tag" .Capabilities.KubeVersion.Version) }}
          command: [kube-scheduler, --config=/config/config.yaml]
          volumeMounts: [{name: configuration, mountPath: /config}]
        - name: vgpu-scheduler-extender
          image: {{ include "image" (dict "image" .Values.scheduler.extender.image "tag" .Values.global.imageTag) }}
          command:
            - scheduler
            - --scheduler-name={{ .Values.schedulerName }}
            - --node-scheduler-policy={{ .Values.scheduler.defaultSchedulerPolicy.nodeSchedulerPolicy }}
            - --gpu-scheduler-policy={{ .Values.scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy }}
            - --force-overwrite-default-scheduler={{ .Values.scheduler.forceOverwriteDefaultScheduler }}
          volumeMounts: [{name: tls, mountPath: /tls}]
      volumes:
        - {name: configuration, configMap: {name: {{ include "full" . }}-scheduler}}
        - {name: tls, secret: {secretName: {{ include "full" . }}-scheduler-tls}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata:
  name: {{ include "full" . }}-device-plugin
  namespace: {{ .Release.Namespace }}
  labels: {{- include "labels" . | nindent 4 }}
spec:
  selector:
    matchLabels: {app.kubernetes.io/component: hami-device-plugin, app.kubernetes.io/instance: {{ .Release.Name }}}
  template:
    metadata:
      labels:
        app.kubernetes.io/component: hami-device-plugin
        app.kubernetes.io/instance: {{ .Release.Name }}
        hami.io/webhook: ignore
    spec:
      {{- with .Values.devicePlugin.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      serviceAccountName: {{ include "full" . }}-device-plugin
      nodeSelector: {{- toYaml .Values.devicePlugin.nvidiaNodeSelector | nindent 8 }}
      tolerations: {{- toYaml .Values.devicePlugin.tolerations | nindent 8 }}
      containers:
        - name: device-plugin
          image: {{ include "image" (dict "image" .Values.devicePlugin.image "tag" .Values.global.imageTag) }}
          command:
            - nvidia-device-plugin
            - --mig-strategy={{ .Values.devicePlugin.migStrategy }}
            - --disable-core-limit={{ .Values.devicePlugin.disablecorelimit }}
          env:
            - {name: DEVICE_LIST_STRATEGY, value: {{ .Values.devicePlugin.deviceListStrategy }}}
            - {name: HOOK_PATH, value: {{ .Values.global.gpuHookPath }}}
            - {name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
          volumeMounts:
            - {name: device-plugins, mountPath: /var/lib/kubelet/device-plugins}
            - {name: lib, mountPath: {{ .Values.global.gpuHookPath }}/vgpu}
      volumes:
        - {name: device-plugins, hostPath: {path: /var/lib/kubelet/device-plugins}}
        - {name: lib, hostPath: {path: {{ .Values.devicePlugin.libPath }}}}
