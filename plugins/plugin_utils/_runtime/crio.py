# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The plan for CRI-O: one drop-in of our own.

CRI-O reads its main file and then every file of the drop-in directory in the order of their names; a later setting
wins. A list or a runtime's table replaces an earlier one of the same name as a whole and inherits nothing from it. So
our table repeats everything of the default runtime, above all its monitor (conmon), which is rarely in the search path.
https://github.com/cri-o/cri-o/blob/v1.34.0/docs/crio.conf.d.5.md
"""

from __future__ import annotations

import posixpath
import tomllib
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._runtime import crio
from ...module_utils._runtime.containerd import RUNTIME_NAME, Options
from ...module_utils._runtime.types import CrioState
from .._documents import toml_editor as toml
from .base import HEADER, FileChange, RuntimePlan, plan_of, refuse_missing, refuse_operator, restart_reason

# Tables whose entries are replaced as a whole by a later one of the same name.
WHOLE = (("crio", "runtime", "runtimes"), ("crio", "runtime", "workloads"))
# An empty value of these keeps an earlier one.
KEPT_IF_EMPTY = (("crio", "root"), ("crio", "runroot"), ("crio", "storage_driver"))
APPENDED = ("crio", "storage_option")
# These settings name the default runtime's own program and aren't copied.
NOT_COPIED = ("runtime_path", "runtime_config_path", "platform_runtime_paths", "inherit_default_runtime")
# The toolkit's list of low-level runtimes.
LOW_LEVEL = ("nvidia-container-runtime", "runtimes")


def make_plan(wanted: Options, observed: CrioState | None) -> RuntimePlan:
    """Compare the node with the requested state.

    :raises BadInput: this CRI-O can't be configured as requested; nothing was changed.
    """
    if not observed:
        return refuse_missing("CRI-O", wanted)
    drop_in = posixpath.join(observed["folder"], crio.DROP_IN_NAME)
    texts = _present(wanted, observed, drop_in) if wanted.present else _absent(observed, drop_in)
    before = {**observed["files"], crio.TOOLKIT_CONFIG: observed["toolkit_config"]}
    files = [FileChange(path, before.get(path), text) for path, text in texts.items()]
    changed = observed["pending"] or any(one.before != one.after for one in files)
    outdated = observed["stale"] or bool(_mismatch(wanted, observed))
    return plan_of(files, crio.UNIT, restart_reason(wanted.present, observed["service_active"], changed, outdated))


def _mismatch(wanted: Options, observed: CrioState) -> list[str]:
    """List how the running daemon differs from the requested state, where it answers."""
    if not observed["answers"]:
        return []
    flat: crio.Flat = {
        (*crio.RUNTIMES, name, key): value
        for name, table in observed["runtimes"].items()
        for key, value in table.items()
    }
    flat[("crio", "runtime", "default_runtime")] = observed["default_runtime"]
    return crio.unmet_requirements(crio.CrioConfig(flat), wanted)


def merged(trees: t.Iterable[JsonObject]) -> JsonObject:
    """Merge files as CRI-O does, in its order."""
    done: JsonObject = {}
    for tree in trees:
        _merge(done, tree, ())
    return done


def _merge(done: JsonObject, tree: JsonObject, above: tuple[str, ...]) -> None:
    for key, value in tree.items():
        path = (*above, key)
        if isinstance(value, dict) and above not in WHOLE and isinstance(done.get(key, {}), dict):
            _merge(done.setdefault(key, {}), value, path)
        elif path in KEPT_IF_EMPTY and value == "" and key in done:
            continue
        elif path == APPENDED and isinstance(value, list):
            older = [one for one in done.get(key, []) if one not in value]
            done[key] = [*older, *value]
        else:
            done[key] = value


def default_runtime(tree: JsonObject) -> str:
    """Return the default runtime of merged files; empty where they set none."""
    return str(tree.get("crio", {}).get("runtime", {}).get("default_runtime") or "")


def runtimes(tree: JsonObject) -> dict[str, JsonObject]:
    """Return the runtimes' tables of merged files."""
    found = tree.get("crio", {}).get("runtime", {}).get("runtimes")
    return {name: one for name, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}


def model(tree: JsonObject, observed: CrioState) -> tuple[str, JsonObject]:
    """Return the runtime that ours is a copy of (the default one, else crun or runc), and its table."""
    tables = runtimes(tree)
    running = observed["runtimes"]
    first = default_runtime(tree) or observed["default_runtime"]
    for name in (first, "crun", "runc", *sorted(tables)):
        if name in ("", RUNTIME_NAME):
            continue
        if name in tables and tables[name].get("runtime_type", "oci") in ("", "oci"):
            return name, tables[name]
        if name in running and name not in tables:
            return name, {key: _parse_value(value) for key, value in running[name].items()}
    return "", {}


def _parse_value(literal: str) -> t.Any:
    """Parse a value that CRI-O printed."""
    try:
        return tomllib.loads(f"x = {literal}")["x"]
    except tomllib.TOMLDecodeError:
        return literal


def settings(table: JsonObject, binary: str) -> JsonObject:
    """Return the settings of our runtime's table."""
    return {
        "runtime_path": binary,
        "runtime_type": "oci",
        **{key: value for key, value in sorted(table.items()) if key not in (*NOT_COPIED, "runtime_type")},
    }


def _present(wanted: Options, observed: CrioState, drop_in: str) -> dict[str, str | None]:
    trees = {path: toml.parse(path, text) for path, text in observed["files"].items()}
    theirs = merged(tree for path, tree in trees.items() if path != drop_in)
    _refuse(wanted, observed, theirs)
    _name, table = model(theirs, observed)
    ours = settings(table, wanted.binary)
    text = _drop_in_text(wanted, ours)
    order = sorted({*observed["files"], drop_in} - {observed["config_path"]})
    after = [path for path in order[order.index(drop_in) + 1 :] if path in trees]
    effective = merged([theirs, tomllib.loads(text), *(trees[path] for path in after)])
    wrong = []
    if wanted.default and default_runtime(effective) != RUNTIME_NAME:
        wrong.append("default_runtime")
    if runtimes(effective).get(RUNTIME_NAME) != ours:
        wrong.append(f"runtimes.{RUNTIME_NAME}")
    if wrong:
        names = [path for path in after if default_runtime(trees[path]) or RUNTIME_NAME in runtimes(trees[path])]
        raise BadInput(
            f"runtime_name: {', '.join(names)} is read after {crio.DROP_IN_NAME} and overrides {' and '.join(wrong)}; "
            "remove these settings or rename the file so that it sorts before"
        )
    # The toolkit has to know its low-level runtime before CRI-O starts a container with it.
    return {**_low_level(observed, table), drop_in: text}


def _refuse(wanted: Options, observed: CrioState, theirs: JsonObject) -> None:
    refuse_operator("CRI-O", observed["operator"], runtimes(theirs).get(RUNTIME_NAME, {}).get("runtime_path", ""))
    if observed["error"] and not observed["ours"]:
        raise BadInput(f"CRI-O can't read its own configuration: {observed['error']}")
    flag = observed["flags"].get("default-runtime")
    if flag and flag["values"][-1] != RUNTIME_NAME and wanted.default:
        raise BadInput(
            f"runtime_set_default: {flag['file']} starts CRI-O with --default-runtime={flag['values'][-1]}, which "
            "overrides all files; remove the flag"
        )
    flag = observed["flags"].get("runtimes")
    if flag and any(one.startswith(f"{RUNTIME_NAME}:") for one in flag["values"]):
        raise BadInput(
            f"runtime_name: {flag['file']} starts CRI-O with --runtimes={RUNTIME_NAME}:…, which overrides all files; "
            "remove the flag"
        )


def _drop_in_text(wanted: Options, ours: JsonObject) -> str:
    document = toml.Document("", HEADER)
    if wanted.default:
        document.add_table(("crio", "runtime"), {"default_runtime": RUNTIME_NAME})
    table = (*crio.RUNTIMES, RUNTIME_NAME)
    document.add_table(table, {key: value for key, value in ours.items() if not isinstance(value, dict)})
    for key, value in ours.items():
        if isinstance(value, dict):
            document.add_table((*table, key), value)
    return document.checked()


def _low_level(observed: CrioState, table: JsonObject) -> dict[str, str | None]:
    """Set the path of CRI-O's runtime in the toolkit's configuration, where the toolkit wouldn't find it by name."""
    path = str(table.get("runtime_path") or "")
    document = toml.Document(crio.TOOLKIT_CONFIG, observed["toolkit_config"] or "")
    named = document.get(LOW_LEVEL)
    marked = document.mark(LOW_LEVEL) is not None or document.comment(LOW_LEVEL[:-1]) == toml.MARK
    # A user's absolute path is taken as it is.
    candidates = named if isinstance(named, list) else ["runc", "crun"]
    found = any(one.startswith("/") or one in observed["on_path"] for one in candidates)
    if found and not marked:
        return {}
    if observed["on_path"] and marked:
        return _without_low_level(document)
    if not path.startswith("/"):
        return {}
    document.put(LOW_LEVEL, [path])
    return {crio.TOOLKIT_CONFIG: document.checked()}


def _without_low_level(document: toml.Document) -> dict[str, str | None]:
    if document.comment(LOW_LEVEL[:-1]) == toml.MARK:
        document.delete(LOW_LEVEL[:-1])
    else:
        document.restore(LOW_LEVEL)
    return {crio.TOOLKIT_CONFIG: document.checked() or None}


def _absent(observed: CrioState, drop_in: str) -> dict[str, str | None]:
    text = observed["toolkit_config"]
    toolkit: dict[str, str | None] = {}
    if text and toml.MARK in text:
        toolkit = _without_low_level(toml.Document(crio.TOOLKIT_CONFIG, text))
    return {drop_in: None, **toolkit}
