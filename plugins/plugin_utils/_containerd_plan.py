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
from ansible_collections.kubegpu.share.plugins.plugin_utils import _toml_document as toml

OWNER = "kubegpu.share"
MARK = f"# {OWNER}"
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
        documents[path] = toml.Document(path, text)
    if observed["error"]:
        raise BadInput(f"containerd can't read its own configuration: {observed['error']}")
    return documents


# --------------------------------------------------------------------------- present


def _present(
    options: Options, observed: Json, documents: dict[str, toml.Document], seen: _containerd.Effective
) -> dict[str, str | None]:
    main = observed["config_path"]
    release = _containerd.release(observed["version"])
    version = _file_version(main, documents, release, options)
    _enable_cri(options, documents)
    settings = _containerd.runtime_settings(seen, options.binary)
    if release >= DEEP_MERGE_SINCE:
        for document in documents.values():
            _unmark(document)
        _import(documents.setdefault(main, toml.Document(main, "")), _pattern(main), _drop_in(main), main, version)
        drop_in: str | None = _drop_in_text(version, options, seen, settings)
    else:
        _unimport(documents.get(main), main)
        target = _section_file(main, documents, version)
        if target == main:
            documents.setdefault(main, toml.Document(main, ""))
        _edit(documents[target], version, options, seen, settings)
        drop_in = None
    return {
        _drop_in(main): drop_in,
        **{path: one.checked() for path, one in documents.items() if path != _drop_in(main)},
    }


def _file_version(main: str, documents: dict[str, toml.Document], release: tuple[int, int], options: Options) -> int:
    """The format that our settings are written in: the main file's own."""
    newest = 3 if release >= (2, 0) else 2
    document = documents.get(main)
    if document is None or not document.tree:
        mark = MARK if document is not None else NEW_FILE
        document = documents.setdefault(main, toml.Document(main, ""))
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
            document.listed(("disabled_plugins",), name, present=False)


def _import(document: toml.Document, pattern: str, drop_in: str, main: str, version: int) -> None:
    imports = document.get(("imports",))
    if imports is None:
        document.set(("imports",), [pattern], MARK)
    elif not any(_matches(main, one, drop_in) for one in imports):
        document.listed(("imports",), pattern, present=True)


def _matches(main: str, pattern: str, path: str) -> bool:
    full = posixpath.normpath(posixpath.join(posixpath.dirname(main), pattern))
    return posixpath.dirname(full) == posixpath.dirname(path) and fnmatch.fnmatchcase(path, full)


def _drop_in_text(version: int, options: Options, seen: _containerd.Effective, settings: _containerd.Flat) -> str:
    plugin: Path = ("plugins", _containerd.CRI_PLUGIN[version])
    table = (*plugin, "containerd", "runtimes", _containerd.RUNTIME_NAME)
    document = toml.Document("", f"# Written by {OWNER}: what is changed here is lost.\nversion = {version}\n")
    if options.cdi and seen.cdi is not None:
        document.add_table(plugin, {"enable_cdi": True})
    if options.default:
        document.add_table((*plugin, "containerd"), {"default_runtime_name": _containerd.RUNTIME_NAME})
    for sub in _tables(settings):
        document.add_table((*table, *sub), _keys(settings, sub))
    return document.checked()


def _tables(settings: _containerd.Flat) -> list[Path]:
    return sorted({path[:-1] for path in settings} | {()})


def _keys(settings: _containerd.Flat, table: Path) -> Json:
    return {path[-1]: settings[path] for path in sorted(settings) if path[:-1] == table}


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
                document.add_table((*runtimes, name, *sub), _keys(builtin, sub), MARK)
    table = (*runtimes, _containerd.RUNTIME_NAME)
    for sub in _tables(settings):
        values = _keys(settings, sub)
        path = (*table, *sub)
        if document.get(path) is None:
            document.add_table(path, values, MARK)
        elif document.comment(path) != MARK:
            for key, value in values.items():
                _put(document, (*path, key), value)
        else:
            # A table that is all ours holds nothing but what is asked for.
            for key, value in values.items():
                if document.get((*path, key)) != value:
                    document.set((*path, key), value)
            for key in [one.path[-1] for one in document.places() if one.path[:-1] == path and not one.header]:
                if key not in values:
                    document.delete((*path, key))


def _put(document: toml.Document, path: Path, value: t.Any) -> None:
    """Set a key and note beside it what it was."""
    if document.get(path) == value:
        return
    there, comment = document.find(path), document.comment(path)
    if there is None:
        document.set(path, value, MARK)
    elif _marked(comment):
        document.set(path, value)
    else:
        document.set(path, value, f"{comment} {MARK}, was {there.as_string()}".strip())


def _marked(comment: str) -> t.Match[str] | None:
    return re.match(rf"^(.*?)\s*{re.escape(MARK)}(?:, was (.+))?$", comment)


def _take_back(document: toml.Document, path: Path) -> None:
    found = _marked(document.comment(path))
    if found and found[2]:
        document.set(path, document.written(found[2]), found[1])
    elif found:
        document.delete(path)


def _unmark(document: toml.Document) -> None:
    """Take out all that ``_edit`` has put in."""
    for one in reversed(document.places() if MARK in document.text else []):
        if one.header and document.comment(one.path) == MARK:
            document.delete(one.path)
        elif one.path and not one.header and one.path not in (("version",), ("imports",)):
            _take_back(document, one.path)


# --------------------------------------------------------------------------- absent


def _absent(observed: Json, documents: dict[str, toml.Document]) -> dict[str, str | None]:
    main = observed["config_path"]
    _unimport(documents.get(main), main)
    for document in documents.values():
        _unmark(document)
    after: dict[str, str | None] = {}
    for path, document in documents.items():
        if path == _drop_in(main):
            continue
        mark = document.comment(("version",))
        if mark in (MARK, NEW_FILE) and [one.path for one in document.places() if one.path] == [("version",)]:
            document.delete(("version",))
        text = document.checked()
        after[path] = None if mark == NEW_FILE and not text.strip() else text
    # The import goes before the file that it names.
    return {**after, _drop_in(main): None}


def _unimport(document: toml.Document | None, main: str) -> None:
    imports = document.get(("imports",)) if document is not None else None
    if document is None or not imports or _pattern(main) not in imports:
        return
    document.listed(("imports",), _pattern(main), present=False)
    if document.comment(("imports",)) == MARK:
        if document.get(("imports",)):
            document.set(("imports",), document.find(("imports",)), "")
        else:
            document.delete(("imports",))


# --------------------------------------------------------------------------- both


def _drop_in(main: str) -> str:
    return posixpath.join(posixpath.dirname(main), "conf.d", _containerd.DROP_IN_NAME)


def _pattern(main: str) -> str:
    return posixpath.join(posixpath.dirname(main), "conf.d", _containerd.DROP_IN_PATTERN)


def _ours(path: str) -> bool:
    return posixpath.basename(path) == _containerd.DROP_IN_NAME


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
