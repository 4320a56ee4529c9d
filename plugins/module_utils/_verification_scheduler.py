# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What only the API tells of a scheduler: OpenShift's policy, the scheduler beside its own, and what guards its pods.

What can't be read is unknown and never taken for a pass, and one thing that can't be read doesn't hide the others.
"""

from __future__ import annotations

import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _gpushare as contract
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift as openshift
from ansible_collections.kubegpu.share.plugins.module_utils import _openshift_scheduler as own
from ansible_collections.kubegpu.share.plugins.module_utils import _scheduler_choice as choice
from ansible_collections.kubegpu.share.plugins.module_utils import _secondary_scheduler as secondary
from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import Json
from ansible_collections.kubegpu.share.plugins.module_utils._kube import Kube
from ansible_collections.kubegpu.share.plugins.module_utils._objects import Ref
from ansible_collections.kubegpu.share.plugins.module_utils._rollout import ready, unfinished

DENY, WARN, NONE = "deny", "warn", "none"
PROBLEM, UNKNOWN, PASSED = "problems", "unknown", "passed"
# Where it belongs in the story, and one sentence.
Finding = t.Tuple[str, str]

COMPONENT = "app.kubernetes.io/component"
# Of the admission policy and of its binding.
GUARD = choice.OWN
ADMISSION = "admissionregistration.k8s.io"
AGAIN = "run site.yml again"


def look_at_scheduler(kube: Kube, mode: str, admission: str, pods: t.Sequence[Json]) -> list[Finding]:
    """What is found in a mode whose scheduler isn't changed on machines.

    :param admission: what the admission policy does with a pod for another scheduler; ``none`` where there is none.
    """
    if mode == choice.DEDICATED:
        return _tried("whether a policy guards GPU pods", lambda: _guard(kube, admission, _minor(kube)))
    return _openshift(kube, admission, pods) if mode == choice.OPENSHIFT else []


def _tried(what: str, look: t.Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return look()
    except ShareError as error:
        return [(UNKNOWN, f"{what} can't be told: {error}")]


def _read(kube: Kube, ref: Ref) -> Json:
    """An object that is always there.

    :raises ShareError: it isn't, or this user doesn't see it.
    """
    live = kube.get(ref)
    if live is None:
        raise ShareError(f"the API server shows no {ref}")
    return live


# --------------------------------------------------------------------------- OpenShift


def _openshift(kube: Kube, admission: str, pods: t.Sequence[Json]) -> list[Finding]:
    try:
        version = openshift.version_of(_read(kube, openshift.CLUSTER_VERSION))
        release = openshift.release(version)
    except ShareError as error:
        return [(UNKNOWN, f"how this OpenShift's scheduler is set up can't be told: {error}")]
    if openshift.takes_policy(version):
        return _tried("whether kube-scheduler asks the extender", lambda: _policy(kube, release, pods))
    # What comes after the releases that are known here has what the newest of them has.
    minor = openshift.kubernetes_minor(version) or choice.POLICY_SINCE
    return [
        *_tried("which policy Scheduler/cluster names", lambda: _no_policy(kube, version)),
        *_tried("whether the secondary scheduler is at work", lambda: _secondary(kube)),
        # Before its first stable version OpenShift doesn't serve it.
        *(_tried("whether a policy guards GPU pods", lambda: _guard(kube, admission, minor)) if _stable(minor) else []),
    ]


def _named(kube: Kube) -> str:
    spec = _read(kube, openshift.SCHEDULER).get("spec") or {}
    return str((spec.get("policy") or {}).get("name") or "")


def _policy(kube: Kube, release: tuple[int, int], pods: t.Sequence[Json]) -> list[Finding]:
    name = _named(kube)
    if not name:
        return [(PROBLEM, f"Scheduler/cluster names no policy, so that kube-scheduler asks no extender; {AGAIN}")]
    live = kube.get(own.ref(name))
    if live is None:
        return [(PROBLEM, f"Scheduler/cluster names policy {name}, and {own.ref(name)} isn't there; {AGAIN}")]
    text = (live.get("data") or {}).get(own.KEY)
    if not _has_extender(text):
        said = f"policy {name} of Scheduler/cluster has no extender for {contract.RESOURCE_MEMORY}; {AGAIN}"
        return [(PROBLEM, said)]
    notes = live["metadata"].get("annotations") or {}
    whose = "ours" if own.USERS in notes else "the user's, with the extender in it"
    found = [(PASSED, f"Scheduler/cluster names policy {name}, which is {whose}")]
    if own.USERS in notes and (notes.get(own.PROVEN) != "true" or notes.get(own.LEAVING)):
        cut = f"whether policy {name} came into effect can't be told: a run that changed it was cut short; {AGAIN}"
        found.append((UNKNOWN, cut))
    if not own.takes_copy(release):
        said = f"OpenShift {release[0]}.{release[1]} doesn't show which policy its kube-scheduler was started with"
        return [*found, (UNKNOWN, said)]
    copy = kube.get(own.COPY)
    if ((copy or {}).get("data") or {}).get(own.KEY) != text:
        found.append((PROBLEM, f"OpenShift's operator hasn't taken policy {name} over: its copy ({own.COPY}) differs"))
    return [*found, *_pods(pods)]


def _has_extender(text: str | None) -> bool:
    try:
        extenders = json.loads(text or "").get("extenders") or []
        managed = [str(one.get("name")) for extender in extenders for one in extender.get("managedResources") or []]
    except (ValueError, AttributeError, TypeError):
        return False
    return contract.RESOURCE_MEMORY in managed


def _pods(pods: t.Sequence[Json]) -> list[Finding]:
    """Each kube-scheduler, and the extender beside it."""
    namespace, selector = own.PODS
    key, value = selector.split("=")
    mine = [pod for pod in pods if pod["metadata"].get("namespace") == namespace and _labelled(pod, key, value)]
    if not mine:
        return [(PROBLEM, f"no kube-scheduler runs in {namespace}")]
    extenders = [pod for pod in pods if _labelled(pod, *choice.PART_OF) and _labelled(pod, COMPONENT, "extender")]
    beside = {contract.pod_node(pod) for pod in extenders if ready(pod)}
    found = []
    for pod in sorted(mine, key=contract.pod_node):
        node = contract.pod_node(pod)
        if own.reads_policy(pod):
            found.append((PASSED, f"kube-scheduler on {node} was started with the policy"))
        else:
            found.append((PROBLEM, f"kube-scheduler on {node} was started without --policy-configmap"))
        if node not in beside:
            found.append((PROBLEM, f"no extender is ready on {node}, where kube-scheduler asks for one"))
    return found


def _labelled(pod: Json, key: str, value: str) -> bool:
    return (pod["metadata"].get("labels") or {}).get(key) == value


def _no_policy(kube: Kube, version: str) -> list[Finding]:
    name = _named(kube)
    if not name:
        return [(PASSED, "Scheduler/cluster names no policy")]
    return [
        (
            PROBLEM,
            f"Scheduler/cluster still names policy {name}, which degrades OpenShift {version}; where it is ours, "
            "module openshift_scheduler with state absent takes it out",
        )
    ]


def _secondary(kube: Kube) -> list[Finding]:
    live = kube.get(secondary.DEPLOYMENT)
    if live is None:
        return [(PROBLEM, f"the secondary scheduler doesn't run: {secondary.DEPLOYMENT} isn't there; {AGAIN}")]
    left = unfinished(live)
    if left:
        return [(PROBLEM, f"the secondary scheduler isn't ready: {left}")]
    pod = ((live.get("spec") or {}).get("template") or {}).get("spec") or {}
    mounted = [str((one.get("configMap") or {}).get("name") or "") for one in pod.get("volumes") or []]
    texts = [((kube.get(secondary.ref(name)) or {}).get("data") or {}).get(secondary.KEY) for name in mounted if name]
    if not [text for text in texts if contract.RESOURCE_MEMORY in str(text)]:
        return [(PROBLEM, f"the secondary scheduler's configuration has no extender of ours; {AGAIN}")]
    return [(PASSED, "the secondary scheduler is ready, with the extender in its configuration")]


# --------------------------------------------------------------------------- the admission policy


def _minor(kube: Kube) -> int:
    said = str(kube.version().get("gitVersion") or "")
    found = re.match(r"v?1\.(\d+)", said)
    if not found:
        raise ShareError(f"the API server says that it is {said!r}, which is no version of Kubernetes")
    return int(found.group(1))


def _stable(minor: int) -> bool:
    return minor >= choice.POLICY_SINCE


def _guard(kube: Kube, admission: str, minor: int) -> list[Finding]:
    if admission == NONE or not _served(kube, minor):
        return []
    api = f"{ADMISSION}/{'v1' if _stable(minor) else 'v1beta1'}"
    policy = Ref(api, "ValidatingAdmissionPolicy", "", GUARD)
    bound = Ref(api, "ValidatingAdmissionPolicyBinding", "", GUARD)
    follows = f"so that a GPU pod for another scheduler is bound without a card; {AGAIN}"
    if kube.get(policy) is None:
        return [(PROBLEM, f"{policy} isn't there, {follows}")]
    live = kube.get(bound)
    if live is None:
        return [(PROBLEM, f"{bound} isn't there, {follows}")]
    spec = live.get("spec") or {}
    if spec.get("policyName") != GUARD or admission.capitalize() not in (spec.get("validationActions") or []):
        return [(PROBLEM, f"{bound} doesn't {admission} what {policy} finds; {AGAIN}")]
    verb = "refused" if admission == DENY else "warned of"
    return [(PASSED, f"GPU pods for another scheduler are {verb}")]


def _served(kube: Kube, minor: int) -> bool:
    """Stable versions are served everywhere; a beta only where somebody turned it on."""
    if _stable(minor):
        return True
    beta = Ref("apiregistration.k8s.io/v1", "APIService", "", f"v1beta1.{ADMISSION}")
    return minor >= choice.POLICY_BETA_SINCE and kube.get(beta) is not None
