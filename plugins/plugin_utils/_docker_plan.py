# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What of a node's daemon.json has to change, and how; made on the controller from what the node showed.

JSON has no comments by which ours could be found again, so the node keeps the whole file as it was before us. As long
as nobody else has changed the file since, it is always "that file and ours", and taking ours out gives that file back
to the byte. Where somebody has, each of our keys is taken back by itself.
"""

from __future__ import annotations

import dataclasses
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _docker
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils._json_document import Document, Path

Json = dict[str, t.Any]

DEFAULT: Path = ("default-runtime",)
RUNTIME: Path = ("runtimes", RUNTIME_NAME)
CDI: Path = ("features", "cdi")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the node.

    :param restart: a reload doesn't take the change over, and a restart stops no container.
    """

    plan: Plan
    files: tuple[Json, ...] = ()
    restart: bool = False
    warnings: tuple[str, ...] = ()


def make_plan(wanted: Wanted, observed: Json | None) -> Planned:
    """Compare the node with what is asked for.

    :param observed: section ``docker`` of the observation.
    :raises BadInput: this Docker can't be configured as asked for; nothing was changed.
    """
    if not observed:
        if wanted.present:
            raise BadInput("runtime_name: Docker isn't installed on this node")
        return Planned(Plan())
    _refuse(wanted, observed)
    path, before = observed["config_path"], observed["text"]
    after = _present(wanted, observed) if wanted.present else _absent(observed)
    changed = after != before
    cdi = _cdi(after) and not _cdi(before) if changed else False
    free = observed["live_restore"] or not observed["containers"]
    warnings = []
    if cdi and not free:
        warnings.append(
            "features.cdi takes effect with Docker's next restart, which was left to you: live-restore is off, so that "
            f"a restart would have stopped {observed['containers']} running container(s)"
        )
    changes = [Change(path, before or "", after or "")] if changed else []
    if observed["ours"] and not wanted.present and not changed:
        changes.append(Change(_docker.WAS_PATH, f"what {path} was before\n", ""))
    reason = _reason(wanted, observed, after, changed)
    if reason:
        changes.append(Change(_docker.UNIT, f"running {reason}\n", "running with the file on disk\n"))
    rows = ({"path": path, "before": digest(before), "after": after},) if changed else ()
    return Planned(Plan(tuple(changes)), rows, cdi and free, tuple(warnings) if changes else ())


def _reason(wanted: Wanted, observed: Json, after: str | None, changed: bool) -> str:
    """Why the daemon has to read its file again, or nothing."""
    if not observed["service_active"]:
        return "not at all" if wanted.present else ""
    if changed or observed["pending"]:
        return "with an older configuration"
    found = _docker.Info("", observed["default_runtime"], observed["runtimes"], "", False, 0, False)
    if wanted.present:
        return "with an older configuration" if _docker.shortcomings(found, wanted) else ""
    # What isn't ours is no reason to touch a daemon.
    left = observed["ours"] and not _docker.goal(after).reached(found, _flags(observed))
    return "with an older configuration" if left else ""


def _flags(observed: Json) -> _docker.Flags:
    def values(name: str) -> list[str]:
        return list((observed["flags"].get(name) or {}).get("values", []))

    return _docker.flags(values("default-runtime"), values("add-runtime"))


def _refuse(wanted: Wanted, observed: Json) -> None:
    if not wanted.present:
        if observed["text"] is not None and "\ufffd" in observed["text"]:
            raise BadInput(f"{observed['config_path']} isn't UTF-8; it is left as it is")
        return
    if observed["rootless"]:
        raise BadInput(
            f"runtime_name: Docker runs rootless on this node ({observed['rootless']}), for one user and not for a "
            "kubelet; configure it in that user's ~/.config/docker/daemon.json, or install Docker's system service"
        )
    if observed["operator"] or _of_operator(observed):
        raise BadInput(
            "runtime_state: NVIDIA's GPU Operator configures Docker on this node; disable its toolkit "
            "(toolkit.enabled=false) or leave this node out"
        )
    text = observed["text"] or ""
    if "\ufffd" in text:
        raise BadInput(f"{observed['config_path']} isn't UTF-8; it is left as it is")
    release = _docker.major(observed["version"])
    if observed["text"] is not None and release < _docker.EMPTY_FILE_SINCE:
        if not text.strip():
            raise BadInput(f"{observed['config_path']} is empty, with which Docker {observed['version']} doesn't start")
        if text.startswith("\ufeff"):
            raise BadInput(
                f"{observed['config_path']} begins with a byte order mark, with which Docker {observed['version']} "
                "doesn't start"
            )
    if observed["error"]:
        raise BadInput(f"Docker can't read its own configuration: {observed['error']}")
    if observed["service_active"] and not observed["answers"]:
        raise BadInput(
            "runtime_name: Docker runs on this node and 'docker info' has no answer, so that no change could be proven"
        )
    flag = observed["flags"].get("default-runtime")
    if flag and flag["values"][-1] != RUNTIME_NAME and wanted.default:
        raise BadInput(
            f"runtime_set_default: {flag['file']} starts dockerd with --default-runtime={flag['values'][-1]}, and "
            "Docker doesn't start with a setting that is both a flag and in daemon.json; take the flag out"
        )


def _of_operator(observed: Json) -> bool:
    return str(observed["runtimes"].get(RUNTIME_NAME, "")).startswith("/usr/local/nvidia/toolkit")


# --------------------------------------------------------------------------- present


def _present(wanted: Wanted, observed: Json) -> str:
    path, was = observed["config_path"], observed["was"]
    if was is not None and was["untouched"]:
        document = Document(path, was["text"] or "")
    else:
        document = Document(path, observed["text"] or "")
        if was is not None:
            _take_back(document, Document(path, was["text"] or ""), wanted)
    if wanted.default and "default-runtime" not in observed["flags"]:
        _put(document, DEFAULT, RUNTIME_NAME)
    _runtime(document, wanted.binary)
    if wanted.cdi and _docker.major(observed["version"]) >= _docker.CDI_SINCE:
        _put(document, CDI, True)
    return document.checked()


def _runtime(document: Document, binary: str) -> None:
    """The user's other settings of the runtime, like its arguments, stay."""
    there = document.get(RUNTIME)
    if not isinstance(there, dict):
        document.set(RUNTIME, {"path": binary})
        return
    # Go doesn't mind how a key's letters are written.
    name = next((key for key in there if key.lower() == "path"), "path")
    for key in [key for key in there if key.lower() in ("runtimetype", "options")]:
        # A shim of containerd's, and options for it; Docker takes either that or a path.
        document.delete((*RUNTIME, key))
    _put(document, (*RUNTIME, name), binary)


def _put(document: Document, path: Path, value: t.Any) -> None:
    if document.get(path) != value:
        document.set(path, value)


def _cdi(text: str | None) -> bool:
    return Document("daemon.json", text or "").get(CDI) is True


# --------------------------------------------------------------------------- absent


def _absent(observed: Json) -> str | None:
    was, text = observed["was"], observed["text"]
    if was is None or text is None:
        return t.cast("str | None", text)
    if was["untouched"]:
        return t.cast("str | None", was["text"])
    path = observed["config_path"]
    document = Document(path, text)
    _take_back(document, Document(path, was["text"] or ""), None)
    done = document.checked()
    return None if was["text"] is None and not document.tree else done


def _take_back(document: Document, before: Document, still: Wanted | None) -> None:
    """Each of our keys as it was before us, where it is still as we have set it.

    :param still: what is asked for now; None for nothing at all.
    """
    if document.get(DEFAULT) == RUNTIME_NAME and not (still and still.default):
        _back(document, before, DEFAULT)
    if document.get(RUNTIME) is not None and still is None:
        _back(document, before, RUNTIME)
    if document.get(CDI) is True and not (still and still.cdi):
        _back(document, before, CDI)


def _back(document: Document, before: Document, path: Path) -> None:
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
