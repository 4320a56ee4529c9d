# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan for Docker: keys of daemon.json.

JSON has no comments to mark our keys with, so the node keeps a backup of the original file. As long as nobody else
changes the file, it consists of the original and our keys, and removing ours restores the original to the byte. After
somebody else's change each of our keys is restored by itself.
"""

from __future__ import annotations

import dataclasses
import typing as t

from .._core.errors import BadInput
from .._core.plan import Change
from .._documents.json_editor import Document, Path
from . import docker
from .common import (
    FileChange,
    RuntimePlan,
    check_replacement,
    plan_of,
    refuse_missing,
    refuse_operator,
    replaced,
    restart_reason,
)
from .containerd import RUNTIME_NAME, Options
from .types import DockerState

DEFAULT: Path = ("default-runtime",)
RUNTIME: Path = ("runtimes", RUNTIME_NAME)
CDI: Path = ("features", "cdi")


def make_plan(wanted: Options, observed: DockerState | None) -> RuntimePlan:
    """Compare the node with the requested state.

    :raises BadInput: this Docker can't be configured as requested; nothing was changed.
    """
    if not observed:
        return refuse_missing("Docker", wanted)
    warnings = [*_refuse(wanted, observed)]
    path, before = observed["config_path"], observed["text"]
    after = _present(wanted, observed) if wanted.present else _absent(observed)
    changed = after != before
    enables_cdi = changed and _cdi(after) and not _cdi(before)
    # A restart stops no container.
    harmless = observed["live_restore"] or not observed["containers"]
    others = []
    if observed["ours"] and not wanted.present and not changed:
        others.append(Change(docker.BACKUP_PATH, f"backup of {path}\n", ""))
    outdated = _outdated(wanted, observed, after)
    # Without our keys, only what is left of them is a reason to touch the daemon.
    left = outdated and not wanted.present
    reason = restart_reason(
        wanted.present, observed["service_active"], changed or observed["pending"] or left, outdated
    )
    planned = plan_of([FileChange(path, before, after)], docker.UNIT, reason, others, on_disk="file")
    if enables_cdi and not harmless:
        warnings.append(
            "features.cdi takes effect with Docker's next restart, which is left to you: live-restore is off, so a "
            f"restart would stop {observed['containers']} running container(s)"
        )
    return dataclasses.replace(planned, restart=enables_cdi and harmless, warnings=tuple(warnings))


def _outdated(wanted: Options, observed: DockerState, after: str | None) -> bool:
    """Return whether the running daemon differs from the requested state."""
    running = docker.Info("", observed["default_runtime"], observed["runtimes"], "", False, 0, False)
    if wanted.present:
        return bool(docker.unmet_requirements(running, wanted))
    return observed["ours"] and not docker.runtimes_in(after).match(running, _flags(observed))


def _flags(observed: DockerState) -> docker.Flags:
    def values(name: str) -> list[str]:
        return observed["flags"][name]["values"] if name in observed["flags"] else []

    return docker.flags(values("default-runtime"), values("add-runtime"))


def _refuse(wanted: Options, observed: DockerState) -> tuple[str, ...]:
    """Refuse what can't be configured as requested; return warnings of the rest."""
    path, text, version = observed["config_path"], observed["text"] or "", observed["version"]
    if wanted.present and observed["rootless"]:
        raise BadInput(
            f"runtime_name: Docker runs rootless on this node ({observed['rootless']}), for one user and not for a "
            "kubelet; configure it in that user's ~/.config/docker/daemon.json, or install Docker's system service"
        )
    if wanted.present:
        refuse_operator("Docker", observed["operator"], observed["runtimes"].get(RUNTIME_NAME, ""))
    if "\ufffd" in text:
        raise BadInput(f"{path} isn't UTF-8; it is left as it is")
    if not wanted.present:
        return ()
    if observed["text"] is not None and docker.major(version) < docker.EMPTY_FILE_SINCE:
        if not text.strip():
            raise BadInput(f"{path} is empty, and Docker {version} doesn't start with an empty file")
        if text.startswith("\ufeff"):
            raise BadInput(f"{path} begins with a byte order mark, with which Docker {version} doesn't start")
    if observed["error"]:
        raise BadInput(f"Docker can't read its own configuration: {observed['error']}")
    if observed["service_active"] and not observed["answers"]:
        raise BadInput(
            "runtime_name: Docker runs on this node and 'docker info' doesn't answer, so no change could be verified"
        )
    flag = observed["flags"].get("default-runtime")
    if flag and flag["values"][-1] != RUNTIME_NAME and wanted.default:
        raise BadInput(
            f"runtime_set_default: {flag['file']} starts dockerd with --default-runtime={flag['values'][-1]}, and "
            "Docker doesn't start with a setting that is both a flag and in daemon.json; remove the flag"
        )
    default, lost = _replaced(observed)
    done = Document(path, text).get(DEFAULT) == RUNTIME_NAME
    return check_replacement("Docker", default, lost, wanted, done, observed["low_level"])


def _replaced(observed: DockerState) -> tuple[str, str]:
    """Return the default runtime of the user's own file, and what pods lose without it."""
    was = observed["was"]
    for text in (observed["text"], was["text"] if was else None):
        document = Document(observed["config_path"], text or "")
        name = document.get(DEFAULT)
        if isinstance(name, str) and name not in ("", RUNTIME_NAME):
            table = document.get(("runtimes", name))
            table = table if isinstance(table, dict) else {}
            # Docker knows the programs of its flags too.
            program = docker.setting(table, "path") or observed["runtimes"].get(name, "")
            return name, replaced(name, str(docker.setting(table, "runtimeType") or ""), str(program))
    return "", ""


def _present(wanted: Options, observed: DockerState) -> str:
    path, was = observed["config_path"], observed["was"]
    if was is not None and was["untouched"]:
        document = Document(path, was["text"] or "")
    else:
        document = Document(path, observed["text"] or "")
        if was is not None:
            _restore(document, Document(path, was["text"] or ""), wanted)
    if wanted.default and "default-runtime" not in observed["flags"]:
        _put(document, DEFAULT, RUNTIME_NAME)
    _runtime(document, wanted.binary)
    if wanted.cdi and docker.major(observed["version"]) >= docker.CDI_SINCE:
        _put(document, CDI, True)
    return document.checked()


def _runtime(document: Document, binary: str) -> None:
    """Set the runtime's program; the user's other settings of it, like its arguments, stay."""
    there = document.get(RUNTIME)
    if not isinstance(there, dict):
        document.set(RUNTIME, {"path": binary})
        return
    # Go ignores the case of keys, and the last spelling wins.
    name = next((key for key in reversed(there) if key.lower() == "path"), "path")
    for key in [key for key in there if key.lower() in ("runtimetype", "options")]:
        # Docker accepts either a containerd shim with options or a path.
        document.delete((*RUNTIME, key))
    _put(document, (*RUNTIME, name), binary)


def _put(document: Document, path: Path, value: t.Any) -> None:
    if document.get(path) != value:
        document.set(path, value)


def _cdi(text: str | None) -> bool:
    return Document("daemon.json", text or "").get(CDI) is True


def _absent(observed: DockerState) -> str | None:
    was, text = observed["was"], observed["text"]
    if was is None or text is None:
        return text
    if was["untouched"]:
        return was["text"]
    path = observed["config_path"]
    document = Document(path, text)
    _restore(document, Document(path, was["text"] or ""), None)
    done = document.checked()
    return None if was["text"] is None and not document.tree else done


def _restore(document: Document, before: Document, still: Options | None) -> None:
    """Restore each of our keys that still has our value.

    :param before: the original file.
    :param still: the requested state; None to restore all.
    """
    if document.get(DEFAULT) == RUNTIME_NAME and not (still and still.default):
        _restore_key(document, before, DEFAULT)
    if document.get(RUNTIME) is not None and still is None:
        _restore_key(document, before, RUNTIME)
    if document.get(CDI) is True and not (still and still.cdi):
        _restore_key(document, before, CDI)


def _restore_key(document: Document, before: Document, path: Path) -> None:
    if before.has(path):
        document.restore(path, before.written(path))
        return
    document.delete(path)
    above = path[:-1]
    if above and document.get(above) == {}:
        if not before.has(above):
            document.delete(above)
        elif before.get(above) is None:
            document.restore(above, before.written(above))
