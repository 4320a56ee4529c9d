# SPDX-License-Identifier: GPL-3.0-or-later
"""The dedicated scheduler's templates, rendered with the role's computed variables."""

from __future__ import annotations

import types

import role_templates
from allocation_snapshots import row
from ansible_collections.kubegpu.share.plugins.module_utils._kube.apply_set import ensure
from ansible_collections.kubegpu.share.plugins.module_utils._kube.client import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._scheduler.dedicated import plan
from fake_kube import apply_options
from role_templates import one

ALL = ("gpushare_namespace", "dedicated/namespace", "dedicated/rights", "dedicated/workload", "dedicated/policy")
NAME = NAMESPACE = "gpushare-scheduler"
LEDGER = "gpushare-system"

VARIABLES = {
    "scheduler_state": "present",
    "scheduler_name": NAME,
    "scheduler_replicas": 2,
    "scheduler_dedicated_namespace": NAMESPACE,
    "scheduler_dedicated_nodes": [],
    "scheduler_dedicated_tolerations": [],
    "scheduler_dedicated_pull_secrets": [],
    "scheduler_dedicated_admission": "deny",
    "scheduler_extender_image": "localhost/kubegpu/gpushare:1.1.0",
    "scheduler_extender_pull_policy": "Never",
    "scheduler_extender_archive": "",
    "scheduler_extender_placement": "binpack",
    "scheduler_extender_log_format": "text",
    "scheduler_extender_preemption": True,
    "scheduler_extender_metrics": False,
    "scheduler_extender_metrics_namespaces": [],
    "scheduler_extender_metrics_secret": "",
}
# Options of the filter, and the role's variables of which it gets them.
OPTIONS = {
    "mode": "dedicated",
    "state": "present",
    "name": NAME,
    "namespace": NAMESPACE,
    "image": "registry.k8s.io/kube-scheduler",
    "version": "",
    "replicas": 2,
    "nodes": [],
    "timeout": 30,
    "preemption": True,
}
SOURCES = {
    "state": "scheduler_state",
    "name": "scheduler_name",
    "namespace": "scheduler_dedicated_namespace",
    "replicas": "scheduler_replicas",
    "nodes": "scheduler_dedicated_nodes",
    "preemption": "scheduler_extender_preemption",
}


def node(name, **labels):
    return row(name, labels={"kubernetes.io/os": "linux", **labels})


def planned(server="v1.36.3", there=("cp1", "gpu1", "gpu2"), **options):
    """Return the role's plan for a cluster of this version with these nodes."""
    cluster = {"version": server, "nodes": [one if isinstance(one, dict) else node(one) for one in there]}
    return plan(cluster, {**OPTIONS, **options})


def rendered(*names, server="v1.36.3", there=("cp1", "gpu1", "gpu2"), **variables):
    """Return the objects in the order of their creation."""
    own = {**role_templates.variables_of("scheduler", "vars"), "scheduler_detection": {"mode": "dedicated"}}
    given = {**own, **VARIABLES, **variables}
    options = {option: given[variable] for option, variable in SOURCES.items()}
    given["__scheduler_dedicated"] = planned(server, there, **options)
    space = variables.get("gpushare_namespace", LEDGER)
    given = {"gpushare_namespace": space, "gpushare_openshift": False, **given}
    return role_templates.objects("scheduler", *([f"dedicated/{name}" for name in names] or ALL), **given)


def pod_of(**variables):
    return one(rendered("workload", **variables), "Deployment")["spec"]["template"]


def containers_of(**variables):
    scheduler, extender = pod_of(**variables)["spec"]["containers"]
    return scheduler, extender


def apply(server, objects, state="present", check=False):
    """Apply objects as module cluster_objects does."""
    kube = RealKube.of_module(types.SimpleNamespace(params={"kubeconfig": str(server.kubeconfig)}, no_log_values=set()))
    return ensure(kube, apply_options(objects, state=state), check)
