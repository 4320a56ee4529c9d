# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""KubeSchedulerConfiguration: which version of it a kube-scheduler reads, and an extender's place in it. Pure."""

from __future__ import annotations

import base64
import dataclasses
import re
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.plugin_utils import _extender_list
from ansible_collections.kubegpu.share.plugins.plugin_utils._extender_list import (
    RESOURCE,
    has_exactly,
    opened,
    put_in,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_decode import Decoded, Source
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_fields import CONFIGURATION, KNOWN_UP_TO
from ansible_collections.kubegpu.share.plugins.plugin_utils._scheduler_rules import validate

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
CONFIG_SINCE = API_VERSIONS[-1][0]
NO_POLICY_SINCE = 23
# Up to here it has a port without TLS, too.
INSECURE_UP_TO = 22
INSECURE_PORT = "10251"

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
    "lock-object-name": ("leaderElection", "resourceName"),
    "lock-object-namespace": ("leaderElection", "resourceNamespace"),
    "leader-elect-resource-lock": ("leaderElection", "resourceLock"),
    "leader-elect-resource-name": ("leaderElection", "resourceName"),
    "leader-elect-resource-namespace": ("leaderElection", "resourceNamespace"),
    "profiling": ("enableProfiling",),
    "contention-profiling": ("enableContentionProfiling",),
}


@dataclasses.dataclass(frozen=True)
class Tls:
    """The certificates with which kube-scheduler and the extender know each other, each as PEM text.

    :param authority: who signed the extender's.
    """

    authority: str
    certificate: str
    key: str

    def entry(self) -> Json:
        parts = {"caData": self.authority, "certData": self.certificate, "keyData": self.key}
        return {name: base64.b64encode(text.encode()).decode() for name, text in parts.items()}


@dataclasses.dataclass(frozen=True)
class Extender:
    """How kube-scheduler reaches the extender.

    :param preempts: whether kube-scheduler asks it whom to evict; without, it evicts by a node's sums and may free
        memory on several cards of which none is enough.
    :param tls: None where they talk on a loopback address.
    """

    url: str
    timeout_seconds: int
    preempts: bool = False
    tls: Tls | None = None

    def entry(self) -> Json:
        return {
            "urlPrefix": self.url,
            "filterVerb": "filter",
            **({"preemptVerb": "preempt"} if self.preempts else {}),
            "bindVerb": "bind",
            "enableHTTPS": self.tls is not None,
            **({"tlsConfig": self.tls.entry()} if self.tls else {}),
            "httpTimeout": f"{self.timeout_seconds}s",
            "nodeCacheCapable": True,
            # A pod that asks for memory of a GPU mustn't be bound by anybody who doesn't know which card.
            "ignorable": False,
            "managedResources": [dict(RESOURCE)],
        }


def minor_of(image: str, version: str | None) -> int:
    """Minor version of a kube-scheduler.

    :param version: what the user says it is; otherwise the image's tag tells.
    :raises BadInput: it can't be told.
    """
    tag = version or image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    found = re.match(r"^v?1\.([0-9]+)(?:[.+-].*)?$", tag)
    if not found:
        if version:
            raise BadInput(f"scheduler_version: {version!r} isn't a Kubernetes version such as 1.36.3")
        raise BadInput(
            f"scheduler_version: kube-scheduler's version can't be told from its image {image!r}; set this variable"
        )
    return int(found.group(1))


def form_of(minor: int, wanted: str) -> t.Literal["policy", "config"]:
    """What kube-scheduler 1.``minor`` is given: a Policy or a KubeSchedulerConfiguration.

    :param wanted: auto, policy or config, as the user says.
    :raises BadInput: it doesn't read what is wanted.
    """
    if wanted == "policy" and minor >= NO_POLICY_SINCE:
        raise BadInput(
            f"scheduler_configuration: kube-scheduler 1.{minor} reads no Policy, which 1.{NO_POLICY_SINCE} removed; "
            "use auto or config"
        )
    if wanted == "config" and minor < CONFIG_SINCE:
        raise BadInput(
            f"scheduler_configuration: kube-scheduler 1.{minor} takes extenders from a Policy only; use auto or policy"
        )
    if wanted == "auto":
        return "policy" if minor < CONFIG_SINCE else "config"
    return "policy" if wanted == "policy" else "config"


def api_versions(minor: int) -> tuple[str, tuple[str, ...]]:
    """The version of the configuration to write for 1.``minor``, and all that it reads.

    :raises BadInput: none of those that are served here.
    """
    form_of(minor, "config")
    _first, write, reads = next(row for row in API_VERSIONS if row[0] <= minor)
    return write, reads


def outlived(minor: int) -> tuple[str, int, int] | None:
    """What becomes of a configuration that is written for 1.``minor`` when the cluster is upgraded.

    :returns: its version, the first minor version for which another is written, and the first that doesn't read it;
        None where none is known.
    """
    write, _reads = api_versions(minor)
    later = [(one, *api_versions(one)) for one in range(minor + 1, API_VERSIONS[0][0] + 1)]
    better = next((one for one, written, _reads in later if written != write), 0)
    lost = next((one for one, _written, reads in later if write not in reads), 0)
    return (write, better, lost) if lost else None


def insecure_addresses(minor: int, flags: t.Mapping[str, str]) -> Json:
    """Where kube-scheduler serves without TLS, as its flags say: a configuration makes it forget --address and --port.

    With a configuration it can't be told to open no such port: it refuses 0, and takes an empty address for the
    default, which is every address of the machine. In the place of none it gets the loopback address.
    """
    if minor > INSECURE_UP_TO:
        return {}
    address, port = flags.get("address") or "0.0.0.0", flags.get("port") or INSECURE_PORT
    if port == "0":
        address, port = "127.0.0.1", INSECURE_PORT
    both = f"{f'[{address}]' if ':' in address else address}:{port}"
    return {"healthzBindAddress": both, "metricsBindAddress": both}


def from_flags(flags: t.Mapping[str, str]) -> Json:
    """What a configuration file has to say so that kube-scheduler goes on as its flags told it."""
    config: Json = {"leaderElection": {"leaderElect": True}}
    for name, path in _FLAGS.items():
        if name not in flags:
            continue
        place = config
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = _typed(path[-1], name, flags[name])
    profile = _profile(flags)
    return {**config, "profiles": [profile]} if profile else config


def _profile(flags: t.Mapping[str, str]) -> Json:
    """What flags of kube-scheduler up to 1.22 say of its only profile."""
    profile: Json = {}
    if flags.get("scheduler-name"):
        profile["schedulerName"] = flags["scheduler-name"]
    weight = "hard-pod-affinity-symmetric-weight"
    if weight in flags:
        args = {"hardPodAffinityWeight": _typed("hardPodAffinityWeight", weight, flags[weight])}
        profile.setdefault("schedulerName", "default-scheduler")
        profile["pluginConfig"] = [{"name": "InterPodAffinity", "args": args}]
    return profile


def _typed(field: str, flag: str, text: str) -> t.Any:
    if field in ("leaderElect", "enableProfiling", "enableContentionProfiling"):
        # A flag without a value means yes.
        return text.lower() in ("", "true", "t", "1")
    try:
        if field in ("burst", "hardPodAffinityWeight"):
            return int(text)
        return float(text) if field == "qps" else text
    except ValueError:
        raise BadInput(f"kube-scheduler's --{flag}={text} isn't a number") from None


def new_config(minor: int, flags: t.Mapping[str, str], extender: Extender) -> str:
    """A whole configuration for a kube-scheduler that had none."""
    write, _reads = api_versions(minor)
    told = {**from_flags(flags), **insecure_addresses(minor, flags)}
    config = {"apiVersion": f"{GROUP}/{write}", "kind": KIND, **told, "extenders": [extender.entry()]}
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
    _decoded(path, text, minor)
    extenders = opened(path, text)
    put_in(path, extenders, extender.entry(), fold=False)
    check(path, text, minor)
    after = extenders.checked()
    check(path, after, minor)
    return after


def without(path: str, text: str) -> str:
    """The user's configuration with our extender taken out."""
    return _extender_list.without(path, text, fold=False)


def undone(path: str, text: str, before: str, extender: Extender) -> str:
    """The user's configuration without our extender, and with the one that ours took the place of.

    :param before: what the file held before ours came; changed since then.
    """
    return _extender_list.undone(path, text, before, extender.url, fold=False)


def has(path: str, text: str, extender: Extender) -> bool:
    """Whether an extender there can only be ours."""
    return has_exactly(path, text, extender.entry(), fold=False)


def check(path: str, text: str, minor: int) -> None:
    """Refuse what kube-scheduler 1.``minor`` would refuse: it decodes strictly, and validates.

    :raises BadInput: one sentence with the line and the path of the field.
    """
    config = _decoded(path, text, minor)
    if config:
        validate(config, minor, str(config.tree["apiVersion"]).partition("/")[2])


def _decoded(path: str, text: str, minor: int) -> Decoded | None:
    """None for a kube-scheduler that may know more fields than are known here."""
    source = Source(path, text)
    if source.top("kind") != KIND:
        raise BadInput(f"{path} isn't a {KIND}")
    asked = source.top("apiVersion")
    group, _slash, version = str(asked).partition("/")
    _write, reads = api_versions(minor)
    if group != GROUP or version not in reads:
        raise BadInput(f"{path}: kube-scheduler 1.{minor} doesn't read {asked}; it reads {', '.join(reads)}")
    return source.decode(CONFIGURATION, minor, version, strict=True) if minor <= KNOWN_UP_TO else None
