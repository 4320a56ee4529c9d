# SPDX-License-Identifier: GPL-3.0-or-later
"""The dedicated scheduler's templates, rendered as Ansible does, with what the role computes beforehand."""

from __future__ import annotations

import time
import types
from pathlib import Path

import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar, trust_as_template
from ansible_collections.kubegpu.share.plugins.module_utils._cluster_objects import converge
from ansible_collections.kubegpu.share.plugins.module_utils._kube import RealKube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import read
from ansible_collections.kubegpu.share.plugins.plugin_utils._dedicated_scheduler import plan

ROLE = Path(__file__).resolve().parents[3] / "roles" / "scheduler"
ALL = ("namespace", "rights", "workload", "policy")
NAME = NAMESPACE = "gpushare-scheduler"

VARIABLES = {
    "scheduler_state": "present",
    "scheduler_name": NAME,
    "scheduler_replicas": 2,
    "scheduler_dedicated_namespace": NAMESPACE,
    "scheduler_dedicated_nodes": [],
    "scheduler_dedicated_tolerations": [],
    "scheduler_dedicated_pull_secrets": [],
    "scheduler_dedicated_admission": "deny",
    "scheduler_extender_image": "localhost/kubegpu/gpushare:1.0.0",
    "scheduler_extender_pull_policy": "Never",
    "scheduler_extender_archive": "",
    "scheduler_extender_placement": "binpack",
    "scheduler_extender_log_format": "text",
}


def node(name, **labels):
    return {"name": name, "labels": {"kubernetes.io/os": "linux", **labels}}


def planned(server="v1.36.3", there=("cp1", "gpu1", "gpu2"), **wish):
    """What the role computes of a cluster of this version with these nodes."""
    cluster = {"version": server, "nodes": [one if isinstance(one, dict) else node(one) for one in there]}
    wanted = {
        "state": "present",
        "name": NAME,
        "namespace": NAMESPACE,
        "image": "registry.k8s.io/kube-scheduler",
        "version": "",
        "replicas": 2,
        "nodes": [],
        "extender_timeout": 30,
    }
    return plan(cluster, {**wanted, **wish})


def rendered(*names, server="v1.36.3", there=("cp1", "gpu1", "gpu2"), **variables):
    """The objects, in the order in which they are created."""
    given = {**VARIABLES, **variables}
    wish = {
        "state": given["scheduler_state"],
        "name": given["scheduler_name"],
        "namespace": given["scheduler_dedicated_namespace"],
        "replicas": given["scheduler_replicas"],
        "nodes": given["scheduler_dedicated_nodes"],
    }
    given["__scheduler_dedicated"] = planned(server, there, **wish)
    templar = Templar(loader=DataLoader(), variables=given)
    texts = []
    for name in names or ALL:
        source = (ROLE / "templates" / "dedicated" / f"{name}.yml.j2").read_text()
        text = templar.template(trust_as_template(source))
        texts.append(text if isinstance(text, str) else yaml.safe_dump(text))
    return read(texts)


def one(objects, kind):
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def pod_of(**variables):
    return one(rendered("workload", **variables), "Deployment")["spec"]["template"]


def containers_of(**variables):
    scheduler, extender = pod_of(**variables)["spec"]["containers"]
    return scheduler, extender


def apply(server, objects, state="present", check=False):
    """What module cluster_objects does with them."""
    kube = RealKube.of_module(types.SimpleNamespace(params={"kubeconfig": str(server.kubeconfig)}, no_log_values=set()))
    wanted = {"definitions": objects, "state": state, "field_manager": "kubegpu-share", "replace_unready": False}
    return converge(kube, {**wanted, "wait": False}, check)


def until(check, seconds=20.0, pause=0.1):
    """The first true value that a check gives."""
    end = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < end, f"still {value!r} after {seconds} s"
        time.sleep(pause)
    return value
