# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Docker's configuration: what its daemon says of itself, and what in daemon.json is secret. Pure."""

from __future__ import annotations

import dataclasses
import json
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted, release
from ansible_collections.kubegpu.share.plugins.module_utils._masking import Masking

UNIT = "docker.service"
DEFAULT_CONFIG = "/etc/docker/daemon.json"
DEFAULT_SOCKET = "unix:///var/run/docker.sock"
PENDING_PATH = "/var/lib/kubegpu-share/docker.json"
# JSON has no comments: what daemon.json was before us is written down beside it.
WAS_PATH = "/var/lib/kubegpu-share/docker-was.json"
STOCK_RUNTIME = "runc"
# The first release that knows CDI, that checks a file without starting, and that takes an empty one.
CDI_SINCE = 25
VALIDATE_SINCE = 23
EMPTY_FILE_SINCE = 23

# One pass over the text, so that masking and unmasking number alike; a slash may be written as \/.
_URL = r'(?:[^"\\]|\\.)*?:(?:\\?/){2}'
_SECRET = re.compile(
    # Of a proxy, with a scheme or without.
    rf'("(?:https?|ftp)-proxy"\s*:\s*"(?:{_URL})?)((?:[^"\s\\]|\\.)+)(?=@)'
    # Of a URL: all between the scheme and the last at sign.
    rf'|("{_URL})((?:[^"\s\\]|\\.)+)(?=@)'
    # Of a log driver and the like.
    r'|("[^"\n]*(?:token|password|secret|access-key|credential)[^"\n]*"\s*:\s*")((?:[^"\\\n]|\\.)+)(?=")',
    re.IGNORECASE,
)
_MASKING = Masking(_SECRET)
mask, unmask = _MASKING.mask, _MASKING.unmask


def major(version: str) -> int:
    """Docker's release: 20 for 20.10."""
    return release(version)[0]


# --------------------------------------------------------------------------- the daemon's own word


@dataclasses.dataclass(frozen=True)
class Info:
    """What of ``docker info`` matters to us.

    :param runtimes: what each runtime runs; empty where it isn't a program's path.
    :param containers: how many run.
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
        """What a change of ours can alter."""
        # The aliases of containerd's shims come and go with a reload.
        return self.default_runtime, {name: path for name, path in self.runtimes.items() if "." not in name}


def read_info(text: str) -> Info | None:
    """``docker info --format '{{json .}}'``; None where no daemon has answered."""
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


def shortcomings(found: Info, wanted: Wanted) -> list[str]:
    """Why a running Docker isn't what is wanted, each in a few words."""
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


# --------------------------------------------------------------------------- the file


@dataclasses.dataclass(frozen=True)
class Flags:
    """What the daemon's command line says: its --default-runtime, and what an --add-runtime of our name runs."""

    default: str = ""
    ours: str | None = None


def flags(default_runtime: t.Sequence[str], add_runtime: t.Sequence[str]) -> Flags:
    """From the values of the two flags."""
    added = dict(one.partition("=")[::2] for one in add_runtime)
    return Flags(default_runtime[-1] if default_runtime else "", added.get(RUNTIME_NAME))


@dataclasses.dataclass(frozen=True)
class Goal:
    """The runtimes that a daemon has which has read a daemon.json; None (or none) where the file is silent."""

    default: str | None
    runtimes: t.Mapping[str, str]

    def reached(self, found: Info, flags: Flags) -> bool:
        """The daemon runs so."""
        default = self.default or flags.default or STOCK_RUNTIME
        ours = self.runtimes.get(RUNTIME_NAME)
        running = found.runtimes.get(RUNTIME_NAME)
        return found.default_runtime == default and (running == ours if ours is not None else running == flags.ours)


def goal(text: str | None) -> Goal:
    """Of a daemon.json; nodes only read it, with the standard library."""
    try:
        tree = json.loads((text or "").lstrip("\ufeff").strip() or "{}")
        runtimes = tree.get("runtimes")
        if not isinstance(runtimes, dict):
            runtimes = {}
        return Goal(
            tree.get("default-runtime") or None,
            {name: str((one or {}).get("path") or "") for name, one in runtimes.items()},
        )
    except (ValueError, AttributeError, TypeError):
        return Goal(None, {})


def hosts(text: str | None) -> list[str]:
    """Where a daemon.json has the daemon listen; nothing where it can't be read."""
    try:
        return [str(one) for one in json.loads((text or "{}").lstrip("\ufeff")).get("hosts") or []]
    except (ValueError, AttributeError, TypeError):
        return []


def needs_telling(text: str | None, flags: Flags) -> bool:
    """A reload of this file would leave a runtime of before in place: what it lacks is not taken back."""
    found = goal(text)
    return (found.default is None and not flags.default) or not found.runtimes


def telling(text: str | None, flags: Flags) -> str:
    """A file for one reload only, which says what the real one leaves out: the stock runtime, and no others.

    A default runtime that is a flag must not be in the file too.
    """
    tree = json.loads((text or "").lstrip("\ufeff").strip() or "{}")
    if not flags.default:
        tree.setdefault("default-runtime", STOCK_RUNTIME)
    tree["runtimes"] = tree.get("runtimes") or {}
    return json.dumps(tree)


# --------------------------------------------------------------------------- what was before


@dataclasses.dataclass(frozen=True)
class Was:
    """What a daemon.json was before us.

    :param text: None where there was no file.
    :param written: SHA-256 of each text that is that one and ours, and nobody else's.
    """

    path: str
    text: str | None
    written: tuple[str, ...]

    def dump(self) -> str:
        return json.dumps({"path": self.path, "text": self.text, "written": list(self.written)}) + "\n"


def read_was(text: str | None) -> Was | None:
    """The record; None where there is none that was ever complete."""
    try:
        found = json.loads(text or "")
        return Was(str(found["path"]), found["text"], tuple(found["written"]))
    except (ValueError, KeyError, TypeError):
        return None
