# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which files of a node's containerd have to change, and how; made on the controller from what the node showed.

containerd 2.1 and newer merges imported files deeply: a drop-in of our own holds all that is ours, and the main file
gets one import. Older ones let an imported file replace a whole plugin, so there the keys go into the file that holds
the CRI plugin's section, each with a comment by which it is found again::

    default_runtime_name = "nvidia" # kubegpu.share, was "runc"
"""

from __future__ import annotations

import dataclasses
import fnmatch
import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils import _containerd
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, NotInEffect
from ansible_collections.kubegpu.share.plugins.module_utils._put_back import digest
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan
from ansible_collections.kubegpu.share.plugins.plugin_utils import _toml_splice as toml

MARK = "kubegpu.share"
NEW_FILE = f"{MARK}, new file"
DEEP_MERGE_SINCE = (2, 1)
RESTART = "containerd.service"

Path = tuple[str, ...]
Json = dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``containerd_runtime``."""

    present: bool
    binary: str
    default: bool = True
    cdi: bool = True
    enable_cri: bool = False

    def wanted(self) -> _containerd.Wanted:
        return _containerd.Wanted(self.present, self.default, self.binary, self.cdi, self.enable_cri)


@dataclasses.dataclass(frozen=True)
class Planned:
    """What to show and what to hand to the node (the module's option ``plan``)."""

    plan: Plan
    files: tuple[Json, ...] = ()


def make_plan(options: Options, observed: Json | None) -> Planned:
    """Compare the node with what is asked for.

    :param observed: section ``containerd`` of the observation.
    :raises BadInput: this containerd can't be configured as asked for; nothing was changed.
    :raises NotInEffect: our files are right and containerd doesn't do what they say.
    """
    if not observed or (not observed["version"] and not options.present):
        if options.present:
            raise BadInput("runtime_name: containerd isn't installed on this node")
        return Planned(Plan())
    _refuse(options, observed)
    documents = _parse(observed)
    seen = _containerd.effective(observed["dump"])
    after = _present(options, observed, documents, seen) if options.present else _absent(observed, documents)
    rows, changes = _differences(observed, after)
    wrong = [] if rows or not options.present else _containerd.shortcomings(seen, options.wanted())
    if wrong:
        others = [path for path, text in observed["files"].items() if not _ours(path) and "default_runtime" in text]
        raise NotInEffect(
            "this collection's settings are in place and containerd's effective configuration differs: "
            + "; ".join(wrong)
            + (f" (look at {', '.join(others)})" if others else "")
        )
    reason = _restart_reason(options, observed, bool(rows))
    if reason:
        changes.append(Change(RESTART, f"running {reason}\n", "running with the files on disk\n"))
    return Planned(Plan(tuple(changes)), tuple(rows))


def _restart_reason(options: Options, observed: Json, changed: bool) -> str:
    if changed or observed["pending"]:
        return "with an older configuration"
    if options.present and not observed["service_active"]:
        return "not at all"
    return "with an older configuration" if options.present and observed["stale"] else ""


def _refuse(options: Options, observed: Json) -> None:
    if observed["embedded"]:
        raise BadInput(
            f"runtime_name: this node's containerd belongs to {observed['embedded']}, which writes its configuration "
            "itself; that isn't supported yet"
        )
    if options.present and observed["operator"]:
        raise BadInput(
            "runtime_state: NVIDIA's GPU Operator configures containerd on this node; disable its toolkit "
            "(toolkit.enabled=false) or leave this node out"
        )


def _parse(observed: Json) -> dict[str, toml.Document]:
    documents = {}
    for path, text in observed["files"].items():
        if "\ufffd" in text:
            raise BadInput(f"{path} isn't UTF-8; it is left as it is")
        try:
            documents[path] = toml.Document(text)
        except toml.Unparsable as error:
            raise BadInput(f"{path}, line {error.line}, can't be parsed ({error}); it is left as it is") from error
    if observed["error"]:
        raise BadInput(f"containerd can't read its own configuration: {observed['error']}")
    return documents


# --------------------------------------------------------------------------- present


def _present(
    options: Options, observed: Json, documents: dict[str, toml.Document], seen: _containerd.Effective
) -> dict[str, str | None]:
    main = observed["config_path"]
    release = _containerd.release(observed["version"])
    with _editing(main):
        version = _file_version(main, documents, release, options)
        _enable_cri(options, documents)
        settings = _containerd.runtime_settings(seen, options.binary)
        if release >= DEEP_MERGE_SINCE:
            for document in documents.values():
                _unmark(document)
            _import(documents.setdefault(main, toml.Document("")), _pattern(main), _drop_in(main), main, version)
            drop_in: str | None = _drop_in_text(version, options, seen, settings)
        else:
            _unimport(documents.get(main), main)
            target = _section_file(main, documents, version)
            if target == main:
                documents.setdefault(main, toml.Document(""))
            _edit(documents[target], version, options, seen, settings)
            drop_in = None
        return {
            _drop_in(main): drop_in,
            **{path: _checked(path, one) for path, one in documents.items() if path != _drop_in(main)},
        }


def _file_version(main: str, documents: dict[str, toml.Document], release: tuple[int, int], options: Options) -> int:
    """The format that our settings are written in: the main file's own."""
    newest = 3 if release >= (2, 0) else 2
    document = documents.get(main)
    if document is None or not document.tree:
        mark = MARK if document is not None else NEW_FILE
        document = documents.setdefault(main, toml.Document(""))
        document.set(("version",), newest, mark)
        return newest
    version = document.tree.get("version", 1)
    if not isinstance(version, int) or version not in _containerd.CRI_PLUGIN:
        raise BadInput(f"{main}: version {version!r} of containerd's configuration isn't known here")
    if version == 1 and release >= (2, 0):
        if options.enable_cri and not {"plugins", "proxy_plugins", "stream_processors"} & set(document.tree):
            # Without plugins' sections the formats differ only in how plugins are named in disabled_plugins.
            document.set(("version",), newest)
            return newest
        raise BadInput(
            f"{main} has no version, and containerd {release[0]}.{release[1]} ignores plugins' settings of such a "
            "file; convert it with 'containerd config migrate'"
        )
    return version


def _enable_cri(options: Options, documents: dict[str, toml.Document]) -> None:
    names = {"cri", *_containerd.CRI_PLUGIN.values()}
    for path, document in documents.items():
        disabled = document.get(("disabled_plugins",)) or []
        for name in [one for one in disabled if one in names]:
            if not options.enable_cri:
                raise BadInput(
                    f"runtime_enable_cri: {path} switches containerd's CRI plugin off (disabled_plugins), so that "
                    "Kubernetes can't use it; set runtime_enable_cri: true to have it switched on"
                )
            document.take(("disabled_plugins",), name)


def _import(document: toml.Document, pattern: str, drop_in: str, main: str, version: int) -> None:
    imports = document.get(("imports",))
    if imports is None:
        document.set(("imports",), [pattern], MARK)
    elif not any(_matches(main, one, drop_in) for one in imports):
        document.append(("imports",), pattern)


def _matches(main: str, pattern: str, path: str) -> bool:
    full = posixpath.normpath(posixpath.join(posixpath.dirname(main), pattern))
    return posixpath.dirname(full) == posixpath.dirname(path) and fnmatch.fnmatchcase(path, full)


def _drop_in_text(version: int, options: Options, seen: _containerd.Effective, settings: _containerd.Flat) -> str:
    plugin: Path = ("plugins", _containerd.CRI_PLUGIN[version])
    table = (*plugin, "containerd", "runtimes", _containerd.RUNTIME_NAME)
    lines = [f"# Written by {MARK}: what is changed here is lost.", f"version = {version}", ""]
    if options.cdi and seen.cdi is not None:
        lines += [toml.table_header(plugin), "  enable_cdi = true", ""]
    if options.default:
        lines += [
            toml.table_header((*plugin, "containerd")),
            f"  default_runtime_name = {toml.literal(_containerd.RUNTIME_NAME)}",
            "",
        ]
    for sub in _tables(settings):
        lines.append(toml.table_header((*table, *sub)))
        lines += [f"  {toml.key_literal(key)} = {toml.literal(value)}" for key, value in _keys(settings, sub)]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _tables(settings: _containerd.Flat) -> list[Path]:
    return sorted({path[:-1] for path in settings} | {()})


def _keys(settings: _containerd.Flat, table: Path) -> list[tuple[str, t.Any]]:
    return sorted((path[-1], value) for path, value in settings.items() if path[:-1] == table)


# --------------------------------------------------------------------------- in place


def _section_file(main: str, documents: dict[str, toml.Document], version: int) -> str:
    """The file whose CRI section counts: the last one that has any, for it replaces those before it."""
    order = _containerd.load_order(main, {path: one.text for path, one in documents.items()})
    having = [path for path in order if documents[path].get(("plugins", _containerd.CRI_PLUGIN[version])) is not None]
    return having[-1] if having else main


def _edit(
    document: toml.Document, version: int, options: Options, seen: _containerd.Effective, settings: _containerd.Flat
) -> None:
    plugin: Path = ("plugins", _containerd.CRI_PLUGIN[version])
    name_key = (*plugin, "containerd", "default_runtime_name")
    if options.default:
        _put(document, name_key, _containerd.RUNTIME_NAME)
    else:
        _take_back(document, name_key)
    if options.cdi and seen.cdi is False:
        _put(document, (*plugin, "enable_cdi"), True)
    runtimes = (*plugin, "containerd", "runtimes")
    # In old containerd the first runtime that a file names takes the built-in ones away.
    for name in [one for one in seen.runtimes() if one != _containerd.RUNTIME_NAME]:
        if document.get((*runtimes, name)) is None:
            builtin = seen.runtime(name)
            for sub in _tables(builtin):
                document.add_table((*runtimes, name, *sub), dict(_keys(builtin, sub)), MARK)
    table = (*runtimes, _containerd.RUNTIME_NAME)
    for sub in _tables(settings):
        values = dict(_keys(settings, sub))
        path = (*table, *sub)
        header = document.statement(path, header=True)
        if header is None and document.get(path) is None:
            document.add_table(path, values, MARK)
            continue
        mine = header is not None and document.comment(header) == MARK
        for key, value in values.items():
            if mine and document.get((*path, key)) != value:
                document.set((*path, key), value)
            elif not mine:
                _put(document, (*path, key), value)
        # A table that is all ours holds nothing but what is asked for.
        for one in document.all() if mine else []:
            if not one.header and one.table == path and one.path[-1] not in values:
                document.delete(one.path)


def _put(document: toml.Document, path: Path, value: t.Any) -> None:
    """Set a key and note beside it what it was."""
    there = document.statement(path)
    if document.get(path) == value and there is not None:
        return
    if there is None:
        document.set(path, value, MARK)
    elif _marked(document.comment(there)):
        document.set(path, value)
    else:
        was = document.text[there.value[0] : there.value[1]]
        if "\n" in was:
            raise toml.Unforeseen(f"{'.'.join(path)} is written in an unusual way")
        document.set(path, value, f"{MARK}, was {was}")


def _marked(comment: str) -> t.Match[str] | None:
    return re.match(rf"^(?:(.*?)\s*#\s*)?{re.escape(MARK)}(?:, was (.+))?$", comment)


def _take_back(document: toml.Document, path: Path) -> None:
    there = document.statement(path)
    found = _marked(document.comment(there)) if there is not None else None
    if found and found.group(2):
        document.replace(path, found.group(2), found.group(1) or "")
    elif found:
        document.delete(path)


def _unmark(document: toml.Document) -> None:
    """Take out all that ``_edit`` has put in."""
    for one in reversed(document.all() if MARK in document.text else []):
        if one.header and document.comment(one) == MARK:
            document.delete_table(one.path)
        elif not one.header and one.path not in (("version",), ("imports",)):
            _take_back(document, one.path)


# --------------------------------------------------------------------------- absent


def _absent(observed: Json, documents: dict[str, toml.Document]) -> dict[str, str | None]:
    main = observed["config_path"]
    with _editing(main):
        _unimport(documents.get(main), main)
        for document in documents.values():
            _unmark(document)
        after: dict[str, str | None] = {}
        for path, document in documents.items():
            if path == _drop_in(main):
                continue
            version = document.statement(("version",))
            mark = document.comment(version) if version is not None else ""
            if mark in (MARK, NEW_FILE) and len(document.all()) == 1:
                document.delete(("version",))
            text = _checked(path, document)
            after[path] = None if mark == NEW_FILE and not text.strip() else text
        # The import goes before the file that it names.
        return {**after, _drop_in(main): None}


def _unimport(document: toml.Document | None, main: str) -> None:
    imports = document.get(("imports",)) if document is not None else None
    if document is None or not imports or _pattern(main) not in imports:
        return
    document.take(("imports",), _pattern(main))
    there = document.statement(("imports",))
    if there is not None and document.comment(there) == MARK:
        if document.get(("imports",)):
            document.replace(("imports",), document.text[there.value[0] : there.value[1]], "")
        else:
            document.delete(("imports",))


# --------------------------------------------------------------------------- both


def _drop_in(main: str) -> str:
    return posixpath.join(posixpath.dirname(main), "conf.d", _containerd.DROP_IN_NAME)


def _pattern(main: str) -> str:
    return posixpath.join(posixpath.dirname(main), "conf.d", _containerd.DROP_IN_PATTERN)


def _ours(path: str) -> bool:
    return posixpath.basename(path) == _containerd.DROP_IN_NAME


def _checked(path: str, document: toml.Document) -> str:
    try:
        return document.checked()
    except toml.Unforeseen as error:
        raise BadInput(
            f"{path} is written in a way that can't be edited safely ({error}); it is left as it is"
        ) from error


class _editing:
    """Turn "can't be edited" into a refusal that names the file."""

    def __init__(self, main: str) -> None:
        self._main = main

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: t.Any, error: BaseException | None, trace: t.Any) -> None:
        if isinstance(error, toml.Unforeseen):
            raise BadInput(
                f"{self._main} is written in a way that can't be edited safely ({error}); it is left as it is"
            ) from error


def _differences(observed: Json, after: dict[str, str | None]) -> tuple[list[Json], list[Change]]:
    rows, changes = [], []
    for path, text in after.items():
        before = observed["files"].get(path)
        if before is None and _ours(path):
            before = observed["drop_in"]
        if text == before or (not text and before is None):
            continue
        rows.append({"path": path, "before": digest(before), "after": text})
        changes.append(Change(path, before or "", text or ""))
    return rows, changes
