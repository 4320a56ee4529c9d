# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What of a static kube-scheduler has to change, and how; made on the controller from what the machine showed.

The manifest is the user's and kubeadm's: it gets one flag, one mounted folder and one annotation, nothing else, and
loses just these again. Where kube-scheduler has a configuration file already, that file gets our extender instead and
the manifest only the annotation, whose changed value makes kubelet start the scheduler again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import posixpath
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _control_plane as cp
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils import _scheduler_config as config
from ansible_collections.kubegpu.share.plugins.plugin_utils._yaml_document import Document, Path, Step

Json = dict[str, t.Any]

CONTAINER = "kube-scheduler"
VOLUME = "kubegpu-share"
ANNOTATION = "kubegpu.share/scheduler-config-sha256"
ANNOTATIONS: Path = ("metadata", "annotations")
# Removed in 1.23, and incompatible with a configuration file that has extenders.
POLICY_FLAGS = ("policy-config-file", "policy-configmap")
LIVEZ_SINCE = 31


class OtherFile(Exception):
    """kube-scheduler's --config is another file on the machine than the one that was read.

    :param path: that file, as the machine knows it.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``kube_scheduler``."""

    present: bool
    extender: config.Extender
    version: str | None = None


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the machine (the module's option ``plan``)."""

    plan: Plan
    files: tuple[Json, ...] = ()
    config: str = ""
    urls: tuple[str, ...] = ()


def make_plan(options: Options, observed: Json) -> Planned:
    """Compare the machine with what is asked for.

    :param observed: what ``control_plane_info`` returned.
    :raises BadInput: this kube-scheduler can't be configured as asked for; nothing was changed.
    :raises OtherFile: look again, at this file.
    """
    if observed["manifest"] is None:
        if options.present:
            raise BadInput(
                f"scheduler_mode: static_pod needs {cp.MANIFEST}, and this machine has none"
                + (f" (it runs {observed['embedded']})" if observed["embedded"] else "")
            )
        return Planned(Plan())
    manifest = _Manifest(observed["manifest"])
    minor = config.minor_of(manifest.image, options.version) if options.present else 0
    after = _present(options, observed, manifest, minor) if options.present else _absent(observed, manifest)
    rows, changes = [], []
    for path, before, text in after:
        if text != before:
            rows.append({"path": path, "before": digest(before), "after": text})
            changes.append(Change(path, before or "", text or ""))
    named = manifest.flags().get("config", "")
    reason = "" if rows else _unproven(observed, named, options.present)
    if reason:
        changes.append(Change(CONTAINER, f"{reason}\n", "healthy, with this configuration\n"))
    return Planned(Plan(tuple(changes)), tuple(rows), named, manifest.urls(options.version))


def _unproven(observed: Json, named: str, present: bool) -> str:
    if observed["pending"]:
        return "an earlier run was cut short"
    if not present:
        return ""
    if not any(one["config"] == named for one in observed["running"]):
        return "not running with this configuration"
    return "" if observed["health"] == 200 else "not healthy"


Files = list[tuple[str, str | None, str | None]]


def _present(options: Options, observed: Json, manifest: _Manifest, minor: int) -> Files:
    flags = manifest.flags()
    for name in POLICY_FLAGS:
        if name in flags:
            raise BadInput(
                f"scheduler_mode: kube-scheduler has --{name}, which can't be combined with a configuration file"
            )
    named = flags.get("config", "")
    if named and named != cp.CONFIG:
        path = manifest.host_path(named)
        if path != observed["config_path"]:
            raise OtherFile(path)
        before = observed["config"]
        if before is None:
            raise BadInput(f"{path}, which kube-scheduler's --config names, isn't there")
        text = config.merged(path, before, minor, options.extender)
    else:
        path, before = cp.CONFIG, observed["ours"]
        text = config.new_config(minor, flags, options.extender)
        manifest.mount()
    manifest.annotate(hashlib.sha256(text.encode()).hexdigest())
    # The manifest last: kubelet acts on it at once.
    return [(path, before, text), (cp.MANIFEST, observed["manifest"], manifest.done())]


def _absent(observed: Json, manifest: _Manifest) -> Files:
    files: Files = []
    named = manifest.flags().get("config", "")
    if named and named != cp.CONFIG and manifest.annotated():
        path = manifest.host_path(named)
        if path != observed["config_path"]:
            raise OtherFile(path)
        if observed["config"] is not None:
            files.append((path, observed["config"], config.without(path, observed["config"])))
    manifest.restore()
    files.append((cp.MANIFEST, observed["manifest"], manifest.done()))
    files.append((cp.CONFIG, observed["ours"], None))
    return files


class _Manifest:
    """kube-scheduler's manifest under edit."""

    def __init__(self, text: str) -> None:
        self._document = Document(cp.MANIFEST, text)
        containers = self._document.get(("spec", "containers"))
        names = [one.get("name") for one in containers] if isinstance(containers, list) else []
        if CONTAINER not in names:
            raise BadInput(f"{cp.MANIFEST} has no container {CONTAINER}; it is left as it is")
        self._container: Path = ("spec", "containers", names.index(CONTAINER))

    @property
    def image(self) -> str:
        return str(self._get("image") or "")

    def _get(self, *steps: Step) -> t.Any:
        return self._document.get((*self._container, *steps))

    def _flag_list(self) -> str:
        """Which list of the container holds the flags: command (kubeadm's way) or args."""
        for name in ("args", "command"):
            if any(str(word).startswith("--") for word in self._get(name) or []):
                return name
        return "command"

    def flags(self) -> dict[str, str]:
        words = [str(word) for word in [*(self._get("command") or []), *(self._get("args") or [])]]
        found: dict[str, str] = {}
        for number, word in enumerate(words):
            if not word.startswith("--"):
                continue
            name, equals, value = word[2:].partition("=")
            following = words[number + 1] if number + 1 < len(words) else "--"
            found[name] = value if equals or following.startswith("--") else following
        return found

    def host_path(self, path: str) -> str:
        """The file on the machine behind a path in the container.

        :raises BadInput: it isn't on the machine.
        """
        volumes = {one.get("name"): one for one in self._document.get(("spec", "volumes")) or []}
        mounts = sorted(self._get("volumeMounts") or [], key=lambda one: len(str(one.get("mountPath"))), reverse=True)
        for mount in mounts:
            folder = str(mount.get("mountPath")).rstrip("/")
            if path == folder or path.startswith(folder + "/"):
                host = (volumes.get(mount.get("name"), {}).get("hostPath") or {}).get("path")
                if host:
                    return posixpath.normpath(f"{host}/{path[len(folder) :]}")
                break
        raise BadInput(f"scheduler_mode: kube-scheduler's --config={path} isn't in a folder of this machine (hostPath)")

    # ----------------------------------------------------------------- ours in it

    def annotated(self) -> bool:
        return ANNOTATION in (self._document.get(ANNOTATIONS) or {})

    def annotate(self, sha256: str) -> None:
        if (self._document.get(ANNOTATIONS) or {}).get(ANNOTATION) != sha256:
            self._document.set((*ANNOTATIONS, ANNOTATION), sha256)

    def mount(self) -> None:
        """Have our folder in the container and our file as its configuration."""
        flags = (*self._container, self._flag_list())
        if f"--config={cp.CONFIG}" not in (self._document.get(flags) or []):
            self._document.append(flags, f"--config={cp.CONFIG}")
        mount = {"mountPath": cp.FOLDER, "name": VOLUME, "readOnly": True}
        self._one((*self._container, "volumeMounts"), mount)
        # A folder, so that a new file in it is seen, and one that has to exist, so that a mistake shows.
        self._one(("spec", "volumes"), {"hostPath": {"path": cp.FOLDER, "type": "Directory"}, "name": VOLUME})

    def _one(self, path: Path, item: Json) -> None:
        there = self._numbers(path)
        if len(there) == 1 and self._document.get((*path, there[0])) == item:
            return
        for number in reversed(there):
            self._document.delete((*path, number))
        self._document.append(path, item)

    def _numbers(self, path: Path) -> list[int]:
        return [n for n, one in enumerate(self._document.get(path) or []) if one.get("name") == VOLUME]

    def restore(self) -> None:
        """Take out all that is ours."""
        for name in ("command", "args"):
            words = self._get(name) or []
            if f"--config={cp.CONFIG}" in words:
                self._document.delete((*self._container, name, words.index(f"--config={cp.CONFIG}")))
        for path in ((*self._container, "volumeMounts"), ("spec", "volumes")):
            for number in reversed(self._numbers(path)):
                self._document.delete((*path, number))
        if self.annotated():
            self._document.delete((*ANNOTATIONS, ANNOTATION))

    def done(self) -> str:
        return self._document.checked()

    # ----------------------------------------------------------------- health

    def urls(self, version: str | None) -> tuple[str, ...]:
        """Where kube-scheduler tells that it is healthy; the manifest's own probes know address and port best."""
        asked = self._get("livenessProbe", "httpGet") or {}
        flags = self.flags()
        address = str(asked.get("host") or flags.get("bind-address") or "127.0.0.1")
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        port = asked.get("port") or flags.get("secure-port") or 10259
        if isinstance(port, str) and not port.isdigit():
            ports = {one.get("name"): one.get("containerPort") for one in self._get("ports") or []}
            port = ports.get(port) or 10259
        scheme = str(asked.get("scheme") or "HTTPS").lower()
        base = f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"
        try:
            minor = config.minor_of(self.image, version)
        except BadInput:
            minor = 0
        paths = ("/livez", "/readyz") if minor >= LIVEZ_SINCE else ("/healthz",)
        return tuple(base + path for path in paths)
