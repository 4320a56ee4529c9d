# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose how a container gets its cards: by CDI names in the answer to kubelet, or by a variable for NVIDIA's runtime.

A pod can override the variable and so see any card, but not the CDI names. These need a kubelet that passes them on,
a runtime with CDI enabled, and a CDI specification of the node that names each card by its UUID. A name that can't be
resolved leaves a container that doesn't start, or one without a card, so all three are checked.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import typing as t
from pathlib import Path

import yaml
from gpushare.kubelet.errors import InvalidIds
from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._contracts.gpushare import Reason, Refusal
from gpushare.shared._core.types import JsonObject

log = logging.getLogger("gpushare.injection")

AUTO, CDI, ENVVAR = "auto", "cdi", "envvar"
MODES = (AUTO, CDI, ENVVAR)
# The later folder wins, as it does for the runtimes.
FOLDERS = (Path("/etc/cdi"), Path("/var/run/cdi"))
KIND = "nvidia.com/gpu"

# The feature DevicePluginCDIDevices is generally available since then.
KUBELET_SINCE = (1, 31)
# The runtimes' default since these versions.
RUNTIME_SINCE: t.Mapping[str, tuple[int, int]] = {"containerd": (2, 0), "cri-o": (1, 28)}

_Loader: t.Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# A file's path, inode, time and size.
FileState = tuple[str, int, int, int]
Signature = tuple[FileState, ...]


# --------------------------------------------------------------------------- pure


def device_name(uuid: str) -> str:
    """Return a card's CDI name."""
    return f"{KIND}={uuid}"


def version(text: str) -> tuple[int, int] | None:
    """Parse major and minor of ``v1.36.3`` or ``containerd://2.0.1-k3s1``; None without a version."""
    match = re.search(r"(?:^|//)v?([0-9]+)\.([0-9]+)", text)
    return (int(match[1]), int(match[2])) if match else None


def obstacle(node: JsonObject) -> str:
    """Return why this node's kubelet or container runtime doesn't support CDI names; empty if both do.

    :param node: its object in the API, with the status.
    """
    info = (node.get("status") or {}).get("nodeInfo") or {}
    kubelet, runtime = str(info.get("kubeletVersion", "")), str(info.get("containerRuntimeVersion", ""))
    have = version(kubelet)
    if have is None or have < KUBELET_SINCE:
        since = ".".join(map(str, KUBELET_SINCE))
        return f"kubelet {kubelet or 'of an unknown version'} may not pass CDI names on, as {since} and later do"
    announced = ((node.get("metadata") or {}).get("annotations") or {}).get(contract.NODE_RUNTIME_CDI)
    if announced in ("true", "false"):
        return "" if announced == "true" else "the container runtime has CDI turned off"
    name, since_runtime = runtime.partition("://")[0], RUNTIME_SINCE.get(runtime.partition("://")[0])
    of_runtime = version(runtime)
    if since_runtime is None or of_runtime is None or of_runtime < since_runtime:
        return f"the container runtime {runtime or name or 'of an unknown kind'} isn't known to have CDI turned on"
    return ""


def device_names(document: t.Any) -> set[str]:
    """Return the names of NVIDIA's devices in a CDI specification; empty for any other document."""
    if not isinstance(document, dict) or document.get("kind") != KIND:
        return set()
    devices = document.get("devices")
    return {
        str(device["name"])
        for device in (devices if isinstance(devices, list) else ())
        if isinstance(device, dict) and "name" in device
    }


def resolve_devices(folders: t.Iterable[t.Iterable[set[str]]]) -> set[str]:
    """Return the devices that a runtime resolves.

    :param folders: in order, each with the devices of its files.

    Two files of one folder that name the same device make it unusable, unless a later folder decides.
    """
    unique: set[str] = set()
    for files in folders:
        once: set[str] = set()
        twice: set[str] = set()
        for names in files:
            twice |= once & names
            once |= names
        unique = (unique | once) - twice
    return unique


# --------------------------------------------------------------------------- files


def _signature(folders: t.Sequence[Path]) -> Signature:
    files_seen = []
    for folder in folders:
        try:
            files = sorted(path for path in folder.iterdir() if path.suffix in (".json", ".yaml"))
        except OSError:
            continue
        for file in files:
            try:
                stat = file.stat()
            except OSError:
                continue
            files_seen.append((str(file), stat.st_ino, stat.st_mtime_ns, stat.st_size))
    return tuple(files_seen)


def _read(path: Path) -> set[str]:
    try:
        text = path.read_text()
        return device_names(json.loads(text) if path.suffix == ".json" else yaml.load(text, Loader=_Loader))
    except (OSError, ValueError, yaml.YAMLError) as error:
        # The runtimes ignore such a file, too.
        log.warning("%s can't be read as a CDI specification: %s", path, str(error).splitlines()[0])
        return set()


class Injection:
    """Chooses the injection of cards for each container when it is created.

    :param mode: one of ``MODES``.
    :param unfit: why kubelet or runtime may not support CDI names, until ``node`` is called; empty if both do.
    """

    def __init__(
        self,
        mode: str = AUTO,
        folders: t.Sequence[Path] = FOLDERS,
        unfit: str = "the node hasn't been read from the API yet",
    ) -> None:
        self._mode = mode
        self._folders = tuple(folders)
        self._lock = threading.Lock()
        self._signature_read: Signature = ()
        # The devices of each file by its row of the signature: only changed files are read again.
        self._by_file: dict[FileState, set[str]] = {}
        self._specified: set[str] = set()
        self._obstacle = unfit
        self._used: tuple[str, str] | None = None
        self.on_used: t.Callable[[str], None] = lambda mode: None

    def node(self, node: JsonObject) -> None:
        """Update from the node's object in the API."""
        with self._lock:
            self._obstacle = obstacle(node)

    def refusal(self, uuid: str) -> Refusal | None:
        """Return why a card can't be given to pods: CDI is required, and no specification names the card."""
        if self._mode != CDI:
            return None
        self._read_specifications()
        missing = self._missing([uuid])
        return Refusal(Reason.CDI_UNAVAILABLE, missing) if missing else None

    def devices(self, uuids: t.Sequence[str]) -> tuple[str, ...]:
        """Return the CDI names of these cards; empty if the environment variable is used.

        :raises InvalidIds: CDI is required, and a card has no CDI name.
        """
        if self._mode == ENVVAR:
            return ()
        self._read_specifications()
        reason = self._missing(uuids)
        if self._mode == AUTO:
            reason = self._obstacle or reason
        if not reason:
            return tuple(device_name(uuid) for uuid in uuids)
        if self._mode == CDI:
            raise InvalidIds(Reason.CDI_UNAVAILABLE, reason)
        return ()

    def report(self, uuids: t.Sequence[str]) -> None:
        """Log the injection mode of the node's cards, and report it to ``on_used``, if it has changed."""
        try:
            mode, why = (CDI, "") if self.devices(uuids) else (ENVVAR, self._why(uuids))
        except InvalidIds as error:
            mode, why = CDI, error.refusal.text
        if (mode, why) == self._used or not uuids:
            return
        self._used = (mode, why)
        log.info("containers get their cards by %s%s", mode, f": {why}" if why else "", extra={"data": {"mode": mode}})
        self.on_used(mode)

    def _why(self, uuids: t.Sequence[str]) -> str:
        return (
            "the option --device-injection requires it"
            if self._mode == ENVVAR
            else self._obstacle or self._missing(uuids)
        )

    def _missing(self, uuids: t.Iterable[str]) -> str:
        with self._lock:
            missing = [uuid for uuid in uuids if uuid not in self._specified]
        if not missing:
            return ""
        folders = " or ".join(map(str, self._folders))
        return f"no CDI specification in {folders} names {device_name(missing[0])}"

    def _read_specifications(self) -> None:
        """Read the specifications if they have changed."""
        now = _signature(self._folders)
        with self._lock:
            if now == self._signature_read:
                return
            known, self._by_file = self._by_file, {}
            for row in now:
                self._by_file[row] = known[row] if row in known else _read(Path(row[0]))
            by_folder = [
                [names for row, names in self._by_file.items() if Path(row[0]).parent == folder]
                for folder in self._folders
            ]
            self._specified, self._signature_read = resolve_devices(by_folder), now
