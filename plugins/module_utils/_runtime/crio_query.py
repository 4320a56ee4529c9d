# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Query a node's CRI-O: its files, the daemon's flags, and the running daemon's configuration."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.secrets import PLACEHOLDER
from .._host.system import System
from .._host.systemd import Unit, naming, reason_of, stale, unit
from . import containerd, crio
from .types import CrioState

# These flags override all files.
FLAGS = ("default-runtime", "runtimes")

# In a URL, or in a proxy without a scheme: everything up to the last at sign.
_SECRET = re.compile(r"""(://|_proxy=(?![a-z0-9+.-]+://))((?:[^\s"'\\]|\\.)+)(?=@)""", re.IGNORECASE)


class Masks:
    """Numbered placeholders for the credentials of CRI-O's files, the same in every file.

    Our drop-in repeats values of other files and of the daemon, so a placeholder means the same credential everywhere.
    """

    def __init__(self, texts: t.Iterable[str]) -> None:
        self._words: dict[str, str] = {}
        for text in texts:
            for found in _SECRET.finditer(text):
                self._words.setdefault(found.group(2), f"{PLACEHOLDER}-{len(self._words) + 1}")

    def mask(self, text: str) -> str:
        """Replace the credentials by placeholders."""
        return _SECRET.sub(lambda found: found.group(1) + self._words.get(found.group(2), PLACEHOLDER), text)

    def unmask(self, text: str) -> str:
        """Replace the placeholders by the credentials."""
        secrets = {word: secret for secret, word in self._words.items()}
        return re.sub(rf"{PLACEHOLDER}-[0-9]+", lambda found: secrets.get(found.group(), found.group()), text)


def paths_of(daemon: Unit) -> tuple[str, str]:
    """Return the main file and the drop-in directory."""
    main = [crio.MAIN, *daemon.values("--config", "-c")]
    folder = [crio.FOLDER, *daemon.values("--config-dir", "-d")]
    return main[-1], folder[-1]


def read_files(system: System, main: str, folder: str) -> dict[str, str]:
    """Read all files of the configuration, in CRI-O's order."""
    texts = {}
    for path in [main, *crio.in_order(system.names, lambda path: bool(system.names(path)), folder)]:
        text = system.read(path)
        if text is not None:
            texts[path] = text
    return texts


def config_of_files(system: System, daemon: Unit) -> tuple[str, str]:
    """Have CRI-O print the effective configuration of the files.

    :returns: the configuration, or an empty text and CRI-O's error.
    """
    main, folder = paths_of(daemon)
    flags = ["--config", main] if system.exists(main) else []
    done = system.run([daemon.binary or "crio", *flags, "--config-dir", folder, "config"], timeout=20)
    if done.rc == 0:
        return done.out, ""
    return "", reason_of(done.err, f"crio config ended with {done.rc}")


def config_of_daemon(system: System, daemon: Unit) -> str:
    """Query the running daemon's configuration; empty where it doesn't answer."""
    if not daemon.active:
        return ""
    for command in ([daemon.binary or "crio", "status", "config"], ["crio-status", "config"]):
        done = system.run(command, timeout=10)
        if done.rc == 0 and done.out.strip():
            return done.out
    return ""


def masks(system: System, daemon: Unit) -> Masks:
    """Build the placeholders from every text that the plan uses.

    Our own files come last: all their credentials are copies.
    """
    main, folder = paths_of(daemon)
    texts = read_files(system, main, folder)
    ours = [texts.pop(posixpath.join(folder, name), "") for name in (crio.DROP_IN_NAME, crio.KEPT_NAME)]
    return Masks(
        [*texts.values(), system.read(containerd.TOOLKIT_CONFIG) or "", config_of_daemon(system, daemon), *ours]
    )


def observe(system: System) -> CrioState | None:
    """Collect CRI-O's facts; None where it isn't installed."""
    daemon = unit(system, crio.UNIT)
    done = system.run([daemon.binary or "crio", "--version"], timeout=10)
    found = re.search(r"(?:version|Version:)\s+v?([0-9]+\.[0-9]+\S*)", done.out) if done.rc == 0 else None
    if found is None:
        return None
    main, folder = paths_of(daemon)
    texts = read_files(system, main, folder)
    _text, error = config_of_files(system, daemon)
    running = crio.parse_config(config_of_daemon(system, daemon))
    toolkit = system.read(containerd.TOOLKIT_CONFIG)
    hide = masks(system, daemon).mask
    drop_in = posixpath.join(folder, crio.DROP_IN_NAME)
    return {
        "version": found.group(1),
        "config_path": main,
        "folder": folder,
        "files": {path: hide(text) for path, text in texts.items()},
        "flags": {
            name: {"values": daemon.values(f"--{name}"), "file": naming(system, daemon, f"--{name}")}
            for name in FLAGS
            if daemon.values(f"--{name}")
        },
        "default_runtime": running.default_runtime,
        "runtimes": {
            name: {key: hide(value) for key, value in running.runtime(name).items()} for name in running.runtimes()
        },
        "cgroup_driver": running.flat.get(("crio", "runtime", "cgroup_manager"), "").strip("\"'"),
        "answers": bool(running.flat),
        "error": hide(error),
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "toolkit_config": None if toolkit is None else hide(toolkit),
        "on_path": [
            name
            for name in sorted({*containerd.LOW_LEVEL, *running.runtimes()})
            if any(system.exists(f"{folder}/{name}") for folder in containerd.PATH)
        ],
        "ours": drop_in in texts,
        "pending": system.exists(crio.PENDING_PATH),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }
