# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values of 4paradigm's chart (k8s-vgpu-scheduler, up to 2.3) in terms of HAMi's chart. Pure.

HAMi's chart ignores what it doesn't know, so that a file of that time would install something else than it says.
"""

from __future__ import annotations

import copy
import typing as t

from .._core.types import JsonObject
from .._images.names import repository_and_tag
from .chart import MISSING, Finding, finding, get, put, take

# Unchanged paths; a path includes everything below it.
SAME = (
    "nameOverride",
    "fullnameOverride",
    "resourceName",
    "resourceMem",
    "resourceMemPercentage",
    "resourceCores",
    "resourcePriority",
    "mluResourceName",
    "mluResourceMem",
    "dcuResourceName",
    "dcuResourceMem",
    "dcuResourceCores",
    "schedulerName",
    "global.gpuHookPath",
    "global.labels",
    "global.annotations",
    "scheduler.nodeName",
    "scheduler.nodeSelector",
    "scheduler.metricsBindAddress",
    "scheduler.kubeScheduler.extraNewArgs",
    "scheduler.kubeScheduler.extraArgs",
    "scheduler.extender.extraArgs",
    "scheduler.podAnnotations",
    "scheduler.tolerations",
    "scheduler.patch.priorityClassName",
    "scheduler.patch.podAnnotations",
    "scheduler.patch.nodeSelector",
    "scheduler.patch.tolerations",
    "scheduler.patch.runAsUser",
    "scheduler.service",
    "devicePlugin.deviceSplitCount",
    "devicePlugin.deviceMemoryScaling",
    "devicePlugin.deviceCoreScaling",
    "devicePlugin.runtimeClassName",
    "devicePlugin.migStrategy",
    "devicePlugin.disablecorelimit",
    "devicePlugin.extraArgs",
    "devicePlugin.service.httpPort",
    "devicePlugin.pluginPath",
    "devicePlugin.libPath",
    "devicePlugin.podAnnotations",
    "devicePlugin.tolerations",
)

# Former path to the present ones.
MOVED = {
    "version": ("global.imageTag",),
    "scheduler.kubeScheduler.imageTag": ("scheduler.kubeScheduler.image.tag",),
    "scheduler.kubeScheduler.imagePullPolicy": ("scheduler.kubeScheduler.image.pullPolicy",),
    "scheduler.extender.imagePullPolicy": ("scheduler.extender.image.pullPolicy",),
    "scheduler.customWebhook": ("scheduler.admissionWebhook.customURL",),
    "scheduler.mutatingWebhookConfiguration.failurePolicy": ("scheduler.admissionWebhook.failurePolicy",),
    "scheduler.patch.imagePullPolicy": ("scheduler.patch.image.pullPolicy", "scheduler.patch.imageNew.pullPolicy"),
    "devicePlugin.imagePullPolicy": ("devicePlugin.image.pullPolicy", "devicePlugin.monitor.image.pullPolicy"),
    "devicePlugin.monitorctrPath": ("devicePlugin.monitor.ctrPath",),
    "devicePlugin.nvidianodeSelector": ("devicePlugin.nvidiaNodeSelector",),
}

# Former path of an image's name to the present map with registry, repository and tag.
IMAGES = {
    "scheduler.kubeScheduler.image": "scheduler.kubeScheduler.image",
    "scheduler.extender.image": "scheduler.extender.image",
    "scheduler.patch.image": "scheduler.patch.image",
    "scheduler.patch.imageNew": "scheduler.patch.imageNew",
    "devicePlugin.image": "devicePlugin.image",
    "devicePlugin.monitorimage": "devicePlugin.monitor.image",
}

# What HAMi's chart has no value for, with the role's variable that does the same.
VARIABLES = {"scheduler.defaultMem": "default_memory", "scheduler.defaultCores": "default_cores"}

_HYGON = "HAMi's chart deploys no device plugin for Hygon's cards: deploy Hygon's own, and leave this value out"
_MLU = "HAMi's chart deploys no device plugin for Cambricon's cards: deploy Cambricon's own, and leave this value out"
_ILUVATAR = (
    "HAMi has a resource for each model of Iluvatar's cards (devices.iluvatar.customresources): enable "
    "devices.iluvatar, and leave this value out"
)
GONE = {
    "iluvatarResourceName": _ILUVATAR,
    "iluvatarResourceMem": _ILUVATAR,
    "iluvatarResourceCore": _ILUVATAR,
    "devicePlugin.hygonimage": _HYGON,
    "devicePlugin.hygondriver": _HYGON,
    "devicePlugin.hygonnodeSelector": _HYGON,
    "devicePlugin.mlunodeSelector": _MLU,
    "podSecurityPolicy.enabled": "Kubernetes 1.25 removed PodSecurityPolicy: the role sets the namespace's pod "
    "security labels; leave this value out",
}


class Translation(t.NamedTuple):
    """Values in terms of today's chart.

    :param variables: what the role's variables have to be for the rest, by name without ``hami_``.
    """

    values: JsonObject
    variables: JsonObject
    notes: list[Finding]
    problems: list[Finding]


def translate(given: JsonObject) -> Translation:
    """Map values of 4paradigm's time to today's; values of today stay as they are."""
    values = copy.deepcopy(given)
    variables: JsonObject = {}
    notes: list[Finding] = []
    problems = []
    for path, sentence in GONE.items():
        value = take(values, path)
        # False and empty ask for nothing.
        if value is not MISSING and value:
            problems.append(finding("value_gone", path, f"{path}: {sentence}"))
    for path, name in VARIABLES.items():
        value = take(values, path)
        if value is not MISSING:
            variables[name] = value
            notes.append(finding("value_is_variable", path, f"{path} is the variable hami_{name} now"))
    # Before what moves below the images' maps.
    for path, place in IMAGES.items():
        if isinstance(get(values, path), str):
            _move_image(values, path, place)
            notes.append(finding("value_moved", path, f"{path} is {place}.registry, repository and tag now"))
    for path, places in MOVED.items():
        value = take(values, path)
        if value is not MISSING:
            for place in places:
                _put_new(values, place, value)
            notes.append(finding("value_moved", path, f"{path} is {' and '.join(places)} now"))
    if "imagePullSecrets" in values:
        secrets = values.pop("imagePullSecrets") or []
        _put_new(
            values,
            "global.imagePullSecrets",
            [secret["name"] if isinstance(secret, dict) else secret for secret in secrets],
        )
        notes.append(finding("value_moved", "imagePullSecrets", "imagePullSecrets is global.imagePullSecrets now"))
    return Translation(values, variables, notes, problems)


def _put_new(values: JsonObject, path: str, value: t.Any) -> None:
    """Set a value unless today's path is set, too."""
    if get(values, path) is MISSING:
        put(values, path, value)


def _move_image(values: JsonObject, path: str, place: str) -> None:
    # Its pull policy and tag may be at their present place already.
    image = image_values(str(take(values, path)))
    for key, value in image.items():
        _put_new(values, f"{place}.{key}", value)


def image_values(reference: str) -> JsonObject:
    """Return an image's name as the chart takes it; without a tag the chart's own is kept.

    The chart puts its own registry before a repository unless the registry is empty.
    """
    repository, tag = repository_and_tag(reference)
    return {"registry": "", "repository": repository, **({"tag": tag} if tag else {})}
