# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A kube-scheduler of our own beside the cluster's: what of it follows from the cluster's version and nodes. Pure."""

from __future__ import annotations

import hashlib
import re
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import EXTENDER_PORT, EXTENDER_PREFIX
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config

Json = dict[str, t.Any]

# Of the workload, of its lease and of everything around it; pods know the scheduler by another name, which can change.
NAME = "gpushare-scheduler"
OLDEST = 19
# First minor version of 1.x in which kube-scheduler has /livez and /readyz.
LIVEZ_SINCE = 31
# First minor version with admission policies in v1, which is always served, and in v1beta1, which may be.
POLICY_SINCE, POLICY_BETA_SINCE = 30, 28
BUDGET_SINCE = 21

_VERSION = re.compile(r"^v?(1\.([0-9]+)\.[0-9]+(?:-(?:alpha|beta|rc)\.[0-9]+)?)")
# What can be a profile's name, a label's value and part of an expression alike.
_WORD = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


def plan(cluster: Json, wish: Json) -> Json:
    """All that the templates need and the user didn't say.

    :param cluster: ``version`` and ``nodes``, as cluster_info tells them.
    :param wish: ``state``, ``name``, ``namespace``, ``image``, ``version``, ``replicas``, ``nodes`` and
        ``extender_timeout`` and ``preemption``.
    :raises BadInput: it can't be; one sentence that names the variable.
    """
    server, server_minor = _server(str(cluster["version"]))
    apis = {
        "policy_api": _policy_api(server_minor),
        "budget_api": "policy/v1" if server_minor >= BUDGET_SINCE else "policy/v1beta1",
    }
    if wish["state"] == "absent":
        # What goes is only named. Nothing that has become wrong since it came may keep it.
        texts = dict.fromkeys(("image", "config", "config_name", "live", "ready"), "")
        return {**apis, **texts, "minor": 0, "nodes": []}
    _check_words(wish)
    image = _image(str(wish["image"]), str(wish["version"] or ""), server)
    minor = _minor(image, str(wish["version"] or ""), server_minor)
    address = f"http://127.0.0.1:{EXTENDER_PORT}{EXTENDER_PREFIX}"
    extender = config.Extender(address, int(wish["extender_timeout"]), bool(wish["preemption"]))
    text = configuration(minor, str(wish["name"]), str(wish["namespace"]), extender)
    return {
        **apis,
        "image": image,
        "minor": minor,
        "config": text,
        "config_name": hashlib.sha256(text.encode()).hexdigest()[:10],
        "nodes": _nodes(cluster["nodes"], wish),
        "live": "/livez" if minor >= LIVEZ_SINCE else "/healthz",
        "ready": "/readyz" if minor >= LIVEZ_SINCE else "/healthz",
    }


def configuration(minor: int, name: str, namespace: str, extender: config.Extender) -> str:
    """The KubeSchedulerConfiguration; without a kubeconfig, kube-scheduler takes its pod's service account."""
    write, _reads = config.api_versions(minor)
    wanted = {
        "apiVersion": f"{config.GROUP}/{write}",
        "kind": config.KIND,
        "leaderElection": {
            "leaderElect": True,
            "resourceLock": "leases",
            # Two schedulers with one lease would take turns instead of working side by side.
            "resourceName": NAME,
            "resourceNamespace": namespace,
        },
        "profiles": [{"schedulerName": name}],
        "extenders": [extender.entry()],
        **config.insecure_addresses(minor, {"port": "0"}),
    }
    text = str(yaml.safe_dump(wanted, sort_keys=False, default_flow_style=False))
    config.check("the configuration of the dedicated scheduler", text, minor)
    return text


def _server(version: str) -> tuple[str, int]:
    """The release that an API server is built from, without what its distributor has added, and its minor version."""
    found = _VERSION.match(version)
    if not found:
        raise BadInput(f"scheduler_mode: {version!r}, as the API server calls its version, isn't one of Kubernetes 1.x")
    minor = int(found.group(2))
    if minor < OLDEST:
        raise BadInput(f"scheduler_mode: dedicated needs Kubernetes 1.{OLDEST} or newer, and this cluster is {version}")
    return found.group(1), minor


def _check_words(wish: Json) -> None:
    for variable, value in (("scheduler_name", wish["name"]), ("scheduler_dedicated_namespace", wish["namespace"])):
        if not _WORD.fullmatch(str(value)):
            raise BadInput(f"{variable}: {value!r} isn't at most 63 small letters, digits and dashes")
    if wish["name"] == "default-scheduler":
        raise BadInput("scheduler_name: default-scheduler is the name of the cluster's own scheduler")
    for variable, wanted in (("scheduler_replicas", "replicas"), ("scheduler_extender_timeout", "extender_timeout")):
        if int(wish[wanted]) < 1:
            raise BadInput(f"{variable}: {wish[wanted]} is less than 1")


def _image(image: str, version: str, server: str) -> str:
    """The image with its tag, which is by default the cluster's own release."""
    if not image or image != image.strip():
        raise BadInput(f"scheduler_dedicated_image: {image!r} is no image")
    if "@" in image or ":" in image.rpartition("/")[2]:
        return image
    found = _VERSION.match(version) if version else None
    if version and not found:
        raise BadInput(
            f"scheduler_version: {version!r} isn't a whole version such as 1.36.3, and the image's tag comes from it"
        )
    return f"{image}:v{found.group(1) if found else server}"


def _minor(image: str, version: str, server: int) -> int:
    if "@" in image and not version and ":" not in image.partition("@")[0].rpartition("/")[2]:
        raise BadInput(f"scheduler_version: {image} doesn't tell kube-scheduler's version; set this variable")
    minor = config.minor_of(image, version or None)
    if not server - 1 <= minor <= server or minor < OLDEST:
        raise BadInput(
            f"scheduler_dedicated_image: kube-scheduler 1.{minor} doesn't go with an API server 1.{server}, whose "
            "kube-scheduler is of the same minor version or of the one before"
        )
    return minor


def _nodes(nodes: t.Sequence[Json], wish: Json) -> list[str]:
    """The nodes where pods of the scheduler may run; none where all of them may."""
    linux = [one["name"] for one in nodes if one["labels"].get("kubernetes.io/os", "linux") == "linux"]
    wanted = [str(name) for name in wish["nodes"]]
    # A machine of the inventory may have yet to join.
    chosen = sorted({name for name in wanted if name in linux})
    if wanted and not chosen:
        raise BadInput(f"scheduler_dedicated_nodes: none of {', '.join(wanted)} is a node of the cluster")
    places, replicas = len(chosen or linux), int(wish["replicas"])
    if places < replicas:
        raise BadInput(
            f"scheduler_replicas: no two of the {replicas} pods share a node, and only {places} "
            f"{'node is' if places == 1 else 'nodes are'} there for them"
        )
    return chosen


def _policy_api(minor: int) -> str:
    group = "admissionregistration.k8s.io"
    if minor >= POLICY_SINCE:
        return f"{group}/v1"
    return f"{group}/v1beta1" if minor >= POLICY_BETA_SINCE else ""
