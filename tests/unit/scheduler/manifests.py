# SPDX-License-Identifier: GPL-3.0-or-later
"""kube-scheduler's manifest as kubeadm writes it, by minor version: written after its sources."""

from __future__ import annotations


def kubeadm(minor: int) -> str:
    """The manifest of kubeadm 1.``minor``, byte for byte in its style."""
    port = "probe-port" if minor >= 34 else "10259"
    live = "/livez" if minor >= 32 else "/healthz"

    def since(first: int, text: str, before: int = 99) -> str:
        return text if first <= minor < before else ""

    def probe(kind: str, path: str, failures: int, **seconds: int) -> str:
        lines = [f"failureThreshold: {failures}", "httpGet:", "  host: 127.0.0.1", f"  path: {path}", f"  port: {port}"]
        lines += ["  scheme: HTTPS", *(f"{name}Seconds: {number}" for name, number in seconds.items())]
        return f"    {kind}Probe:\n" + "".join(f"      {line}\n" for line in lines)

    usual = {"initialDelay": 10, "period": 10, "timeout": 15} if minor >= 19 else {"initialDelay": 15, "timeout": 15}
    created, insecure = since(0, "  creationTimestamp: null\n", 34), since(19, "    - --port=0\n", 23)
    registry, critical = "registry.k8s.io" if minor >= 25 else "k8s.gcr.io", "node" if minor >= 20 else "cluster"
    priority = since(27, "  priority: 2000001000\n")
    security = since(22, "  securityContext:\n    seccompProfile:\n      type: RuntimeDefault\n")
    ports = "    ports:\n    - containerPort: 10259\n      name: probe-port\n      protocol: TCP\n"
    return f"""\
apiVersion: v1
kind: Pod
metadata:
{created}  labels:
    component: kube-scheduler
    tier: control-plane
  name: kube-scheduler
  namespace: kube-system
spec:
  containers:
  - command:
    - kube-scheduler
    - --authentication-kubeconfig=/etc/kubernetes/scheduler.conf
    - --authorization-kubeconfig=/etc/kubernetes/scheduler.conf
    - --bind-address=127.0.0.1
    - --kubeconfig=/etc/kubernetes/scheduler.conf
    - --leader-elect=true
{insecure}    image: {registry}/kube-scheduler:v1.{minor}.3
    imagePullPolicy: IfNotPresent
{probe("liveness", live, 8, **usual)}    name: kube-scheduler
{since(34, ports)}{since(32, probe("readiness", "/readyz", 3, period=1, timeout=15))}    resources:
      requests:
        cpu: 100m
{since(19, probe("startup", live, 24, **usual))}    volumeMounts:
    - mountPath: /etc/kubernetes/scheduler.conf
      name: kubeconfig
      readOnly: true
  hostNetwork: true
{priority}  priorityClassName: system-{critical}-critical
{security}  volumes:
  - hostPath:
      path: /etc/kubernetes/scheduler.conf
      type: FileOrCreate
    name: kubeconfig
status: {{}}
"""


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


def mounted(manifest: str, flag: str, folder: str, host: str) -> str:
    """Return kubeadm's manifest with one more flag, and with a folder of the machine mounted."""
    mount = f"    - mountPath: {folder}\n      name: scheduler-config\n  hostNetwork: true\n"
    volume = f"  - hostPath:\n      path: {host}\n    name: scheduler-config\nstatus: {{}}\n"
    text = manifest.replace("    image: ", f"    - {flag}\n    image: ")
    return text.replace("  hostNetwork: true\n", mount).replace("status: {}\n", volume)


WITH_CONFIG = mounted(kubeadm(36), "--config=/etc/scheduler/config.yaml", "/etc/scheduler", "/srv/scheduler")

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
