# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""KubeSchedulerConfiguration: which version of it a kube-scheduler reads, and the extender in it. Pure.

https://kubernetes.io/docs/reference/config-api/kube-scheduler-config.v1/
"""

from __future__ import annotations

import re
import typing as t

import yaml

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._scheduler.constants import CONFIG
from ...module_utils._scheduler.control_plane import INSECURE_PORT
from .decode import Decoded, Source
from .extenders import BESIDE
from .form import Extender, Form, FormName
from .schema import ALPHA_CONFIGURATION, CONFIGURATION, KNOWN_UP_TO
from .validate import validate

GROUP = "kubescheduler.config.k8s.io"
KIND = "KubeSchedulerConfiguration"

# From which minor version of 1.x on, newest first: the version to write, and all that are read.
API_VERSIONS: tuple[tuple[int, str, tuple[str, ...]], ...] = (
    (29, "v1", ("v1",)),
    (28, "v1", ("v1beta3", "v1")),
    (25, "v1", ("v1beta2", "v1beta3", "v1")),
    (23, "v1beta3", ("v1beta2", "v1beta3")),
    (22, "v1beta2", ("v1beta1", "v1beta2")),
    (19, "v1beta1", ("v1beta1",)),
)
CONFIG_SINCE = API_VERSIONS[-1][0]
# Its v1alpha2 holds extenders too, as a Policy has them: a user's own file gets ours, and a new file is a Policy.
# https://github.com/kubernetes/kubernetes/blob/v1.18.19/staging/src/k8s.io/kube-scheduler/config/v1alpha2/types.go
ALPHA_MINOR, ALPHA = 18, "v1alpha2"
NO_POLICY_SINCE = 23
LIVEZ_SINCE = 31
# Up to here kube-scheduler also has a port without TLS.
INSECURE_UP_TO = 22
HEAD = "# Written by kubegpu.share: changes to this file are overwritten.\n"

# With --config kube-scheduler ignores these flags (the leader election's before 1.23), so the file repeats them.
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


def minor_of(image: str, version: str | None) -> int:
    """Return the minor version of a kube-scheduler.

    :param version: the version that the user sets; without it the image's tag counts.
    :raises BadInput: neither has one.
    """
    tag = version or image.partition("@")[0].rpartition("/")[2].partition(":")[2]
    found = re.match(r"^v?1\.([0-9]+)(?:[.+-].*)?$", tag)
    if not found:
        if version:
            raise BadInput(f"scheduler_version: {version!r} isn't a Kubernetes version such as 1.36.3")
        raise BadInput(
            f"scheduler_version: the tag of kube-scheduler's image {image!r} has no version; set this variable"
        )
    return int(found.group(1))


def form_of(minor: int, wanted: str) -> FormName:
    """Return the form that kube-scheduler 1.``minor`` gets.

    :param wanted: auto, policy or config, as the user requests it.
    :raises BadInput: kube-scheduler doesn't read the requested form.
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
    """Return the version of the configuration to write for 1.``minor``, and all versions that it reads.

    :raises BadInput: it reads none that is known here.
    """
    form_of(minor, "config")
    _first, write, reads = next(row for row in API_VERSIONS if row[0] <= minor)
    return write, reads


def outlived(minor: int) -> tuple[str, int, int] | None:
    """Return which upgrades a configuration written for 1.``minor`` doesn't survive.

    :returns: its version, the first minor version for which another is written, and the first that doesn't read it;
        None where no such version is known.
    """
    write, _reads = api_versions(minor)
    later = [(one, *api_versions(one)) for one in range(minor + 1, API_VERSIONS[0][0] + 1)]
    better = next((one for one, written, _reads in later if written != write), 0)
    lost = next((one for one, _written, reads in later if write not in reads), 0)
    return (write, better, lost) if lost else None


def health_paths(minor: int) -> tuple[str, ...]:
    """Return the paths of kube-scheduler 1.``minor`` for liveness and, where it differs, readiness."""
    return ("/livez", "/readyz") if minor >= LIVEZ_SINCE else ("/healthz",)


def insecure_addresses(minor: int, flags: t.Mapping[str, str]) -> JsonObject:
    """Return the fields that replace --address and --port, which kube-scheduler ignores with a configuration.

    A configuration can't close the port without TLS: kube-scheduler refuses 0, and an empty address means every address
    of the machine. So a closed port becomes one on the loopback address.
    """
    if minor > INSECURE_UP_TO:
        return {}
    address, port = flags.get("address") or "0.0.0.0", flags.get("port") or INSECURE_PORT
    if port == "0":
        address, port = "127.0.0.1", INSECURE_PORT
    both = f"{f'[{address}]' if ':' in address else address}:{port}"
    return {"healthzBindAddress": both, "metricsBindAddress": both}


def from_flags(flags: t.Mapping[str, str]) -> JsonObject:
    """Return the fields of a configuration that have the same effect as kube-scheduler's flags."""
    config: JsonObject = {"leaderElection": {"leaderElect": True}}
    for name, path in _FLAGS.items():
        if name not in flags:
            continue
        place = config
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = _typed(path[-1], name, flags[name])
    profile = _profile(flags)
    return {**config, "profiles": [profile]} if profile else config


def _profile(flags: t.Mapping[str, str]) -> JsonObject:
    """Return the profile that flags of kube-scheduler up to 1.22 describe."""
    profile: JsonObject = {}
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
        # A flag without a value means true.
        return text.lower() in ("", "true", "t", "1")
    try:
        if field in ("burst", "hardPodAffinityWeight"):
            return int(text)
        return float(text) if field == "qps" else text
    except ValueError:
        raise BadInput(f"kube-scheduler's --{flag}={text} isn't a number") from None


class Config(Form):
    """A KubeSchedulerConfiguration."""

    name, flag, path, kind = "config", "config", CONFIG, KIND

    def like_policy(self, text: str) -> bool:
        try:
            return ALPHA in text and Source("", text).top("apiVersion") == f"{GROUP}/{ALPHA}"
        except BadInput:
            # Whoever edits the file reports that.
            return False

    def new(self, minor: int, flags: t.Mapping[str, str], extender: Extender) -> str:
        return generate(minor, {**from_flags(flags), **insecure_addresses(minor, flags)}, extender, HEAD)

    def decode(self, path: str, text: str, minor: int | None) -> Decoded | None:
        source = Source(path, text)
        self.require_kind(path, source.top("kind"))
        minor = API_VERSIONS[0][0] if minor is None else minor
        given = source.top("apiVersion")
        group, _slash, version = str(given).partition("/")
        if minor == ALPHA_MINOR and given == f"{GROUP}/v1alpha1":
            raise BadInput(f"{path}: {given} has no extenders; convert it to {ALPHA}, or {BESIDE}")
        reads = (ALPHA,) if minor == ALPHA_MINOR else api_versions(minor)[1]
        if group != GROUP or version not in reads:
            raise BadInput(f"{path}: kube-scheduler 1.{minor} doesn't read {given}; it reads {', '.join(reads)}")
        shape = ALPHA_CONFIGURATION if version == ALPHA else CONFIGURATION
        return source.decode(shape, minor, version, strict=True) if minor <= KNOWN_UP_TO else None

    def validate(self, decoded: Decoded, minor: int | None) -> None:
        version = str(decoded.tree["apiVersion"]).partition("/")[2]
        validate(decoded, API_VERSIONS[0][0] if minor is None else minor, version)


FORM = Config()


def generate(minor: int, fields: JsonObject, extender: Extender, head: str = "") -> str:
    """Return a new configuration.

    :param minor: of kube-scheduler 1.``minor``.
    :param fields: all but version, kind and extenders.
    :param head: a comment for the top of the file.
    :raises BadInput: kube-scheduler would refuse it.
    """
    write, _reads = api_versions(minor)
    config = {"apiVersion": f"{GROUP}/{write}", "kind": KIND, **fields, "extenders": [extender.entry()]}
    order = ("apiVersion", "kind", "clientConnection", "leaderElection")
    ordered = {key: config[key] for key in (*order, *config) if key in config}
    text = head + str(yaml.safe_dump(ordered, sort_keys=False, default_flow_style=False))
    FORM.check("the new configuration", text, minor)
    return text
