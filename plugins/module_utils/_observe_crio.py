# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Look at a node's CRI-O: its files, its daemon's flags, and what the running daemon says of itself."""

from __future__ import annotations

import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _crio
from ansible_collections.kubegpu.share.plugins.module_utils._masking import WORD
from ansible_collections.kubegpu.share.plugins.module_utils._observe_unit import Unit, naming, stale, unit
from ansible_collections.kubegpu.share.plugins.module_utils._system import System

# Flags win over all files.
FLAGS = ("default-runtime", "runtimes")

# Of a URL, or of a proxy without a scheme: all up to the last at sign.
_SECRET = re.compile(r"""(://|_proxy=(?![a-z0-9+.-]+://))((?:[^\s"'\\]|\\.)+)(?=@)""", re.IGNORECASE)


class Masks:
    """Each credential of CRI-O's files with a numbered word for it, the same in every file.

    Ours repeats what other files and the daemon say, so that a word has to mean the same wherever it stands.
    """

    def __init__(self, texts: t.Iterable[str]) -> None:
        self._words: dict[str, str] = {}
        for text in texts:
            for found in _SECRET.finditer(text):
                self._words.setdefault(found.group(2), f"{WORD}-{len(self._words) + 1}")

    def mask(self, text: str) -> str:
        """A text that may be shown and logged."""
        return _SECRET.sub(lambda found: found.group(1) + self._words.get(found.group(2), WORD), text)

    def unmask(self, text: str) -> str:
        """A text made from masked ones, with the credentials again."""
        secrets = {word: secret for secret, word in self._words.items()}
        return re.sub(rf"{WORD}-[0-9]+", lambda found: secrets.get(found.group(), found.group()), text)


def places(daemon: Unit) -> tuple[str, str]:
    """The main file and the folder of drop-ins."""
    return (daemon.values("--config", "-c") or [_crio.MAIN])[-1], (
        daemon.values("--config-dir", "-d") or [_crio.FOLDER]
    )[-1]


def read_files(system: System, main: str, folder: str) -> dict[str, str]:
    """All files that make up the configuration, in CRI-O's order."""
    texts = {}
    for path in [main, *_crio.in_order(system.names, lambda path: bool(system.names(path)), folder)]:
        text = system.read(path)
        if text is not None:
            texts[path] = text
    return texts


def files_say(system: System, daemon: Unit) -> tuple[str, str]:
    """What the files amount to, by CRI-O itself: its print and, where it has none, its own words."""
    main, folder = places(daemon)
    flags = ["--config", main] if system.exists(main) else []
    done = system.run([daemon.binary or "crio", *flags, "--config-dir", folder, "config"], timeout=20)
    if done.rc == 0:
        return done.out, ""
    lines = [line for line in done.err.splitlines() if line.strip()]
    return "", lines[-1] if lines else f"crio config ended with {done.rc}"


def daemon_says(system: System, daemon: Unit) -> str:
    """What the running daemon has; nothing where it can't be asked."""
    if not daemon.active:
        return ""
    for command in ([daemon.binary or "crio", "status", "config"], ["crio-status", "config"]):
        done = system.run(command, timeout=10)
        if done.rc == 0 and done.out.strip():
            return done.out
    return ""


def masks(system: System, daemon: Unit) -> Masks:
    """Of all that the plan sees; our own file last, which has nothing that no other has."""
    main, folder = places(daemon)
    texts = read_files(system, main, folder)
    ours = texts.pop(posixpath.join(folder, _crio.DROP_IN_NAME), "")
    return Masks([*texts.values(), system.read(_crio.TOOLKIT_CONFIG) or "", daemon_says(system, daemon), ours])


def observe(system: System) -> dict[str, t.Any] | None:
    """What the runtime role decides on, or None where there is no CRI-O on this machine."""
    daemon = unit(system, _crio.UNIT)
    done = system.run([daemon.binary or "crio", "--version"], timeout=10)
    found = re.search(r"(?:version|Version:)\s+v?([0-9]+\.[0-9]+\S*)", done.out) if done.rc == 0 else None
    if found is None:
        return None
    main, folder = places(daemon)
    texts = read_files(system, main, folder)
    _text, error = files_say(system, daemon)
    running = _crio.read_shown(daemon_says(system, daemon))
    toolkit = system.read(_crio.TOOLKIT_CONFIG)
    hide = masks(system, daemon).mask
    drop_in = posixpath.join(folder, _crio.DROP_IN_NAME)
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
            name: {key: hide(value) for key, value in running.runtime(name).items()} for name in running.names()
        },
        "cgroup_driver": running.flat.get(("crio", "runtime", "cgroup_manager"), "").strip("\"'"),
        "answers": bool(running.flat),
        "error": hide(error),
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "toolkit_config": None if toolkit is None else hide(toolkit),
        # Programs that the toolkit finds by their names.
        "on_path": [
            name for name in ("runc", "crun") if any(system.exists(f"{folder}/{name}") for folder in _crio.PATH)
        ],
        "ours": drop_in in texts,
        "pending": system.exists(_crio.PENDING_PATH),
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
    }
