# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Docker's configuration: ``docker info``, daemon.json, and its credentials. Pure.

https://github.com/moby/moby/blob/v28.5.0/daemon/config/config.go
"""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from .._core.secrets import Masking
from .containerd import RUNTIME_NAME, Options, release

UNIT = "docker.service"
DEFAULT_CONFIG = "/etc/docker/daemon.json"
DEFAULT_SOCKET = "unix:///var/run/docker.sock"
PENDING_PATH = "/var/lib/kubegpu-share/docker.json"
# JSON has no comments to mark our keys with, so the original daemon.json is backed up here.
BACKUP_PATH = "/var/lib/kubegpu-share/docker-was.json"
STOCK_RUNTIME = "runc"
# The first releases that support CDI, --validate, and an empty file.
CDI_SINCE = 25
VALIDATE_SINCE = 23
EMPTY_FILE_SINCE = 23

# One pass over the text, so that masking and unmasking number alike; a slash may be written as \/.
_URL = r'(?:[^"\\]|\\.)*?:(?:\\?/){2}'
_SECRET = re.compile(
    # In a proxy, with a scheme or without.
    rf'("(?:https?|ftp)-proxy"\s*:\s*"(?:{_URL})?)((?:[^"\s\\]|\\.)+)(?=@)'
    # In a URL: everything between the scheme and the last at sign.
    rf'|("{_URL})((?:[^"\s\\]|\\.)+)(?=@)'
    # In options of log drivers and the like.
    r'|("[^"\n]*(?:token|password|secret|access-key|credential)[^"\n]*"\s*:\s*")((?:[^"\\\n]|\\.)+)(?=")',
    re.IGNORECASE,
)


def _credentials(text: str) -> t.Iterator[tuple[int, int]]:
    for found in _SECRET.finditer(text):
        # The two groups that matched are the text before a credential and the credential.
        yield found.span(found.lastindex or 0)


_MASKING = Masking(_credentials)
mask, unmask = _MASKING.mask, _MASKING.unmask


def major(version: str) -> int:
    """Return Docker's major release: 20 for 20.10."""
    return release(version)[0]


@dataclasses.dataclass(frozen=True)
class Info:
    """The parts of ``docker info`` that this collection uses.

    :param runtimes: each runtime's program; empty for a containerd shim.
    :param containers: number of running containers.
    """

    version: str
    default_runtime: str
    runtimes: t.Mapping[str, str]
    cgroup_driver: str
    live_restore: bool
    containers: int
    rootless: bool

    @property
    def state(self) -> tuple[str, dict[str, str]]:
        """Return the part that this collection's changes can alter."""
        # A reload adds and removes aliases of containerd's shims.
        return self.default_runtime, {name: path for name, path in self.runtimes.items() if "." not in name}


def read_info(text: str) -> Info | None:
    """Parse ``docker info --format '{{json .}}'``; None where no daemon answered."""
    try:
        found = json.loads(text)
        if not found.get("ServerVersion"):
            return None
        return Info(
            version=str(found["ServerVersion"]),
            default_runtime=str(found.get("DefaultRuntime") or ""),
            runtimes={name: str(one.get("path") or "") for name, one in (found.get("Runtimes") or {}).items()},
            cgroup_driver=str(found.get("CgroupDriver") or ""),
            live_restore=bool(found.get("LiveRestoreEnabled")),
            containers=int(found.get("ContainersRunning") or 0),
            rootless=any("rootless" in str(one) for one in found.get("SecurityOptions") or []),
        )
    except (ValueError, AttributeError, TypeError):
        return None


def unmet_requirements(found: Info, wanted: Options) -> list[str]:
    """List how a running Docker differs from the requested state."""
    if not wanted.present:
        return []
    wrong = []
    if wanted.default and found.default_runtime != RUNTIME_NAME:
        wrong.append(f"its default runtime is {found.default_runtime!r}")
    if RUNTIME_NAME not in found.runtimes:
        wrong.append(f"it has no runtime {RUNTIME_NAME!r}")
    elif found.runtimes[RUNTIME_NAME] != wanted.binary:
        wrong.append(f"its runtime {RUNTIME_NAME!r} runs {found.runtimes[RUNTIME_NAME]!r}")
    return wrong


@dataclasses.dataclass(frozen=True)
class Flags:
    """The daemon's command line: its --default-runtime, and the program of an --add-runtime of our name."""

    default: str = ""
    ours: str | None = None


def flags(default_runtime: t.Sequence[str], add_runtime: t.Sequence[str]) -> Flags:
    """Convert the values of the two flags."""
    added = dict(one.partition("=")[::2] for one in add_runtime)
    return Flags(default_runtime[-1] if default_runtime else "", added.get(RUNTIME_NAME))


@dataclasses.dataclass(frozen=True)
class FileRuntimes:
    """The runtimes that a daemon.json sets; ``default`` is None where it sets none."""

    default: str | None
    runtimes: t.Mapping[str, str]

    def match(self, found: Info, flags: Flags) -> bool:
        """Return whether the daemon runs with this file."""
        default = self.default or flags.default or STOCK_RUNTIME
        ours = self.runtimes.get(RUNTIME_NAME)
        running = found.runtimes.get(RUNTIME_NAME)
        return found.default_runtime == default and (running == ours if ours is not None else running == flags.ours)


def _tree(text: str | None) -> t.Any:
    """Parse a daemon.json; a missing or empty one is an empty object."""
    return json.loads((text or "").lstrip("\ufeff").strip() or "{}")


def setting(runtime: dict[str, t.Any], key: str) -> t.Any:
    """Return one setting of a runtime; Go ignores the case of its key, and the last spelling wins."""
    return next((value for name, value in reversed(runtime.items()) if name.lower() == key.lower()), None)


def runtimes_in(text: str | None) -> FileRuntimes:
    """Read the runtimes of a daemon.json; an unreadable one sets none."""
    try:
        tree = _tree(text)
        runtimes = tree.get("runtimes")
        if not isinstance(runtimes, dict):
            runtimes = {}
        return FileRuntimes(
            tree.get("default-runtime") or None,
            {name: str(setting(one or {}, "path") or "") for name, one in runtimes.items()},
        )
    except (ValueError, AttributeError, TypeError):
        return FileRuntimes(None, {})


def hosts(text: str | None) -> list[str]:
    """Return the daemon's addresses in a daemon.json; empty where it can't be read."""
    try:
        return [str(one) for one in _tree(text).get("hosts") or []]
    except (ValueError, AttributeError, TypeError):
        return []


def reload_keeps_runtime(text: str | None, flags: Flags) -> bool:
    """Return whether a reload of this file would keep an old runtime, because the file lacks the key."""
    found = runtimes_in(text)
    return (found.default is None and not flags.default) or not found.runtimes


def with_stock_runtime(text: str | None, flags: Flags) -> str:
    """Return a file for one reload only, which sets what the real one leaves out: the stock runtime and no others.

    A default runtime that is a flag must not be in the file too.
    """
    tree = _tree(text)
    if not flags.default:
        tree.setdefault("default-runtime", STOCK_RUNTIME)
    tree["runtimes"] = tree.get("runtimes") or {}
    return json.dumps(tree)


@dataclasses.dataclass(frozen=True)
class DaemonJsonBackup:
    """The original daemon.json.

    :param text: None where there was no file.
    :param written: SHA-256 of each text that consists of the original and our settings alone.
    """

    path: str
    text: str | None
    written: tuple[str, ...]

    def dump(self) -> str:
        return json.dumps({"path": self.path, "text": self.text, "written": list(self.written)}) + "\n"


def parse_backup(text: str | None) -> DaemonJsonBackup | None:
    """Parse a backup; None for a missing or incomplete one."""
    try:
        found = json.loads(text or "")
        return DaemonJsonBackup(str(found["path"]), found["text"], tuple(found["written"]))
    except (ValueError, KeyError, TypeError):
        return None
