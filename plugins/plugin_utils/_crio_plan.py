# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which files of a node's CRI-O have to change, and how; made on the controller from what the node showed.

All that is ours lies in one drop-in. CRI-O reads its main file and then every file of the folder in the order of their
names; a setting of a later one wins, a list as a whole, and so does a runtime's table: a later table of the same name
takes the place of an earlier one and inherits nothing from it. So ours repeats all that the default runtime has, its
monitor (conmon) above all, which most installations keep outside of the search path.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import tomllib
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _crio
from ansible_collections.kubegpu.share.plugins.module_utils._containerd import RUNTIME_NAME, Wanted
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils import _toml_document as toml

Json = dict[str, t.Any]

OWNER = "kubegpu.share"
MARK = f"# {OWNER}"
HEAD = f"# Written by {OWNER}: what is changed here is lost.\n"
# Tables whose entries are taken as a whole: a later one replaces an earlier one of the same name.
WHOLE = (("crio", "runtime", "runtimes"), ("crio", "runtime", "workloads"))
# An empty value of these doesn't take an earlier one away.
KEPT_IF_EMPTY = (("crio", "root"), ("crio", "runroot"), ("crio", "storage_driver"))
ADDED_UP = ("crio", "storage_option")
# Of the default runtime, these name its own program and aren't ours to copy.
OWN = ("runtime_path", "runtime_config_path", "platform_runtime_paths", "inherit_default_runtime")
LOW_LEVEL = ("nvidia-container-runtime", "runtimes")


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the node."""

    plan: Plan
    files: tuple[Json, ...] = ()


def make_plan(wanted: Wanted, observed: Json | None) -> Planned:
    """Compare the node with what is asked for.

    :param observed: section ``crio`` of the observation.
    :raises BadInput: this CRI-O can't be configured as asked for; nothing was changed.
    """
    if not observed:
        if wanted.present:
            raise BadInput("runtime_name: CRI-O isn't installed on this node")
        return Planned(Plan())
    drop_in = posixpath.join(observed["folder"], _crio.DROP_IN_NAME)
    after = _present(wanted, observed, drop_in) if wanted.present else _absent(observed, drop_in)
    rows, changes = [], []
    for path, text in after.items():
        before = observed["toolkit_config"] if path == _crio.TOOLKIT_CONFIG else observed["files"].get(path)
        if text != before:
            rows.append({"path": path, "before": digest(before), "after": text})
            changes.append(Change(path, before or "", text or ""))
    reason = _reason(wanted, observed, bool(rows))
    if reason:
        changes.append(Change(_crio.UNIT, f"running {reason}\n", "running with the files on disk\n"))
    return Planned(Plan(tuple(changes)), tuple(rows))


def _reason(wanted: Wanted, observed: Json, changed: bool) -> str:
    if wanted.present and not observed["service_active"]:
        return "not at all"
    if not observed["service_active"]:
        return ""
    if changed or observed["pending"]:
        return "with an older configuration"
    return "with an older configuration" if wanted.present and (observed["stale"] or _running(wanted, observed)) else ""


def _running(wanted: Wanted, observed: Json) -> list[str]:
    """Why the running daemon isn't what is wanted, where it can be asked."""
    if not observed["answers"]:
        return []
    flat: _crio.Flat = {
        (*_crio.RUNTIMES, name, key): value
        for name, table in observed["runtimes"].items()
        for key, value in table.items()
    }
    flat[("crio", "runtime", "default_runtime")] = observed["default_runtime"]
    return _crio.shortcomings(_crio.Shown(flat), wanted)


# --------------------------------------------------------------------------- what the files amount to


def parse(path: str, text: str) -> Json:
    """A file's settings.

    :raises BadInput: it can't be parsed; it is left as it is.
    """
    if "\ufffd" in text:
        raise BadInput(f"{path} isn't UTF-8; it is left as it is")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r" \(at line ([0-9]+).*$", str(error))
        line, reason = (found[1], str(error)[: found.start()]) if found else (str(text.count("\n") + 1), str(error))
        raise BadInput(f"{path}, line {line}, can't be parsed ({reason}); it is left as it is") from error


def merged(trees: t.Iterable[Json]) -> Json:
    """What files amount to, in CRI-O's order."""
    done: Json = {}
    for tree in trees:
        _merge(done, tree, ())
    return done


def _merge(done: Json, tree: Json, above: tuple[str, ...]) -> None:
    for key, value in tree.items():
        path = (*above, key)
        if isinstance(value, dict) and above not in WHOLE and isinstance(done.get(key, {}), dict):
            _merge(done.setdefault(key, {}), value, path)
        elif path in KEPT_IF_EMPTY and value == "" and key in done:
            continue
        elif path == ADDED_UP and isinstance(value, list):
            older = [one for one in done.get(key, []) if one not in value]
            done[key] = [*older, *value]
        else:
            done[key] = value


def default_runtime(tree: Json) -> str:
    """Of merged files; empty where they leave it to CRI-O."""
    return str(tree.get("crio", {}).get("runtime", {}).get("default_runtime") or "")


def runtimes(tree: Json) -> dict[str, Json]:
    """Of merged files."""
    found = tree.get("crio", {}).get("runtime", {}).get("runtimes")
    return {name: one for name, one in found.items() if isinstance(one, dict)} if isinstance(found, dict) else {}


def model(tree: Json, observed: Json) -> tuple[str, Json]:
    """The runtime that ours is a copy of: the default one, else crun or runc; and its table."""
    tables = runtimes(tree)
    running = observed["runtimes"]
    first = default_runtime(tree) or observed["default_runtime"]
    for name in (first, "crun", "runc", *sorted(tables)):
        if name in ("", RUNTIME_NAME):
            continue
        if name in tables and tables[name].get("runtime_type", "oci") in ("", "oci"):
            return name, tables[name]
        if name in running and name not in tables:
            return name, {key: _written(value) for key, value in running[name].items()}
    return "", {}


def _written(value: str) -> t.Any:
    """A value as CRI-O printed it."""
    try:
        return tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return value


def settings(table: Json, binary: str) -> Json:
    """What our runtime's table has to hold."""
    return {
        "runtime_path": binary,
        "runtime_type": "oci",
        **{key: value for key, value in sorted(table.items()) if key not in (*OWN, "runtime_type")},
    }


# --------------------------------------------------------------------------- present


def _present(wanted: Wanted, observed: Json, drop_in: str) -> dict[str, str | None]:
    trees = {path: parse(path, text) for path, text in observed["files"].items()}
    theirs = merged(tree for path, tree in trees.items() if path != drop_in)
    _refuse(wanted, observed, theirs)
    _name, table = model(theirs, observed)
    ours = settings(table, wanted.binary)
    text = _drop_in_text(wanted, ours)
    order = sorted({*observed["files"], drop_in} - {observed["config_path"]})
    after = [path for path in order[order.index(drop_in) + 1 :] if path in trees]
    effective = merged([theirs, tomllib.loads(text), *(trees[path] for path in after)])
    _wins(wanted, ours, effective, trees, after)
    files: dict[str, str | None] = {drop_in: text}
    toolkit = _low_level(observed, table)
    # The toolkit has to know its low-level runtime before CRI-O starts anything with it.
    return {**toolkit, **files}


def _wins(wanted: Wanted, ours: Json, effective: Json, trees: dict[str, Json], after: list[str]) -> None:
    wrong = []
    if wanted.default and default_runtime(effective) != RUNTIME_NAME:
        wrong.append("default_runtime")
    if runtimes(effective).get(RUNTIME_NAME) != ours:
        wrong.append(f"runtimes.{RUNTIME_NAME}")
    if wrong:
        names = [path for path in after if default_runtime(trees[path]) or RUNTIME_NAME in runtimes(trees[path])]
        raise BadInput(
            f"runtime_name: {', '.join(names)} is read after {_crio.DROP_IN_NAME} and sets {' and '.join(wrong)} "
            "otherwise; take that out of it or give it a name that sorts before"
        )


def _refuse(wanted: Wanted, observed: Json, theirs: Json) -> None:
    if observed["operator"] or str(runtimes(theirs).get(RUNTIME_NAME, {}).get("runtime_path", "")).startswith(
        "/usr/local/nvidia/toolkit"
    ):
        raise BadInput(
            "runtime_state: NVIDIA's GPU Operator configures CRI-O on this node; disable its toolkit "
            "(toolkit.enabled=false) or leave this node out"
        )
    if observed["error"] and not observed["ours"]:
        raise BadInput(f"CRI-O can't read its own configuration: {observed['error']}")
    for name in ("default-runtime", "runtimes"):
        flag = observed["flags"].get(name)
        if flag and (name == "default-runtime" and flag["values"][-1] != RUNTIME_NAME and wanted.default):
            raise BadInput(
                f"runtime_set_default: {flag['file']} starts CRI-O with --{name}={flag['values'][-1]}, which wins over "
                "all files; take the flag out"
            )
        if flag and name == "runtimes" and any(one.startswith(f"{RUNTIME_NAME}:") for one in flag["values"]):
            raise BadInput(
                f"runtime_name: {flag['file']} starts CRI-O with --runtimes={RUNTIME_NAME}:…, which wins over all "
                "files; take the flag out"
            )


def _drop_in_text(wanted: Wanted, ours: Json) -> str:
    document = toml.Document("", HEAD)
    if wanted.default:
        document.add_table(("crio", "runtime"), {"default_runtime": RUNTIME_NAME})
    table = (*_crio.RUNTIMES, RUNTIME_NAME)
    document.add_table(table, {key: value for key, value in ours.items() if not isinstance(value, dict)})
    for key, value in ours.items():
        if isinstance(value, dict):
            document.add_table((*table, key), value)
    return document.checked()


def _low_level(observed: Json, table: Json) -> dict[str, str | None]:
    """The toolkit's own file names CRI-O's runtime by its path, where the toolkit wouldn't find it by its name."""
    text = observed["toolkit_config"]
    path = str(table.get("runtime_path") or "")
    document = toml.Document(_crio.TOOLKIT_CONFIG, text or "")
    named = document.get(LOW_LEVEL)
    marked = bool(_marked(document.comment(LOW_LEVEL))) or document.comment(LOW_LEVEL[:-1]) == MARK
    found = [one for one in (named if isinstance(named, list) else ["runc", "crun"]) if _found(one, observed)]
    if found and not marked:
        return {}
    if observed["on_path"] and marked:
        _take_back(document, LOW_LEVEL)
        return {_crio.TOOLKIT_CONFIG: document.checked() or None}
    if not path.startswith("/"):
        return {}
    if document.get(LOW_LEVEL) != [path]:
        _put(document, LOW_LEVEL, [path])
    return {_crio.TOOLKIT_CONFIG: document.checked()}


def _found(name: str, observed: Json) -> bool:
    # What is named by its path was put there by somebody who knows.
    return name.startswith("/") or name in observed["on_path"]


def _put(document: toml.Document, path: tuple[str, ...], value: t.Any) -> None:
    """Set a key and note beside it what it was."""
    there, comment = document.find(path), document.comment(path)
    if there is None:
        document.set(path, value, MARK)
    elif _marked(comment):
        document.set(path, value)
    else:
        document.set(path, value, f"{comment} {MARK}, was {there.as_string()}".strip())


def _marked(comment: str) -> t.Match[str] | None:
    return re.match(rf"^(.*?)\s*{re.escape(MARK)}(?:, was (.+))?$", comment)


def _take_back(document: toml.Document, path: tuple[str, ...]) -> None:
    found = _marked(document.comment(path))
    if document.comment(path[:-1]) == MARK:
        # The table was not there before us.
        document.delete(path[:-1])
    elif found and found[2]:
        document.set(path, document.written(found[2]), found[1])
    elif found:
        document.delete(path)


# --------------------------------------------------------------------------- absent


def _absent(observed: Json, drop_in: str) -> dict[str, str | None]:
    after: dict[str, str | None] = {drop_in: None}
    text = observed["toolkit_config"]
    if text and MARK in text:
        document = toml.Document(_crio.TOOLKIT_CONFIG, text)
        _take_back(document, LOW_LEVEL)
        after[_crio.TOOLKIT_CONFIG] = document.checked() or None
    return after
