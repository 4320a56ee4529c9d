# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Edit a static pod's manifest: one flag, one mounted folder and one annotation, nothing else."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._documents.yaml_editor import Document, Path
from . import config
from . import control_plane as cp
from .config import FORMS
from .constants import ANNOTATION, CONFIG, CONTAINER, FOLDER
from .extenders import BESIDE

VOLUME = "kubegpu-share"
ANNOTATIONS: Path = ("metadata", "annotations")
FLAGS = tuple(form.flag for form in FORMS.values())
SHELLS = ("sh", "bash", "ash", "dash", "busybox")

MOUNT: JsonObject = {"mountPath": FOLDER, "name": VOLUME, "readOnly": True}
# A mounted folder shows new files, unlike a mounted file; it has to exist, so a wrong path fails.
HOST_FOLDER: JsonObject = {"hostPath": {"path": FOLDER, "type": "Directory"}, "name": VOLUME}


class Stamp(t.NamedTuple):
    """Names a configuration in kube-scheduler's manifest, so that another one makes kubelet start a new process.

    :param sha256: of the configuration's text.
    :param number: makes stamps of one text differ.
    """

    sha256: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Stamp:
        sha256, _dash, number = text.partition("-")
        return cls(sha256, int(number) if number.isdigit() else 0)

    def following(self, sha256: str, *, restart: bool, interrupted: bool) -> Stamp:
        """Return the stamp of the next configuration.

        :param restart: the process may not have loaded this text, so the stamp has to differ.
        :param interrupted: an earlier run was, so kubelet may still run the pod of the stamp before this one.
        """
        if restart and (interrupted or sha256 == self.sha256):
            return Stamp(sha256, self.number + 1)
        return self if sha256 == self.sha256 else Stamp(sha256)

    def __str__(self) -> str:
        return f"{self.sha256}-{self.number}" if self.number else self.sha256


class StaticPod:
    """kube-scheduler's manifest while it is edited.

    :param path: the manifest's file, for messages.
    :ivar flags: kube-scheduler's flags by their names without dashes; of those without a value it is empty.
    :ivar annotated: whether the pod has our annotation.
    :ivar stamp: the annotation's; an empty one without the annotation.
    :ivar volume_names: which names of volumes are ours.
    :raises BadInput: it can't be edited; it is left as it is.
    """

    def __init__(self, text: str, path: str = cp.MANIFEST) -> None:
        self._file = path
        self._document = Document(path, text)
        # The values, of which each edit changes its own.
        self._pod: JsonObject = self._document.get(())
        if self._pod.get("kind") != "Pod":
            raise self._refused(("kind",), f"is a {self._pod.get('kind') or 'mapping without a kind'}, not a Pod")
        self._demand(dict, ("metadata",), ANNOTATIONS, ("spec",))
        self._demand(list, ("spec", "containers"), ("spec", "volumes"), of=dict)
        containers = (self._pod.get("spec") or {}).get("containers") or []
        numbers = cp.scheduler_containers(containers)
        if len(numbers) != 1:
            count = f"{len(numbers)} containers" if numbers else "no container"
            raise self._refused(("spec", "containers"), f"has {count} {CONTAINER}", BESIDE)
        self._at: Path = ("spec", "containers", numbers[0])
        self._container: JsonObject = containers[numbers[0]]
        self._demand(list, *((*self._at, name) for name in ("command", "args")), of=(str, int, float))
        self._demand(list, (*self._at, "volumeMounts"), of=dict)
        self.image = str(self._container.get("image") or "")
        annotations = (self._pod.get("metadata") or {}).get("annotations") or {}
        self.annotated = ANNOTATION in annotations
        self.stamp = Stamp.parse(str(annotations.get(ANNOTATION) or ""))
        self._read()

    def _read(self) -> None:
        """Read the flags and the volumes' names, which edits change."""
        words = cp.words_of(self._container)
        self.flags = {}
        for number, word in enumerate(words):
            if not word.startswith("--"):
                continue
            name, equals, value = word[2:].partition("=")
            following = words[number + 1] if number + 1 < len(words) else "--"
            # kube-scheduler accepts both characters.
            self.flags[name.replace("_", "-")] = value if equals or following.startswith("-") else following
        self._words = words
        self.volume_names = VolumeNames.of(self._pod["spec"].get("volumes") or [])

    def _demand(self, kind: type, *paths: Path, of: type | tuple[type, ...] = object) -> None:
        for path in paths:
            value = self._document.get(path)
            if value is None:
                continue
            name = ".".join(str(step) for step in path)
            if not isinstance(value, kind):
                raise self._refused(path, f"has a {name} that isn't a {'list' if kind is list else 'mapping'}")
            for number, item in enumerate(value if isinstance(value, list) else []):
                if not isinstance(item, of):
                    what = "mapping" if of is dict else "string"
                    raise self._refused((*path, number), f"has a {name} with an item that isn't a {what}")

    def _refused(self, path: Path, reason: str, way_out: str = "") -> BadInput:
        line = self._document.line(path)
        advice = f", and {way_out}" if way_out else ""
        return BadInput(f"{self._file}, line {line}, {reason}; it is left as it is{advice}")

    def _flag_list(self) -> str:
        """Return the container's list for a further flag: args if there are any, because they follow the command.

        :raises BadInput: a flag in neither would reach kube-scheduler.
        """
        command = [str(word) for word in self._container.get("command") or []]
        if command and posixpath.basename(command[0]) in SHELLS:
            raise self._refused(
                (*self._at, "command"),
                f"starts kube-scheduler by {command[0]}, whose arguments can't be edited safely",
                BESIDE,
            )
        # A command here would replace that of the image.
        return "args" if self._container.get("args") or not command else "command"

    def host_path(self, path: str) -> str:
        """Return the path on the machine of a path in the container.

        :raises BadInput: it isn't on the machine.
        """
        volumes = {volume.get("name"): volume for volume in self._pod["spec"].get("volumes") or []}
        mounts = self._container.get("volumeMounts") or []
        mounts = sorted(mounts, key=lambda mount: len(str(mount.get("mountPath"))), reverse=True)
        path = posixpath.normpath(path)
        for mount in mounts:
            folder = posixpath.normpath(str(mount.get("mountPath")))
            if path == folder or path.startswith(folder.rstrip("/") + "/"):
                host = (volumes.get(mount.get("name"), {}).get("hostPath") or {}).get("path")
                if host and "subPathExpr" not in mount:
                    return posixpath.normpath(f"{host}/{mount.get('subPath') or ''}/{path[len(folder) :]}")
                break
        words = [
            (self._document.line((*self._at, name, number)), str(word))
            for name in ("command", "args")
            for number, word in enumerate(self._container.get(name) or [])
            if path in str(word)
        ]
        line, word = (words or [(1, path)])[0]
        raise BadInput(
            f"scheduler_mode: {self._file}, line {line}: kube-scheduler's {word} isn't in a folder of this machine "
            f"(hostPath); mount one and name the file in it, or {BESIDE}"
        )

    # ----------------------------------------------------------------- our part

    def restamp(self, sha256: str, *, restart: bool, interrupted: bool) -> str:
        """Annotate the pod with the stamp of the next configuration, as ``Stamp.following`` makes it, and return it."""
        stamp = self.stamp.following(sha256, restart=restart, interrupted=interrupted)
        self.annotate(stamp)
        return str(stamp)

    def annotate(self, stamp: Stamp) -> None:
        if self.stamp != stamp:
            self._document.set((*ANNOTATIONS, ANNOTATION), str(stamp))
            self.annotated, self.stamp = True, stamp

    def mount(self, flag: str = f"--config={CONFIG}") -> None:
        """Mount our folder in the container, and add the flag that names a file in that folder.

        :raises BadInput: another volume is mounted at that path.
        """
        flags = (*self._at, self._flag_list())
        if flag not in self._words:
            self._document.append(flags, flag)
        mounts, names = (*self._at, "volumeMounts"), self.volume_names
        there = self._container.get("volumeMounts") or []
        for number in sorted(set(range(len(there))) - set(names.among(there))):
            if posixpath.normpath(str(there[number].get("mountPath"))) == FOLDER:
                name = there[number].get("name")
                raise self._refused((*mounts, number), f"mounts {name} at {FOLDER}, the path of our folder")
        put_ours(self._document, mounts, MOUNT, names)
        put_ours(self._document, ("spec", "volumes"), HOST_FOLDER, names)
        self._read()

    def restore(self, *, annotation: bool = True) -> None:
        """Remove everything of ours: each flag that names a file of our folder, the folder, the annotation.

        :param annotation: whether to remove the annotation too.
        """
        ours = tuple(f"--{name}={FOLDER}/" for name in FLAGS)
        for name in ("command", "args"):
            words = [str(word) for word in self._container.get(name) or []]
            for number in reversed([n for n, word in enumerate(words) if word.startswith(ours)]):
                self._document.delete((*self._at, name, number))
        for path in ((*self._at, "volumeMounts"), ("spec", "volumes")):
            remove_ours(self._document, path, self.volume_names)
        if annotation and self.annotated:
            self._document.delete((*ANNOTATIONS, ANNOTATION))
            self.annotated, self.stamp = False, Stamp("")
        self._read()

    def text(self) -> str:
        return self._document.checked()

    # ----------------------------------------------------------------- health

    def urls(self, minor: int | None) -> tuple[str, ...]:
        """Return the URLs of kube-scheduler's health, from the manifest's own probe or its flags.

        :param minor: of kube-scheduler 1.``minor``; None where it is unknown.
        """
        base = self._probed() or cp.health_base(self.flags, minor)
        return tuple(base + path for path in config.health_paths(minor or 0))

    def _probed(self) -> str:
        """Return the URL that kubelet's probe asks, without its path; empty without a probe."""
        probe = self._container.get("livenessProbe")
        asked = (probe.get("httpGet") if isinstance(probe, dict) else None) or {}
        port = asked.get("port")
        if isinstance(port, str) and not port.isdigit():
            port = {
                container_port.get("name"): container_port.get("containerPort")
                for container_port in self._container.get("ports") or []
            }.get(port)
        if not port:
            return ""
        scheme = str(asked.get("scheme") or "HTTP").lower()
        listens = self.flags.get("bind-address" if scheme == "https" else "address") or ""
        return cp.server_url(str(asked.get("host") or listens), port, scheme)


class VolumeNames(t.NamedTuple):
    """The names of volumes that look like ours.

    :param ours: of our volume, or the first free one.
    :param foreign: of a user's volumes, which are of other folders.
    """

    ours: str
    foreign: frozenset[str]

    @classmethod
    def of(cls, volumes: t.Sequence[JsonObject]) -> VolumeNames:
        """Read them from the volumes of a manifest or of kubeadm's configuration."""
        folders = {}
        for volume in volumes:
            folder = volume.get("hostPath")
            folders[str(volume.get("name"))] = str(folder.get("path") if isinstance(folder, dict) else folder)
        alike = [name for name in folders if _OURS.fullmatch(name)]
        mine = [name for name in alike if posixpath.normpath(folders[name]) == FOLDER]
        free = (name for number in range(len(folders) + 1) if (name := _numbered(number)) not in folders)
        return cls(mine[0] if mine else next(free), frozenset(alike) - set(mine))

    def among(self, items: t.Sequence[JsonObject]) -> list[int]:
        """Return the numbers of our volumes or mounts in a list."""
        names = [str(item.get("name")) for item in items]
        return [number for number, name in enumerate(names) if _OURS.fullmatch(name) and name not in self.foreign]


_OURS = re.compile(rf"{VOLUME}(?:-[0-9]+)?")


def _numbered(number: int) -> str:
    return f"{VOLUME}-{number}" if number else VOLUME


def put_ours(document: Document, path: Path, item: JsonObject, names: VolumeNames) -> None:
    """Let a list of volumes or mounts have exactly this one of ours.

    :param path: the list's path in the document.
    :param item: the volume or mount, without its name.
    :param names: which names are ours there.
    """
    item, items = {**item, "name": names.ours}, document.get(path) or []
    numbers = names.among(items)
    if [items[number] for number in numbers] != [item]:
        for number in reversed(numbers):
            document.delete((*path, number))
        document.append(path, item)


def remove_ours(document: Document, path: Path, names: VolumeNames) -> None:
    """Remove our volumes or mounts from a list."""
    for number in reversed(names.among(document.get(path) or [])):
        document.delete((*path, number))
