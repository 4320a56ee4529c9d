# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names that the control plane, the scheduler modules and the checks share. No imports, so that it ships alone."""

from __future__ import annotations

# How a cluster runs its scheduler (the option scheduler_mode).
AUTO = "auto"
STATIC_POD, K3S, RKE2, DEDICATED, OPENSHIFT = "static_pod", "k3s", "rke2", "dedicated", "openshift"
# The modes in which a scheduler is configured on the machine that it runs on.
ON_MACHINES = (STATIC_POD, K3S, RKE2)
# kubeadm, kubespray and RKE2 label kube-scheduler's pods with it; others have another label, or none.
SCHEDULER_LABEL = "component=kube-scheduler"
CONTAINER = "kube-scheduler"

# The dedicated scheduler's Deployment, Lease and policy, and the extender's DaemonSet.
DEDICATED_NAME = "gpushare-scheduler"
EXTENDER = "gpushare-extender"
PART_OF = ("app.kubernetes.io/part-of", "gpushare")
# First minor version of Kubernetes 1.x whose API server serves admission policies in v1, and in v1beta1 if enabled.
ADMISSION_SINCE, ADMISSION_BETA_SINCE = 30, 28

# The collection's own files on a control-plane machine.
FOLDER = "/etc/kubernetes/kubegpu-share"
CONFIG = f"{FOLDER}/scheduler.yaml"
POLICY = f"{FOLDER}/policy.json"
# The pod's annotation with the configuration's stamp: kubelet restarts the pod when it changes.
ANNOTATION = "kubegpu.share/scheduler-config-sha256"
