# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What kubeadm has to know so that ``kubeadm upgrade`` writes kube-scheduler's manifest as we changed it. Pure.

kubeadm keeps its own configuration in the cluster, which every upgrade and every join of a control-plane machine
renders again, and takes patches from a folder where it is told of one.
"""

from __future__ import annotations

import dataclasses
import json
import typing as t

import yaml
from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._kubeadm_config import KEY, NAME
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config
from ansible_collections.kubegpu.share.plugins.plugin_utils._static_pod_document import (
    FLAGS,
    HOST_FOLDER,
    MOUNT,
    VOLUME,
)
from ansible_collections.kubegpu.share.plugins.plugin_utils._yaml_document import Document, Path

Json = dict[str, t.Any]

GROUP = "kubeadm.k8s.io"
# How arguments are written: a mapping, or a list in which one may be there several times.
MAPPED = ("v1beta1", "v1beta2", "v1beta3")
LISTED = ("v1beta4",)
ARGUMENTS: Path = ("scheduler", "extraArgs")
VOLUMES: Path = ("scheduler", "extraVolumes")
FILES = {"config": cp.CONFIG, "policy": cp.POLICY}
FLAG_OF = {"config": "config", "policy": "policy-config-file"}


@dataclasses.dataclass(frozen=True)
class Kept:
    """kubeadm's configuration as it should be.

    :param text: the configuration after the change.
    :param kept: an upgrade by kubeadm keeps our change.
    :param reason: why it doesn't, or what else the user should know.
    """

    text: str
    kept: bool
    reason: str = ""


class Told(t.NamedTuple):
    """How a machine's kube-scheduler is told of the extender: in which form, and by which file of its container."""

    form: str
    path: str

    @property
    def ours(self) -> bool:
        return self.path == FILES[self.form]

    @property
    def flag(self) -> str:
        return f"--{FLAG_OF[self.form]}={self.path}"


Machines = t.Mapping[str, "Told | None"]


def cluster_configuration(text: str, present: bool, wanted: str = "auto", machines: Machines | None = None) -> Kept:
    """Put our flag and folder into a ClusterConfiguration, or take them out again; all else stays as it is.

    :param wanted: how kube-scheduler is told of the extender: ``auto``, ``config`` or ``policy``.
    :param machines: how it is told on each control-plane machine, None where nobody looked. What kubeadm writes has to
        be there on all of them. Without it the ClusterConfiguration alone decides.
    :raises BadInput: it can't be edited.
    """
    document = Document(f"{NAME}, {KEY}", text)
    version = _version(document) if present else ""
    _demand(document)
    if not present:
        _remove(document, "")
        return Kept(document.checked(), False)
    minor = _minor(document)
    unknown = sorted(name for name, told in (machines or {}).items() if told is None)
    if unknown:
        return Kept(text, False, f"{NAME} is left as it is: nobody has looked at {', '.join(unknown)} in this run")
    known = {name: told for name, told in (machines or {}).items() if told is not None}
    users = {
        name: value for name, value in _arguments(document) if name in FLAGS and not value.startswith(cp.FOLDER + "/")
    }
    if users:
        _remove(document, "")
        return _users_own(document, users, known)
    objection = _objection(known)
    if objection:
        _remove(document, "")
        return Kept(document.checked(), False, objection)
    form = next((told.form for told in known.values()), "") or config.form_of(minor, wanted)
    _remove(document, FLAG_OF[form])
    _add(document, FLAG_OF[form], FILES[form], version in LISTED)
    return Kept(document.checked(), True, _outlived(form, minor))


def _users_own(document: Document, users: t.Mapping[str, str], machines: t.Mapping[str, Told]) -> Kept:
    """kubeadm gives kube-scheduler a file of the user's own: good where the extender is in that one."""
    others = sorted(name for name, told in machines.items() if users.get(FLAG_OF[told.form]) != told.path)
    flag, value = next(iter(users.items()))
    if others:
        told = machines[others[0]]
        return Kept(
            document.checked(),
            False,
            f"{NAME} gives kube-scheduler --{flag}={value}, and on {', '.join(others)} it has {told.flag}: kubeadm "
            "upgrade replaces that, and the extender goes with it; give it the same in both and run site.yml again",
        )
    return Kept(document.checked(), True, f"{NAME} has a --{flag} of its own, {value}, which kubeadm keeps")


def _objection(machines: t.Mapping[str, Told]) -> str:
    """Why our own file can't be what kubeadm writes everywhere, or nothing."""
    theirs = sorted(name for name, told in machines.items() if not told.ours)
    if theirs:
        return (
            f"kube-scheduler on {', '.join(theirs)} has {machines[theirs[0]].flag}, of which {NAME} knows nothing: "
            "kubeadm upgrade takes that out, and the extender with it; add it to scheduler.extraArgs there, and its "
            "folder to scheduler.extraVolumes"
        )
    if len({told.form for told in machines.values()}) > 1:
        return f"{NAME} is for all machines, and some of them have a policy file and others a configuration"
    return ""


def _outlived(form: str, minor: int) -> str:
    """Which upgrade the file that we write doesn't survive, or nothing."""
    if form == "policy":
        last = config.NO_POLICY_SINCE
        return (
            f"kube-scheduler 1.{last} reads no policy file: run site.yml again with scheduler_configuration: config "
            f"when the cluster is 1.{config.CONFIG_SINCE} or later, and before its upgrade to 1.{last}"
        )
    found = config.outlived(minor)
    if found is None:
        return ""
    version, better, lost = found
    return (
        f"kube-scheduler 1.{lost} doesn't read {version}, in which its configuration is written for 1.{minor}: run "
        f"site.yml again when the cluster is 1.{better} or later, and before its upgrade to 1.{lost}"
    )


def _version(document: Document) -> str:
    group, _slash, version = str(document.get(("apiVersion",))).partition("/")
    if group != GROUP or version not in (*MAPPED, *LISTED):
        raise BadInput(
            f"{NAME} holds a {document.get(('apiVersion',))}, and how that is edited is known for "
            f"{', '.join((*MAPPED, *LISTED))}; it is left as it is"
        )
    return version


def _minor(document: Document) -> int:
    version = str(document.get(("kubernetesVersion",)) or "")
    try:
        return config.minor_of("", version.lstrip("v") or None)
    except BadInput as error:
        raise BadInput(f"{NAME} has the kubernetesVersion {version!r}, which tells no version") from error


def _demand(document: Document) -> None:
    """What we edit has the type that kubeadm gives it."""
    kinds: dict[Path, tuple[type, ...]] = {
        ("scheduler",): (dict,),
        ARGUMENTS: (dict, list),
        VOLUMES: (list,),
    }
    for path, kind in kinds.items():
        value = document.get(path)
        items = value if isinstance(value, list) else []
        if value is not None and not (isinstance(value, kind) and all(isinstance(one, dict) for one in items)):
            line = document.line(path)
            raise BadInput(
                f"{NAME}, {KEY}, line {line}, has something unknown as {'.'.join(map(str, path))}; it is left as it is"
            )


def _arguments(document: Document) -> list[tuple[str, str]]:
    given = document.get(ARGUMENTS) or []
    if isinstance(given, dict):
        return [(str(name), str(value)) for name, value in given.items()]
    return [(str(one.get("name")), str(one.get("value") or "")) for one in given]


def _remove(document: Document, kept: str) -> None:
    """Take out what is ours, but not the flag ``kept`` with the folder that it needs."""
    ours = [
        number
        for number, (name, value) in enumerate(_arguments(document))
        if name in FLAGS and name != kept and value.startswith(cp.FOLDER + "/")
    ]
    for number in reversed(ours):
        step = _arguments(document)[number][0] if isinstance(document.get(ARGUMENTS), dict) else number
        document.delete((*ARGUMENTS, step))
    if not kept:
        _remove_volumes(document)


def _remove_volumes(document: Document) -> None:
    for number in reversed(_ours_in(document)):
        document.delete((*VOLUMES, number))


def _ours_in(document: Document) -> list[int]:
    return [number for number, one in enumerate(document.get(VOLUMES) or []) if one.get("name") == VOLUME]


def _add(document: Document, flag: str, value: str, listed: bool) -> None:
    there = [number for number, one in enumerate(_arguments(document)) if one[0] == flag]
    if not there:
        if listed:
            document.append(ARGUMENTS, {"name": flag, "value": value})
        else:
            document.set((*ARGUMENTS, flag), value)
    elif _arguments(document)[there[-1]][1] != value:
        document.set((*ARGUMENTS, there[-1], "value") if listed else (*ARGUMENTS, flag), value)
    volume = {
        "name": VOLUME,
        "hostPath": HOST_FOLDER["hostPath"]["path"],
        "mountPath": MOUNT["mountPath"],
        "readOnly": MOUNT["readOnly"],
        "pathType": HOST_FOLDER["hostPath"]["type"],
    }
    numbers = _ours_in(document)
    if len(numbers) != 1 or document.get((*VOLUMES, numbers[0])) != volume:
        _remove_volumes(document)
        document.append(VOLUMES, volume)


# --------------------------------------------------------------------------- patches

# kubeadm takes them in the order of their names, for the target that these begin with.
FLAG_PATCH = f"{cp.CONTAINER}90-kubegpu-share+json.json"
POD_PATCH = f"{cp.CONTAINER}90-kubegpu-share+strategic.yaml"
PATCHES = (FLAG_PATCH, POD_PATCH)


def patch_files(sha256: str, flag: str | None = None) -> dict[str, str]:
    """The files for ``kubeadm upgrade --patches`` by which a manifest keeps our change.

    Files of :data:`PATCHES` that aren't among them have to go. Where kubeadm's configuration says the same, the flag is
    there twice, with the same value, and nothing else is.

    :param sha256: the annotation's value.
    :param flag: such as ``--config=FILE``, with which our folder is mounted; None where the user's own file has our
        extender, so that only the annotation is ours.
    """
    pod: Json = {"metadata": {"annotations": {cp.ANNOTATION: sha256}}}
    files: dict[str, str] = {}
    if flag is not None:
        pod["spec"] = {
            "containers": [{"name": cp.CONTAINER, "volumeMounts": [MOUNT]}],
            "volumes": [HOST_FOLDER],
        }
        # A strategic patch would replace the whole command.
        add = [{"op": "add", "path": "/spec/containers/0/command/-", "value": flag}]
        files[FLAG_PATCH] = json.dumps(add, indent=2) + "\n"
    text = yaml.dump(pod, Dumper=_Plain, sort_keys=False, default_flow_style=False)
    files[POD_PATCH] = f"# Written by kubegpu.share: what is changed here is lost.\n{text}"
    return files


class _Plain(yaml.SafeDumper):
    """Writes a mapping that is used twice out twice."""

    def ignore_aliases(self, data: t.Any) -> bool:
        return True
