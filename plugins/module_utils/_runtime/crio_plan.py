# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan for CRI-O: one drop-in of our own.

CRI-O reads its main file and then every file of the drop-in directory in the order of their names; a later setting
wins. A list or a runtime's table replaces an earlier one of the same name as a whole and inherits nothing from it. So
our table repeats everything of the default runtime, above all its monitor (conmon), which is rarely in the search path.
https://github.com/cri-o/cri-o/blob/v1.34.0/docs/crio.conf.d.5.md
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import typing as t

from .._core.errors import BadInput
from .._core.libraries import tomllib
from .._core.types import JsonObject
from .._documents import toml_editor as toml
from . import containerd, crio
from .common import (
    HEADER,
    SANDBOXES,
    FileChange,
    RuntimePlan,
    check_replacement,
    plan_of,
    refuse_missing,
    refuse_operator,
    replaced,
    restart_reason,
)
from .containerd import RUNTIME_NAME, Options, release
from .types import CrioState

# Tables whose entries are replaced as a whole by a later one of the same name.
WHOLE = (("crio", "runtime", "runtimes"), ("crio", "runtime", "workloads"))
# An empty value of these keeps an earlier one.
KEPT_IF_EMPTY = (("crio", "root"), ("crio", "runroot"), ("crio", "storage_driver"))
APPENDED = ("crio", "storage_option")
# These settings name the default runtime's own program and aren't copied.
NOT_COPIED = ("runtime_path", "runtime_config_path", "platform_runtime_paths", "inherit_default_runtime")
# Types of runtimes that are programs with runc's command line.
OCI = ("", "oci", "pod")
# Before, runc is the default runtime where no file names one.
CRUN_SINCE = (1, 31)
# Before, a file that sets another default deletes the table of runc, also one of an earlier file.
# https://github.com/cri-o/cri-o/blob/v1.25.0/pkg/config/config.go
KEEPS_RUNC_SINCE = (1, 25, 1)
RUNC = "runc"
# The toolkit's list of low-level runtimes.
LOW_LEVEL = ("nvidia-container-runtime", "runtimes")


def make_plan(wanted: Options, observed: CrioState | None) -> RuntimePlan:
    """Compare the node with the requested state.

    :raises BadInput: this CRI-O can't be configured as requested; nothing was changed.
    """
    if not observed:
        return refuse_missing("CRI-O", wanted)
    drop_in = posixpath.join(observed["folder"], crio.DROP_IN_NAME)
    ours = (drop_in, posixpath.join(observed["folder"], crio.KEPT_NAME))
    texts, warnings = _present(wanted, observed, *ours) if wanted.present else (_absent(observed, *ours), ())
    before = {**observed["files"], containerd.TOOLKIT_CONFIG: observed["toolkit_config"]}
    files = [FileChange(path, before.get(path), text) for path, text in texts.items()]
    changed = observed["pending"] or any(file.before != file.after for file in files)
    outdated = observed["stale"] or bool(_mismatch(wanted, observed))
    reason = restart_reason(wanted.present, observed["service_active"], changed, outdated)
    return dataclasses.replace(plan_of(files, crio.UNIT, reason), warnings=warnings)


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
            before = done.get(key)
            older = [item for item in before if item not in value] if isinstance(before, list) else []
            done[key] = [*older, *value]
        else:
            done[key] = value


def default_runtime(tree: JsonObject) -> str:
    """Return the default runtime of merged files; empty where they set none."""
    return str(tree.get("crio", {}).get("runtime", {}).get("default_runtime") or "")


def runtimes(tree: JsonObject) -> dict[str, JsonObject]:
    """Return the runtimes' tables of merged files."""
    tables = tree.get("crio", {}).get("runtime", {}).get("runtimes")
    return (
        {name: table for name, table in tables.items() if isinstance(table, dict)} if isinstance(tables, dict) else {}
    )


def known(tree: JsonObject, observed: CrioState) -> dict[str, JsonObject]:
    """Return the runtimes' tables of the files, and those of the running daemon that aren't in a file."""
    running = {
        name: {key: _parse_value(value) for key, value in table.items()} for name, table in observed["runtimes"].items()
    }
    return {**running, **runtimes(tree)}


def users_default(tree: JsonObject, observed: CrioState) -> str:
    """Return the default runtime that CRI-O has without ours.

    :param tree: the merged files without ours.
    """
    running = observed["default_runtime"]
    builtin = "crun" if release(observed["version"]) >= CRUN_SINCE else "runc"
    # The running one may be ours.
    return default_runtime(tree) or (running if running not in ("", RUNTIME_NAME) else builtin)


def model(tree: JsonObject, observed: CrioState, copied: JsonObject | None = None) -> tuple[str, JsonObject]:
    """Return the runtime that ours is a copy of (the default one, else crun or runc), and its table.

    :param tree: the merged files without ours.
    :param copied: our table on the node, which stays where the default runtime's is unknown; its name is empty.
    """
    tables = known(tree, observed)
    first = users_default(tree, observed)
    if copied and first not in tables:
        # The daemon is stopped, or a release before 1.25.1 dropped its built-in runtime.
        return "", copied
    for name in (first, "crun", "runc", *sorted(runtimes(tree))):
        table = tables.get(name, {})
        fits = name in tables and name != RUNTIME_NAME and table.get("runtime_type", "oci") in ("", "oci")
        if fits and not isolation(name, table):
            return name, table
    return "", copied or {}


def isolation(name: str, table: JsonObject) -> str:
    """Return the isolation that pods lose in ours; empty for a program that the toolkit runs as ours."""
    kind = str(table.get("runtime_type") or "")
    # Without a path CRI-O searches for the name.
    lost = replaced(name, "" if kind in OCI else kind, str(table.get("runtime_path") or name))
    return lost if lost in SANDBOXES or kind not in OCI else ""


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


def _present(
    wanted: Options, observed: CrioState, drop_in: str, kept: str
) -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the files' texts, and warnings.

    :param drop_in: the path of our drop-in.
    :param kept: the path of the one with the table of runc that old releases would delete.
    """
    trees = {path: _shaped(path, toml.parse(path, text)) for path, text in observed["files"].items()}
    others = [tree for path, tree in trees.items() if path not in (drop_in, kept)]
    theirs = merged(others)
    mine = trees.get(drop_in, {})
    warnings = _refuse(wanted, observed, theirs, default_runtime(mine) == RUNTIME_NAME)
    name, table = model(theirs, observed, runtimes(mine).get(RUNTIME_NAME))
    program = str(table.get("runtime_path") or name) if name else ""
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
    deleted = _deleted_runc(observed, others, trees.get(kept, {})) if wanted.default else None
    # The toolkit has to know its low-level runtime before CRI-O starts a container with it, and runc is never missing.
    texts = (
        {kept: toml.new_file(HEADER, _tables(RUNC, deleted)), drop_in: text} if deleted else {drop_in: text, kept: None}
    )
    return {**_low_level(observed, program), **texts}, warnings


def _shaped(path: str, tree: JsonObject) -> JsonObject:
    """Return a file's tree whose runtimes are tables with names.

    :raises BadInput: they aren't; CRI-O doesn't start with such a file either.
    """

    def table(where: str, value: t.Any) -> JsonObject:
        if not isinstance(value, dict):
            raise BadInput(f"{path}: {where} isn't a table; correct it, it is left as it is")
        return value

    runtime = table("crio.runtime", table("crio", tree.get("crio", {})).get("runtime", {}))
    default = runtime.get("default_runtime", "")
    if not isinstance(default, str):
        raise BadInput(f"{path}: crio.runtime.default_runtime isn't a text; correct it, it is left as it is")
    for name, options in table("crio.runtime.runtimes", runtime.get("runtimes", {})).items():
        if not name:
            raise BadInput(f"{path}: a table of crio.runtime.runtimes has an empty name; give it one")
        for key, value in table(f"crio.runtime.runtimes.{name}", options).items():
            if key in ("runtime_path", "runtime_type") and not isinstance(value, str):
                raise BadInput(f"{path}: {key} of runtime {name} isn't a text; correct it, it is left as it is")
    return tree


def _refuse(wanted: Options, observed: CrioState, theirs: JsonObject, done: bool) -> tuple[str, ...]:
    """Refuse what can't be configured as requested; return warnings of the rest.

    :param wanted: the requested state.
    :param observed: the node.
    :param theirs: the merged files without ours.
    :param done: ours sets the default already.
    """
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
    if flag and any(value.startswith(f"{RUNTIME_NAME}:") for value in flag["values"]):
        raise BadInput(
            f"runtime_name: {flag['file']} starts CRI-O with --runtimes={RUNTIME_NAME}:…, which overrides all files; "
            "remove the flag"
        )
    default = users_default(theirs, observed)
    lost = isolation(default, known(theirs, observed).get(default, {})) if default != RUNTIME_NAME else ""
    return check_replacement("CRI-O", default, lost, wanted, done)


def _deleted_runc(observed: CrioState, trees: t.Sequence[JsonObject], mine: JsonObject) -> JsonObject | None:
    """Return the table of runc, the user's or the built-in one, that CRI-O would delete once ours is the default.

    :param trees: the files without ours, in CRI-O's order.
    :param mine: our copy of it on the node, for a stopped daemon.
    :returns: None where it stays, is gone already, or is unknown.
    """
    if _patch(observed["version"]) >= KEEPS_RUNC_SINCE:
        return None
    kept = True
    for tree in trees:
        kept = kept or RUNC in runtimes(tree)
        kept = kept and default_runtime(tree) in ("", RUNC)
    return known(merged(trees), observed).get(RUNC, runtimes(mine).get(RUNC)) if kept else None


def _patch(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall("[0-9]+", version)[:3])


def _drop_in_text(wanted: Options, ours: JsonObject) -> str:
    default = [(("crio", "runtime"), {"default_runtime": RUNTIME_NAME})] if wanted.default else []
    return toml.new_file(HEADER, [*default, *_tables(RUNTIME_NAME, ours)])


def _tables(name: str, settings: JsonObject) -> list[tuple[toml.Path, JsonObject]]:
    """Return a runtime's tables, each with its plain keys."""
    table = (*crio.RUNTIMES, name)
    plain = {key: value for key, value in settings.items() if not isinstance(value, dict)}
    return [(table, plain), *(((*table, key), value) for key, value in settings.items() if isinstance(value, dict))]


def _low_level(observed: CrioState, program: str) -> dict[str, str | None]:
    """Set CRI-O's own program in the toolkit's configuration, where the toolkit would run another one or find none.

    :param program: of the runtime that ours is a copy of: a path, or a name in the search path; empty where unknown.
    """
    text = observed["toolkit_config"]
    original = _without_low_level(text)
    named = toml.Document(containerd.TOOLKIT_CONFIG, original or "").get(LOW_LEVEL)
    candidates = [str(program) for program in named] if isinstance(named, list) else list(containerd.LOW_LEVEL)
    # A user's absolute path is taken as it is.
    first = next(
        (candidate for candidate in candidates if candidate.startswith("/") or candidate in observed["on_path"]), ""
    )
    if not program.startswith("/") and program not in observed["on_path"]:
        return {}
    if first.startswith("/") or first == posixpath.basename(program):
        return {containerd.TOOLKIT_CONFIG: original}
    document = toml.Document(containerd.TOOLKIT_CONFIG, text or "")
    document.put(LOW_LEVEL, [program])
    return {containerd.TOOLKIT_CONFIG: document.checked()}


def _without_low_level(text: str | None) -> str | None:
    """Return the toolkit's configuration without our setting; None for no file."""
    if text is None or toml.MARK not in text:
        return text
    document = toml.Document(containerd.TOOLKIT_CONFIG, text)
    if document.comment(LOW_LEVEL[:-1]) == toml.MARK:
        document.delete(LOW_LEVEL[:-1])
    else:
        document.restore(LOW_LEVEL)
    return document.checked() or None


def _absent(observed: CrioState, drop_in: str, kept: str) -> dict[str, str | None]:
    return {drop_in: None, kept: None, containerd.TOOLKIT_CONFIG: _without_low_level(observed["toolkit_config"])}
