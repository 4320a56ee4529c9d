# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""KubeSchedulerConfiguration: which version of it a kube-scheduler reads, and an extender's place in it. Pure."""

from __future__ import annotations

import dataclasses
import re
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._gpushare import RESOURCE_MEMORY
from ansible_collections.kubegpu.share.plugins.plugin_utils._yaml_document import Document, Path

Json = dict[str, t.Any]

GROUP = "kubescheduler.config.k8s.io"
KIND = "KubeSchedulerConfiguration"

# First minor version of 1.x with this answer, newest first: what to write, and what else is read.
API_VERSIONS: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (29, "v1", ("v1",)),
    (28, "v1", ("v1beta3", "v1")),
    (25, "v1", ("v1beta2", "v1beta3", "v1")),
    (23, "v1beta3", ("v1beta2", "v1beta3")),
    (22, "v1beta2", ("v1beta1", "v1beta2")),
    (19, "v1beta1", ("v1beta1",)),
)
# The newest minor version whose fields are listed below; a newer one may know more.
FIELDS_KNOWN_UP_TO = 36

_TOP = {
    "apiVersion",
    "kind",
    "parallelism",
    "leaderElection",
    "clientConnection",
    "enableProfiling",
    "enableContentionProfiling",
    "percentageOfNodesToScore",
    "podInitialBackoffSeconds",
    "podMaxBackoffSeconds",
    "profiles",
    "extenders",
}
_TOP_MORE = {
    "v1beta1": {"healthzBindAddress", "metricsBindAddress"},
    "v1beta2": {"healthzBindAddress", "metricsBindAddress"},
    "v1beta3": set[str](),
    "v1": {"delayCacheUntilActive"},
}
_LEADER_ELECTION = {
    "leaderElect",
    "leaseDuration",
    "renewDeadline",
    "retryPeriod",
    "resourceLock",
    "resourceName",
    "resourceNamespace",
}
_CLIENT_CONNECTION = {"kubeconfig", "acceptContentTypes", "contentType", "qps", "burst"}
_EXTENDER = {
    "urlPrefix",
    "filterVerb",
    "preemptVerb",
    "prioritizeVerb",
    "weight",
    "bindVerb",
    "enableHTTPS",
    "tlsConfig",
    "httpTimeout",
    "nodeCacheCapable",
    "managedResources",
    "ignorable",
}
_RESOURCE = {"name", "ignoredByScheduler"}

# With --config kube-scheduler ignores these flags, before 1.23 the leader election's too: the file repeats them.
_FLAGS: dict[str, tuple[str, ...]] = {
    "kubeconfig": ("clientConnection", "kubeconfig"),
    "kube-api-content-type": ("clientConnection", "contentType"),
    "kube-api-qps": ("clientConnection", "qps"),
    "kube-api-burst": ("clientConnection", "burst"),
    "leader-elect": ("leaderElection", "leaderElect"),
    "leader-elect-lease-duration": ("leaderElection", "leaseDuration"),
    "leader-elect-renew-deadline": ("leaderElection", "renewDeadline"),
    "leader-elect-retry-period": ("leaderElection", "retryPeriod"),
    "leader-elect-resource-lock": ("leaderElection", "resourceLock"),
    "leader-elect-resource-name": ("leaderElection", "resourceName"),
    "leader-elect-resource-namespace": ("leaderElection", "resourceNamespace"),
    "profiling": ("enableProfiling",),
    "contention-profiling": ("enableContentionProfiling",),
}


@dataclasses.dataclass(frozen=True)
class Extender:
    """How kube-scheduler reaches the extender."""

    url: str
    timeout_seconds: int

    def entry(self) -> Json:
        return {
            "urlPrefix": self.url,
            "filterVerb": "filter",
            "bindVerb": "bind",
            "enableHTTPS": False,
            "httpTimeout": f"{self.timeout_seconds}s",
            "nodeCacheCapable": True,
            # A pod that asks for memory of a GPU mustn't be bound by anybody who doesn't know which card.
            "ignorable": False,
            "managedResources": [{"name": RESOURCE_MEMORY, "ignoredByScheduler": False}],
        }


def minor_of(image: str, version: str | None) -> int:
    """Minor version of a kube-scheduler.

    :param version: what the user says it is; otherwise the image's tag tells.
    :raises BadInput: it can't be told, or isn't served here.
    """
    tag = version or image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    found = re.match(r"^v?1\.([0-9]+)(?:[.+-].*)?$", tag)
    if not found:
        if version:
            raise BadInput(f"scheduler_version: {version!r} isn't a Kubernetes version such as 1.36.3")
        raise BadInput(
            f"scheduler_version: kube-scheduler's version can't be told from its image {image!r}; set this variable"
        )
    minor = int(found.group(1))
    if minor < API_VERSIONS[-1][0]:
        raise BadInput(
            f"scheduler_mode: kube-scheduler 1.{minor} takes extenders from a Policy file only, which isn't supported"
        )
    return minor


def api_versions(minor: int) -> tuple[str, tuple[str, ...]]:
    """The version of the configuration to write for 1.``minor``, and all that it reads."""
    _first, write, reads = next(row for row in API_VERSIONS if row[0] <= minor)
    return write, reads


def from_flags(flags: t.Mapping[str, str]) -> Json:
    """What a configuration file has to say so that kube-scheduler goes on as its flags told it."""
    config: Json = {"leaderElection": {"leaderElect": True}}
    for name, path in _FLAGS.items():
        if name not in flags:
            continue
        place = config
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = _typed(path[-1], flags[name])
    return config


def _typed(field: str, text: str) -> t.Any:
    if field in ("leaderElect", "enableProfiling", "enableContentionProfiling"):
        # A flag without a value means yes.
        return text.lower() in ("", "true", "t", "1")
    if field == "burst":
        return int(text)
    return float(text) if field == "qps" else text


def new_config(minor: int, flags: t.Mapping[str, str], extender: Extender) -> str:
    """A whole configuration for a kube-scheduler that had none."""
    write, _reads = api_versions(minor)
    config = {"apiVersion": f"{GROUP}/{write}", "kind": KIND, **from_flags(flags), "extenders": [extender.entry()]}
    order = ("apiVersion", "kind", "clientConnection", "leaderElection")
    ordered = {key: config[key] for key in (*order, *config) if key in config}
    text = "# Written by kubegpu.share: what is changed here is lost.\n"
    text += str(yaml.safe_dump(ordered, sort_keys=False, default_flow_style=False))
    check("the new configuration", text, minor)
    return text


def merged(path: str, text: str, minor: int, extender: Extender) -> str:
    """The user's configuration with our extender in it; all else, comments included, stays as it is.

    :raises BadInput: it can't be: another extender binds, the file isn't one that this kube-scheduler reads.
    """
    document = Document(path, text)
    check(path, text, minor)
    mine = _ours(path, document, extender.url)
    if mine is None:
        document.append(("extenders",), extender.entry())
    else:
        _refresh(document, mine, extender)
    after = document.checked()
    check(path, after, minor)
    return after


def without(path: str, text: str) -> str:
    """The user's configuration with our extender taken out."""
    document = Document(path, text)
    mine = _ours(path, document, None)
    if mine is not None:
        document.delete(("extenders", mine))
    return document.checked()


def _refresh(document: Document, number: int, extender: Extender) -> None:
    here: Path = ("extenders", number)
    old = document.get(here)
    for key, value in extender.entry().items():
        if key == "managedResources":
            _refresh_resources(document, here)
        elif old.get(key) != value:
            document.set((*here, key), value)
    for key in ("prioritizeVerb", "weight", "preemptVerb", "tlsConfig"):
        # Calls that our extender doesn't serve.
        if key in old:
            document.delete((*here, key))


def _refresh_resources(document: Document, here: Path) -> None:
    resources = document.get((*here, "managedResources")) or []
    names = [one.get("name") for one in resources]
    if RESOURCE_MEMORY not in names:
        document.append((*here, "managedResources"), {"name": RESOURCE_MEMORY, "ignoredByScheduler": False})
    elif resources[names.index(RESOURCE_MEMORY)].get("ignoredByScheduler"):
        document.set((*here, "managedResources", names.index(RESOURCE_MEMORY), "ignoredByScheduler"), False)


def _ours(path: str, document: Document, url: str | None) -> int | None:
    """Number of the extender that is gpushare's: it manages the resource, or is reached where ours is.

    :raises BadInput: there are two, or another one binds too.
    """
    extenders = document.get(("extenders",)) or []
    mine = [number for number, one in enumerate(extenders) if _manages(one) or (url and one.get("urlPrefix") == url)]
    if len(mine) > 1:
        raise BadInput(f"{path} has {len(mine)} extenders for {RESOURCE_MEMORY}, and kube-scheduler accepts one")
    binders = [
        one.get("urlPrefix") for number, one in enumerate(extenders) if number not in mine and one.get("bindVerb")
    ]
    if binders and url:
        raise BadInput(
            f"scheduler_mode: {path} has an extender that binds pods already ({binders[0]}), and kube-scheduler "
            "accepts only one of these"
        )
    return mine[0] if mine else None


def _manages(extender: Json) -> bool:
    return any(one.get("name") == RESOURCE_MEMORY for one in extender.get("managedResources") or [])


# --------------------------------------------------------------------------- fields


def check(path: str, text: str, minor: int) -> None:
    """Refuse what kube-scheduler 1.``minor`` would refuse, as far as fields and versions go: it decodes strictly.

    :raises BadInput: one sentence with the path of the field.
    """
    config = yaml.safe_load(text)
    if not isinstance(config, dict) or config.get("kind") != KIND:
        raise BadInput(f"{path} isn't a {KIND}")
    group, _slash, version = str(config.get("apiVersion")).partition("/")
    _write, reads = api_versions(minor)
    if group != GROUP or version not in reads:
        raise BadInput(
            f"{path}: kube-scheduler 1.{minor} doesn't read {config.get('apiVersion')}; it reads {', '.join(reads)}"
        )
    if minor > FIELDS_KNOWN_UP_TO:
        return
    _check_fields(path, "", config, _TOP | _TOP_MORE[version])
    _check_fields(path, "leaderElection.", config.get("leaderElection"), _LEADER_ELECTION)
    _check_fields(path, "clientConnection.", config.get("clientConnection"), _CLIENT_CONNECTION)
    for number, extender in enumerate(_list(path, "extenders", config.get("extenders"))):
        _check_fields(path, f"extenders[{number}].", extender, _EXTENDER)
        place = f"extenders[{number}].managedResources"
        for resource in _list(path, place, extender.get("managedResources")):
            _check_fields(path, f"{place}.", resource, _RESOURCE)


def _list(path: str, place: str, value: t.Any) -> list[t.Any]:
    if value is not None and (not isinstance(value, list) or not all(isinstance(one, dict) for one in value)):
        raise BadInput(f"{path}: {place} isn't a list of mappings")
    return value or []


def _check_fields(path: str, place: str, value: t.Any, known: set[str]) -> None:
    if value is not None and not isinstance(value, dict):
        raise BadInput(f"{path}: {place.rstrip('.')} isn't a mapping")
    for key in value or {}:
        if key not in known:
            raise BadInput(f"{path}: kube-scheduler knows no field {place}{key}")
