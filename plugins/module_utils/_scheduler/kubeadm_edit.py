# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Keep our change of kube-scheduler's manifest over upgrades: in kubeadm's ClusterConfiguration or as patches. Pure.

kubeadm keeps its configuration in the cluster and renders it again at every upgrade and every join of a control-plane
machine. It also applies patches from a folder.
https://kubernetes.io/docs/reference/config-api/kubeadm-config.v1beta4/
"""

from __future__ import annotations

import dataclasses
import enum
import json
import typing as t

from .._core.errors import BadInput
from .._core.libraries import yaml
from .._core.types import JsonObject
from .._documents.yaml_editor import Document, Path
from . import config
from .config import FORMS, FormName
from .constants import ANNOTATION, CONTAINER, FOLDER
from .kubeadm import KEY, NAME
from .static_pod_plan import FLAGS, HOST_FOLDER, MOUNT, VOLUME, VolumeNames, put_ours, remove_ours

GROUP = "kubeadm.k8s.io"
# Versions with arguments as a mapping, and as a list in which one may occur several times.
MAPPED = ("v1beta1", "v1beta2", "v1beta3")
LISTED = ("v1beta4", "v1")
ARGUMENTS: Path = ("scheduler", "extraArgs")
VOLUMES: Path = ("scheduler", "extraVolumes")
OURS = f"{FOLDER}/"
# The volume and the mount of a manifest, as kubeadm has both.
EXTRA_VOLUME = {"name": VOLUME, "hostPath": FOLDER, "mountPath": FOLDER, "readOnly": True, "pathType": "Directory"}


class Reason(enum.Enum):
    """Why an upgrade by kubeadm loses our change, or a condition for keeping it."""

    NO_CONFIG_MAP = f"{NAME} doesn't exist"
    NOT_OBSERVED = f"{NAME} is left as it is: this run has no facts of {{machines}}"
    OTHER_FLAG = (
        f"{NAME} gives kube-scheduler {{flag}}, and on {{machines}} it has {{machine_flag}}: kubeadm upgrade replaces "
        "that, and the extender is lost. Set the same flag in both and run site.yml again"
    )
    OWN_FLAG = f"{NAME} has {{flag}} of its own, which kubeadm keeps"
    UNKNOWN_FLAG = (
        f"kube-scheduler on {{machines}} has {{machine_flag}}, which isn't in {NAME}: kubeadm upgrade removes that, "
        "and the extender is lost. Add the flag to scheduler.extraArgs there, and its folder to scheduler.extraVolumes"
    )
    MIXED_FORMS = f"{NAME} is for all machines, and some of them have a policy file and others a configuration"
    POLICY_ENDS = (
        "kube-scheduler 1.{lost} reads no policy file: run site.yml again with scheduler_configuration: config once "
        "the cluster is 1.{better} or later, and before its upgrade to 1.{lost}"
    )
    VERSION_ENDS = (
        "kube-scheduler 1.{lost} doesn't read {version}, in which its configuration is written for 1.{minor}: run "
        "site.yml again once the cluster is 1.{better} or later, and before its upgrade to 1.{lost}"
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """kubeadm's configuration after the change.

    :param kept: whether an upgrade by kubeadm keeps our change.
    :param reason: why it doesn't, or what the user has to do before an upgrade; None for neither.
    :param fields: of the reason's text.
    """

    text: str
    kept: bool
    reason: Reason | None = None
    fields: t.Mapping[str, t.Any] = dataclasses.field(default_factory=dict)

    @property
    def message(self) -> str:
        return self.reason.value.format(**self.fields) if self.reason is not None else ""


class ExtenderFile(t.NamedTuple):
    """The file by which a machine's kube-scheduler gets the extender: its form, and its path in the container."""

    form: FormName
    path: str

    @property
    def ours(self) -> bool:
        return self.path == FORMS[self.form].path

    @property
    def flag(self) -> str:
        return f"--{FORMS[self.form].flag}={self.path}"


Machines = t.Mapping[str, "ExtenderFile | None"]


def cluster_configuration(text: str, present: bool, wanted: str = "auto", machines: Machines | None = None) -> Result:
    """Add our flag and folder to a ClusterConfiguration, or remove them; all else stays byte for byte.

    :param text: the ClusterConfiguration.
    :param present: whether to add them.
    :param wanted: the form: ``auto``, ``config`` or ``policy``.
    :param machines: the file of each control-plane machine, None where it was not observed. The file that kubeadm
        writes has to exist on all of them. Without machines the ClusterConfiguration alone decides.
    :raises BadInput: it can't be edited.
    """
    document = Document(f"{NAME}, {KEY}", text)
    version = _version(document) if present else ""
    _require_types(document)
    if not present:
        _remove(document, "")
        return Result(document.checked(), False)
    minor = _minor(document)
    unknown = sorted(name for name, file in (machines or {}).items() if file is None)
    if unknown:
        return Result(text, False, Reason.NOT_OBSERVED, {"machines": ", ".join(unknown)})
    known = {name: file for name, file in (machines or {}).items() if file is not None}
    users = {name: value for name, value in _arguments(document) if name in FLAGS and not value.startswith(OURS)}
    if users:
        _remove(document, "")
        return _users_own(document, users, known)
    foreign = sorted(name for name, file in known.items() if not file.ours)
    if foreign or len({file.form for file in known.values()}) > 1:
        _remove(document, "")
        if not foreign:
            return Result(document.checked(), False, Reason.MIXED_FORMS)
        fields = {"machines": ", ".join(foreign), "machine_flag": known[foreign[0]].flag}
        return Result(document.checked(), False, Reason.UNKNOWN_FLAG, fields)
    forms = [file.form for file in known.values()]
    form = FORMS[forms[0] if forms else config.form_of(minor, wanted)]
    _remove(document, form.flag)
    _add(document, form.flag, form.path, version in LISTED)
    return Result(document.checked(), True, *_outlived(form.name, minor))


def _users_own(document: Document, users: t.Mapping[str, str], machines: t.Mapping[str, ExtenderFile]) -> Result:
    """Return the result for a file of the user's own: kept only where the machines have the extender in it."""
    others = sorted(name for name, file in machines.items() if users.get(FORMS[file.form].flag) != file.path)
    flag, value = next(iter(users.items()))
    fields = {"flag": f"--{flag}={value}"}
    if others:
        fields |= {"machines": ", ".join(others), "machine_flag": machines[others[0]].flag}
        return Result(document.checked(), False, Reason.OTHER_FLAG, fields)
    return Result(document.checked(), True, Reason.OWN_FLAG, fields)


def _outlived(form: FormName, minor: int) -> tuple[Reason | None, JsonObject]:
    """Return which upgrade the file that we write doesn't survive."""
    if form == "policy":
        return Reason.POLICY_ENDS, {"lost": config.NO_POLICY_SINCE, "better": config.CONFIG_SINCE}
    outlived = config.outlived(minor)
    if outlived is None:
        return None, {}
    version, better, lost = outlived
    return Reason.VERSION_ENDS, {"version": version, "minor": minor, "better": better, "lost": lost}


def _version(document: Document) -> str:
    group, _slash, version = str(document.get(("apiVersion",))).partition("/")
    if group != GROUP or version not in (*MAPPED, *LISTED):
        there = document.get(("apiVersion",))
        holds = "has no apiVersion" if there is None else f"holds a {there}"
        raise BadInput(f"{NAME} {holds}, and only {', '.join((*MAPPED, *LISTED))} can be edited; it is left as it is")
    return version


def _minor(document: Document) -> int:
    version = str(document.get(("kubernetesVersion",)) or "")
    try:
        return config.minor_of("", version.lstrip("v") or None)
    except BadInput as error:
        raise BadInput(f"{NAME} has the kubernetesVersion {version!r}, which isn't a version of Kubernetes") from error


def _require_types(document: Document) -> None:
    """Refuse a document whose edited fields haven't the types that kubeadm gives them."""
    kinds: dict[Path, tuple[type, ...]] = {("scheduler",): (dict,), VOLUMES: (list,)}
    kinds[ARGUMENTS] = (list,) if _version(document) in LISTED else (dict,)
    for path, kind in kinds.items():
        value = document.get(path)
        items = value if isinstance(value, list) else []
        if value is not None and not (isinstance(value, kind) and all(isinstance(item, dict) for item in items)):
            line = document.line(path)
            raise BadInput(
                f"{NAME}, {KEY}, line {line}: {'.'.join(map(str, path))} has an unexpected type; it is left as it is"
            )


def _arguments(document: Document) -> list[tuple[str, str]]:
    given = document.get(ARGUMENTS) or []
    if isinstance(given, dict):
        return [(str(name), str(value)) for name, value in given.items()]
    return [(str(argument.get("name")), str(argument.get("value") or "")) for argument in given]


def _remove(document: Document, kept: str) -> None:
    """Remove our flags and folder, except the flag ``kept`` with the folder that it needs."""
    ours = [
        number
        for number, (name, value) in enumerate(_arguments(document))
        if name in FLAGS and name != kept and value.startswith(OURS)
    ]
    for number in reversed(ours):
        step = _arguments(document)[number][0] if isinstance(document.get(ARGUMENTS), dict) else number
        document.delete((*ARGUMENTS, step))
    if not kept:
        remove_ours(document, VOLUMES, VolumeNames.of(document.get(VOLUMES) or []))


def _add(document: Document, flag: str, value: str, listed: bool) -> None:
    there = [number for number, argument in enumerate(_arguments(document)) if argument[0] == flag]
    if not there:
        if listed:
            document.append(ARGUMENTS, {"name": flag, "value": value})
        else:
            document.set((*ARGUMENTS, flag), value)
    elif _arguments(document)[there[-1]][1] != value:
        document.set((*ARGUMENTS, there[-1], "value") if listed else (*ARGUMENTS, flag), value)
    put_ours(document, VOLUMES, EXTRA_VOLUME, VolumeNames.of(document.get(VOLUMES) or []))


# --------------------------------------------------------------------------- patches

# kubeadm applies them in the order of their names; the beginning of a name is the target.
FLAG_PATCH = f"{CONTAINER}90-kubegpu-share+json.json"
POD_PATCH = f"{CONTAINER}90-kubegpu-share+strategic.yaml"
PATCHES = (FLAG_PATCH, POD_PATCH)


def patch_files(stamp: str, flag: str | None = None, volume: str = VOLUME) -> dict[str, str]:
    """Return the files for ``kubeadm upgrade --patches`` by which a manifest keeps our change.

    Files of :data:`PATCHES` that aren't among them have to be removed. Where kubeadm's configuration has the same flag,
    the manifest has it twice with the same value.

    :param stamp: the annotation's value.
    :param flag: such as ``--config=FILE``, with which our folder is mounted; None where the extender is in the user's
        own file, so only the annotation is ours.
    :param volume: the name of our volume.
    """
    pod: JsonObject = {"metadata": {"annotations": {ANNOTATION: stamp}}}
    files: dict[str, str] = {}
    if flag is not None:
        mount, folder = ({**item, "name": volume} for item in (MOUNT, HOST_FOLDER))
        pod["spec"] = {"containers": [{"name": CONTAINER, "volumeMounts": [mount]}], "volumes": [folder]}
        # A strategic patch would replace the whole command.
        add = [{"op": "add", "path": "/spec/containers/0/command/-", "value": flag}]
        files[FLAG_PATCH] = json.dumps(add, indent=2) + "\n"
    files[POD_PATCH] = config.HEAD + yaml.safe_dump(pod, sort_keys=False, default_flow_style=False)
    return files
