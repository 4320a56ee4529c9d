# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a scheduler beside OpenShift's own has to be like: image and configuration by the cluster's release. Pure."""

from __future__ import annotations

import re
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift as openshift
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config

Json = dict[str, t.Any]

# The operator runs /bin/kube-scheduler, which is in these images and not in Kubernetes' own.
REPOSITORY = "registry.k8s.io/scheduler-plugins/kube-scheduler"
# Their releases by the minor version of Kubernetes that they are built from.
TAGS = {34: "v0.34.7", 33: "v0.33.5", 32: "v0.32.7", 30: "v0.30.6", 28: "v0.28.9", 27: "v0.27.8"}
# Admission policies are always served from this minor version of Kubernetes on.
ADMISSION_SINCE = 30

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


def plan(version: str, wish: Json) -> Json:
    """Image, its minor version, and the configuration.

    :param version: the cluster's release of OpenShift.
    :param wish: ``state``, ``name``, ``image``, ``version``, ``extender`` (its Service, as <name>.<namespace>),
        ``timeout``, ``preemption`` and ``tls``, kube-scheduler's side of what ``_extender_certificates.fitting`` gives.
    :raises BadInput: it can't be; one sentence that names the variable.
    """
    cluster = openshift.kubernetes_minor(version)
    # What comes after the releases that are known here has what the newest of them has.
    admission = "admissionregistration.k8s.io/v1" if not cluster or cluster >= ADMISSION_SINCE else ""
    if wish["state"] == "absent":
        # What goes is only named. Nothing that has become wrong since it came may keep it.
        return {"image": "", "minor": 0, "config": "", "policy_api": admission}
    name = str(wish["name"])
    if not _NAME.fullmatch(name) or name == "default-scheduler":
        raise BadInput(f"scheduler_name: {name!r} can't be the name of a scheduler beside the cluster's own")
    image = str(wish["image"]) or _default_image(cluster, version)
    minor = _minor(image, str(wish["version"]), cluster)
    # A pod on the pods' network: it knows names of services, and no loopback address of a node.
    url = f"https://{wish['extender']}.svc:{EXTENDER_PORT}{EXTENDER_PREFIX}"
    tls = config.Tls(*(str(wish["tls"][part]) for part in ("authority", "certificate", "key")))
    write, _reads = config.api_versions(minor)
    wanted = {
        "apiVersion": f"{config.GROUP}/{write}",
        "kind": config.KIND,
        # Releases of the operator that run several set the flags for it, which win.
        "leaderElection": {"leaderElect": False},
        "profiles": [{"schedulerName": name}],
        "extenders": [config.Extender(url, int(wish["timeout"]), bool(wish["preemption"]), tls).entry()],
    }
    text = str(yaml.safe_dump(wanted, sort_keys=False, default_flow_style=False))
    config.check("the configuration of the secondary scheduler", text, minor)
    return {"image": image, "minor": minor, "config": text, "policy_api": admission}


def _default_image(cluster: int, version: str) -> str:
    for minor in (cluster, cluster - 1):
        if minor in TAGS:
            return f"{REPOSITORY}:{TAGS[minor]}"
    kubernetes = f" (Kubernetes 1.{cluster})" if cluster else ""
    raise BadInput(
        f"scheduler_openshift_image: no image is known for OpenShift {version}{kubernetes}; name one with "
        "/bin/kube-scheduler of its version of Kubernetes or the one before"
    )


def _minor(image: str, version: str, cluster: int) -> int:
    """Minor version of the kube-scheduler in an image: scheduler-plugins count v0.34 where Kubernetes counts 1.34."""
    tag = image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    found = re.match(r"v?[01]\.(\d+)(?:[.+-]|$)", version or tag)
    if not found:
        raise BadInput(f"scheduler_version: kube-scheduler's version can't be told from {version or image!r}; set it")
    minor = int(found.group(1))
    if cluster and not cluster - 1 <= minor <= cluster:
        raise BadInput(
            f"scheduler_openshift_image: kube-scheduler 1.{minor} doesn't go with Kubernetes 1.{cluster} here, whose "
            "scheduler is of the same minor version or of the one before"
        )
    return minor
