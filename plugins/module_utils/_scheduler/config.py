# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""KubeSchedulerConfiguration and Policy: their versions, the extender in them, and the merge with a user's. Pure.

https://kubernetes.io/docs/reference/config-api/kube-scheduler-config.v1/

A new one has no predicates and priorities, so kube-scheduler uses its defaults.
https://github.com/kubernetes/kubernetes/blob/v1.22.17/staging/src/k8s.io/kube-scheduler/config/v1/types.go

The note is kept on the machine. It records that the extender is ours where a regenerated manifest no longer does, and
restores the extender that ours replaced.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import re
import typing as t

from .._core.digest import digest
from .._core.errors import BadInput
from .._core.libraries import yaml
from .._core.types import JsonObject
from .._documents.yaml_tree import Loader
from .constants import CONFIG, CONTAINER
from .constants import POLICY as PATH
from .control_plane import INSECURE_PORT
from .decode import Decoded, Source
from .extenders import BESIDE, AnotherBinds, Extender, Extenders
from .schema import ALPHA_CONFIGURATION, CONFIGURATION, KNOWN_UP_TO, POLICY
from .validate import validate, validate_extenders

FormName = t.Literal["config", "policy"]
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
# From here on the flags of the leader election override the configuration's fields.
FLAGS_LEAD_SINCE = 23
# With these locks kube-schedulers don't use a lease.
NO_LEASE = ("endpoints", "configmaps")
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
    match = re.match(r"^v?1\.([0-9]+)(?:[.+-].*)?$", tag)
    if not match:
        if version:
            raise BadInput(f"scheduler_version: {version!r} isn't a Kubernetes version such as 1.36.3")
        raise BadInput(
            f"scheduler_version: the tag of kube-scheduler's image {image!r} has no version; set this variable"
        )
    return int(match.group(1))


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
    later = [(number, *api_versions(number)) for number in range(minor + 1, API_VERSIONS[0][0] + 1)]
    better = next((number for number, written, _reads in later if written != write), 0)
    lost = next((number for number, _written, reads in later if write not in reads), 0)
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


def lease_of(text: str | None, flags: t.Mapping[str, str], minor: int) -> tuple[str, str] | None:
    """Return namespace and name of the lease by which kube-schedulers elect a leader; None where they use none.

    :param text: the configuration; None where it has none.
    :param flags: kube-scheduler's flags.
    :param minor: of kube-scheduler 1.``minor``.
    """
    try:
        configured = (yaml.load(text, Loader=Loader) or {}).get("leaderElection") if text else None
    except (yaml.YAMLError, AttributeError, ValueError, RecursionError):
        configured = None
    election = dict(configured) if isinstance(configured, dict) else {}
    if text is None or minor >= FLAGS_LEAD_SINCE:
        by_flags = from_flags(flags)["leaderElection"]
        if "leader-elect" not in flags:
            del by_flags["leaderElect"]
        election.update(by_flags)
    if election.get("leaderElect") is False or election.get("resourceLock") in NO_LEASE:
        return None
    return str(election.get("resourceNamespace") or "kube-system"), str(election.get("resourceName") or CONTAINER)


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


class Form(abc.ABC):
    """One form: its names, its rules, and how the extender gets into a file and out of it.

    ``flag`` is kube-scheduler's flag without dashes, and ``path`` the collection's own file.
    """

    name: FormName
    flag: str
    path: str
    kind: str

    @abc.abstractmethod
    def like_policy(self, text: str) -> bool:
        """Return whether a file has extenders as a Policy has them: their keys may be written in any case."""

    @abc.abstractmethod
    def new(self, minor: int, flags: t.Mapping[str, str], extender: Extender) -> str:
        """Return a complete file for kube-scheduler 1.``minor``, which had none."""

    @abc.abstractmethod
    def decode(self, path: str, text: str, minor: int | None) -> Decoded | None:
        """Decode a file as kube-scheduler 1.``minor`` does; None where that may know more fields than are known here.

        :raises BadInput: kube-scheduler would refuse it.
        """

    @abc.abstractmethod
    def validate(self, decoded: Decoded, minor: int | None) -> None:
        """Refuse values that kube-scheduler would refuse.

        :raises BadInput: with the line and the path of the field.
        """

    def check(self, path: str, text: str, minor: int | None) -> None:
        """Refuse a file that kube-scheduler 1.``minor`` would refuse.

        :raises BadInput: with the line and the path of the field.
        """
        decoded = self.decode(path, text, minor)
        if decoded is not None:
            self.validate(decoded, minor)

    def merged(self, path: str, text: str, minor: int | None, extender: Extender) -> str:
        """Return the user's file with our extender in it; all else, comments included, stays byte for byte.

        :param path: of the file, for messages.
        :param minor: of kube-scheduler 1.``minor``; None where it is unknown, for a Policy only.
        :raises BadInput: another extender binds pods, or kube-scheduler would refuse the file.
        """
        self.decode(path, text, minor)
        edited = self._extenders(path, text)
        edited.put_in(self._entry(text, extender))
        self.check(path, text, minor)
        after = edited.checked()
        self.check(path, after, minor)
        return after

    def without(self, path: str, text: str) -> str:
        """Return the user's file without our extender."""
        edited = self._extenders(path, text)
        edited.remove()
        return edited.checked()

    def undone(self, path: str, text: str, before: str, extender: Extender) -> str:
        """Return the user's file without our extender, and with the one that ours replaced.

        :param path: of the file, for messages.
        :param before: the file before ours was merged; it was edited since then.
        """
        edited = self._extenders(path, text)
        edited.undo(self._extenders(path, before), extender.url)
        return edited.checked()

    def has(self, path: str, text: str | None, extender: Extender) -> bool:
        """Return whether the file has an extender that can only be ours."""
        try:
            return text is not None and self._extenders(path, text).has(self._entry(text, extender))
        except BadInput:
            return False

    def _extenders(self, path: str, text: str) -> Extenders:
        return Extenders(path, text, fold=self.like_policy(text))

    def _entry(self, text: str, extender: Extender) -> JsonObject:
        return extender.policy_entry() if self.like_policy(text) else extender.entry()

    def require_kind(self, path: str, kind: t.Any) -> None:
        """Refuse a file of another kind.

        :raises BadInput: it is one.
        """
        if kind != self.kind:
            raise BadInput(f"{path} isn't a {self.kind}")


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


POLICY_KIND = "Policy"
API_VERSION = "v1"
# The sum of a node's scores, each up to 100, has to fit into an int64.
HIGHEST_WEIGHT = ((1 << 63) - 1) // 100
RATIO = "requestedToCapacityRatioArguments"
# In the order in which kube-scheduler checks them.
ARGUMENTS = ("labelPreference", "serviceAntiAffinity", RATIO)
# Before this version kube-scheduler ignored unknown fields.
STRICT_SINCE = 17


class Policy(Form):
    """A Policy; kube-scheduler ignores unknown fields of its extenders."""

    name, flag, path, kind = "policy", "policy-config-file", PATH, POLICY_KIND

    def like_policy(self, text: str) -> bool:
        return True

    def new(self, minor: int | None, flags: t.Mapping[str, str], extender: Extender) -> str:
        policy = {"kind": POLICY_KIND, "apiVersion": API_VERSION, "extenders": [extender.policy_entry()]}
        text = json.dumps(policy, indent=2) + "\n"
        self.check("the new Policy", text, None)
        return text

    def decode(self, path: str, text: str, minor: int | None) -> Decoded:
        source = Source(path, text)
        self.require_kind(path, source.top("kind"))
        if source.top("apiVersion") != API_VERSION:
            raise BadInput(
                f"{path}: kube-scheduler reads a {POLICY_KIND} of {API_VERSION}, not {source.top('apiVersion')}"
            )
        minor = NO_POLICY_SINCE - 1 if minor is None else minor
        return source.decode(POLICY, minor, strict=minor >= STRICT_SINCE)

    def validate(self, decoded: Decoded, minor: int | None) -> None:
        weight = decoded.tree.get("hardPodAffinitySymmetricWeight") or 0
        if not 0 <= weight <= 100:
            raise decoded.fault("hardPodAffinitySymmetricWeight", "isn't between 0 and 100")
        _priorities(decoded)
        validate_extenders(decoded)


POLICY_FORM = Policy()


def _priorities(policy: Decoded) -> None:
    seen: dict[str, int] = {}
    for number, item in enumerate(policy.tree.get("priorities") or []):
        here = f"priorities[{number}]"
        priority: JsonObject = item or {}
        if not 0 < (priority.get("weight") or 0) < HIGHEST_WEIGHT:
            raise policy.fault(f"{here}.weight", "isn't greater than 0, or is too great")
        argument = priority.get("argument")
        if argument is None:
            continue
        kind = next((key for key in ARGUMENTS if argument.get(key) is not None), "")
        if not kind:
            raise policy.fault(f"{here}.argument", f"has none of {', '.join(ARGUMENTS)}")
        if kind in seen and (kind == RATIO or seen[kind] != priority["weight"]):
            raise policy.fault(here, f"has a {kind}, and so has an earlier priority with which it can't be combined")
        seen[kind] = priority["weight"]


FORMS: dict[str, Form] = {form.name: form for form in (FORM, POLICY_FORM)}


@dataclasses.dataclass(frozen=True)
class Note:
    """The file into which the extender was merged.

    :param path: the file on the machine.
    :param form: ``config`` or ``policy``.
    :param sha256: of the merged text; empty where that isn't ``before`` with our extender.
    :param before: the text without our extender.
    """

    path: str
    form: FormName
    sha256: str
    before: str

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def read(text: str | None) -> Note | None:
    """Parse the note; None where there is none, or an incomplete one."""
    try:
        data = json.loads(text) if text else {}
        note = Note(**{name: str(value) for name, value in data.items()})  # type: ignore[arg-type]  # checked below
    except (ValueError, TypeError, AttributeError):
        return None
    return note if note.form in FORMS else None


def put_in(
    path: str, form: FormName, text: str, minor: int, extender: Extender, note: Note | None, ours: bool
) -> tuple[str, Note]:
    """Return the file with our extender in it, and the note.

    :param path: of the file on the machine.
    :param form: ``config`` or ``policy``.
    :param text: its current text.
    :param minor: of kube-scheduler 1.``minor``.
    :param note: of the last run.
    :param ours: whether an extender for our resource in the file is known to be ours.
    :raises BadInput: the extender can't be merged.
    """
    try:
        after = FORMS[form].merged(path, text, minor, extender)
    except AnotherBinds as error:
        raise BadInput(f"{error}; {BESIDE}") from error
    kept = note if note is not None and note.path == path else None
    if kept is None and not ours and not FORMS[form].has(path, text, extender):
        return after, Note(path, form, digest(after), text)
    try:
        return after, Note(path, form, digest(after), take_out(path, form, text, extender, kept))
    except BadInput:
        # The edits since then and the removal of ours exclude each other; the removal reports that.
        return after, Note(path, form, "", kept.before if kept is not None else text)


def take_out(path: str, form: FormName, text: str, extender: Extender, note: Note | None) -> str:
    """Return the file without our extender.

    :param path: of the file, for messages.
    :param form: ``config`` or ``policy``.
    :param text: its current text.
    :param note: of the run that merged the extender; None where there is none.
    :raises BadInput: it can't be edited.
    """
    if note is None:
        return FORMS[form].without(path, text)
    return note.before if note.sha256 == digest(text) else FORMS[form].undone(path, text, note.before, extender)
