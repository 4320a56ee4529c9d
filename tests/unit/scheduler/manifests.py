# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler's manifest as kubeadm writes it, by minor version: hand-written after its sources."""

from __future__ import annotations

import typing as t


def kubeadm(minor: int) -> str:
    """The manifest of kubeadm 1.``minor``, byte for byte in its style."""
    registry = "registry.k8s.io" if minor >= 25 else "k8s.gcr.io"
    port = "probe-port" if minor >= 34 else "10259"

    def probe(path: str, failures: int, seconds: t.Mapping[str, int]) -> str:
        lines = [f"failureThreshold: {failures}", "httpGet:", "  host: 127.0.0.1", f"  path: {path}", f"  port: {port}"]
        lines += ["  scheme: HTTPS", *(f"{name}Seconds: {number}" for name, number in seconds.items())]
        return "".join(f"      {line}\n" for line in lines)

    lines = ["apiVersion: v1", "kind: Pod", "metadata:"]
    lines += [] if minor >= 34 else ["  creationTimestamp: null"]
    lines += ["  labels:", "    component: kube-scheduler", "    tier: control-plane", "  name: kube-scheduler"]
    lines += ["  namespace: kube-system", "spec:", "  containers:", "  - command:", "    - kube-scheduler"]
    lines += [
        f"    - --{kind}-kubeconfig=/etc/kubernetes/scheduler.conf" for kind in ("authentication", "authorization")
    ]
    lines += [
        "    - --bind-address=127.0.0.1",
        "    - --kubeconfig=/etc/kubernetes/scheduler.conf",
        "    - --leader-elect=true",
    ]
    lines += ["    - --port=0"] if 19 <= minor < 23 else []
    lines += [
        f"    image: {registry}/kube-scheduler:v1.{minor}.3",
        "    imagePullPolicy: IfNotPresent",
        "    livenessProbe:",
    ]
    live = "/livez" if minor >= 32 else "/healthz"
    usual = {"initialDelay": 10, "period": 10, "timeout": 15} if minor >= 19 else {"initialDelay": 15, "timeout": 15}
    text = "\n".join(lines) + "\n" + probe(live, 8, usual) + "    name: kube-scheduler\n"
    if minor >= 34:
        text += "    ports:\n    - containerPort: 10259\n      name: probe-port\n      protocol: TCP\n"
    if minor >= 32:
        text += "    readinessProbe:\n" + probe("/readyz", 3, {"period": 1, "timeout": 15})
    text += "    resources:\n      requests:\n        cpu: 100m\n"
    text += "    startupProbe:\n" + probe(live, 24, usual) if minor >= 19 else ""
    text += """    volumeMounts:
    - mountPath: /etc/kubernetes/scheduler.conf
      name: kubeconfig
      readOnly: true
  hostNetwork: true
"""
    text += "  priority: 2000001000\n" if minor >= 27 else ""
    text += f"  priorityClassName: system-{'node' if minor >= 20 else 'cluster'}-critical\n"
    text += "  securityContext:\n    seccompProfile:\n      type: RuntimeDefault\n" if minor >= 22 else ""
    return (
        text
        + """  volumes:
  - hostPath:
      path: /etc/kubernetes/scheduler.conf
      type: FileOrCreate
    name: kubeconfig
status: {}
"""
    )


FULL = """\
# our own manifest, in our own style
apiVersion: v1
kind: Pod
metadata:
    name: kube-scheduler
    namespace: kube-system
    annotations: {owner: "platform"}   # who
spec:
    hostNetwork: true
    containers:
        -   name: sidecar
            image: busybox
        -   name: kube-scheduler
            image: registry.example:5000/k8s/kube-scheduler:v1.36.3
            command: ["kube-scheduler"]
            args: [ --kubeconfig=/etc/kubernetes/scheduler.conf, "--leader-elect=true", --bind-address=0.0.0.0,
                    --secure-port=10260, --profiling=false, --kube-api-qps=75 ]   # flags
            volumeMounts:
                # the kubeconfig
                - {name: kubeconfig, mountPath: /etc/kubernetes/scheduler.conf, readOnly: true}
    volumes:
        - name: kubeconfig
          hostPath: {path: /etc/kubernetes/scheduler.conf, type: File}
        # end of the volumes
"""

WITH_CONFIG = (
    kubeadm(36)
    .replace("    image: ", "    - --config=/etc/scheduler/config.yaml\n    image: ")
    .replace(
        "  hostNetwork: true\n", "    - mountPath: /etc/scheduler\n      name: scheduler-config\n  hostNetwork: true\n"
    )
    .replace("status: {}\n", "  - hostPath:\n      path: /srv/scheduler\n    name: scheduler-config\nstatus: {}\n")
)

USERS_CONFIG = """\
# The platform team's scheduler.
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection:
  kubeconfig: /etc/kubernetes/scheduler.conf
profiles:
  - schedulerName: default-scheduler   # the usual one
    pluginConfig:
      - name: NodeResourcesFit
        args: {scoringStrategy: {type: MostAllocated}}
extenders:
  # asks the licence server
  - urlPrefix: "http://127.0.0.1:9000"
    filterVerb: filter
    nodeCacheCapable: true
leaderElection: {leaderElect: true}
"""
