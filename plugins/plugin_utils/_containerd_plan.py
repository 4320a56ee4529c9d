# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Which files of a node's containerd have to change, and how; made on the controller from what the node showed.

containerd 2.0 and newer merges imported files deeply: a drop-in of our own holds all that is ours, and the main file
gets one import. Older ones let an imported file replace a whole plugin, so there the keys go into the file that holds
the CRI plugin's section, each with a comment by which it is found again::

    default_runtime_name = "nvidia" # kubegpu.share, was "runc"

The same is done to a key of an imported file that would win over our drop-in.
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
DEEP_MERGE_SINCE = (2, 0)
# With none of these a file means the same in every format, but for the names in the lists below.
SECTIONS = ("plugins", "proxy_plugins", "stream_processors")
RESTART = "containerd.service"

Path = tuple[str, ...]
Json = dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """The arguments of ``container_runtime``."""

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
    if observed["embedded"] and not options.present:
        return Planned(Plan())
    _refuse(options, observed)
    documents = _parse(options, observed)
    seen = _containerd.effective(observed["dump"])
    if _containerd.release(observed["version"]) < _containerd.DUMP_HAS_OPTIONS:
        seen = _with_options(seen, observed["config_path"], documents)
    after = _present(options, observed, documents, seen) if options.present else _absent(options, observed, documents)
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


def _with_options(seen: _containerd.Effective, main: str, documents: dict[str, toml.Document]) -> _containerd.Effective:
    """What a dump says, with runtimes' options from the files where it leaves them out."""
    if not seen.plugin or seen.shows_options():
        return seen
    flat = dict(seen.flat)
    runtimes = ("plugins", seen.plugin, "containerd", "runtimes")
    for path in _order(main, documents):
        for name, table in (documents[path].get(runtimes) or {}).items():
            for key, value in (table.get("options") or {}).items():
                flat[(*runtimes, name, "options", key)] = value
    return _containerd.Effective(flat, seen.plugin)


def _restart_reason(options: Options, observed: Json, changed: bool) -> str:
    if changed or observed["pending"]:
        return "with an older configuration"
    if options.present and not observed["service_active"]:
        return "not at all"
    return "with an older configuration" if options.present and observed["stale"] else ""


def _refuse(options: Options, observed: Json) -> None:
    if observed["embedded"]:
        raise BadInput(_containerd.belongs_to(observed["embedded"]))
    if options.present and observed["operator"]:
        raise BadInput(
            "runtime_state: NVIDIA's GPU Operator configures containerd on this node; disable its toolkit "
            "(toolkit.enabled=false) or leave this node out"
        )


def _parse(options: Options, observed: Json) -> dict[str, toml.Document]:
    documents = {}
    for path, text in observed["files"].items():
        if "\ufffd" in text:
            line = text[: text.index("\ufffd")].count("\n") + 1
            raise BadInput(f"{path}, line {line}, isn't UTF-8; it is left as it is")
        try:
            documents[path] = toml.Document(path, text)
        except toml.Unparsable:
            if path.endswith(".tmpl") or "{{" in text:
                raise BadInput(
                    f"{path} is a template that something else makes the configuration from; it is left as it is: set "
                    "the runtime where that program has it set (k3s and RKE2: default-runtime in config.yaml)"
                ) from None
            raise
    missing = _containerd.missing_imports(observed["config_path"], observed["files"])
    if missing and options.present:
        raise BadInput(
            f"{missing[0][0]} imports {missing[0][1]}, which doesn't exist: containerd doesn't start with that; take "
            "the import out or bring the file back"
        )
    if options.present:
        _check_formats(observed["config_path"], documents, _containerd.release(observed["version"]))
    if observed["error"] and not missing:
        raise BadInput(f"containerd can't read its own configuration: {observed['error']}")
    return documents


# --------------------------------------------------------------------------- present


def _present(
    options: Options, observed: Json, documents: dict[str, toml.Document], seen: _containerd.Effective
) -> dict[str, str | None]:
    main = observed["config_path"]
    release = _containerd.release(observed["version"])
    theirs = {path: one for path, one in documents.items() if path != _drop_in(main)}
    _enable_cri(options, theirs)
    version = _format(main, theirs, release)
    seen = _as_enabled(main, theirs, seen, version, release)
    for key, why in _containerd.obstacles(seen) if options.default else []:
        raise BadInput(f"runtime_set_default: in {_holder(theirs, key, main)} {why}")
    settings = _containerd.runtime_settings(seen, options.binary, _model(main, theirs, seen, version, release))
    if release >= DEEP_MERGE_SINCE:
        for document in theirs.values():
            _unmark(document)
        _import(theirs.setdefault(main, toml.Document(main, "")), _pattern(main), _drop_in(main), main)
        ours = toml.Document(_drop_in(main), _drop_in_text(version, options, seen, settings))
        _overrule(main, theirs, ours)
        for document in theirs.values():
            _respell(document, settings)
        drop_in: str | None = ours.text
    else:
        _unimport(theirs.get(main), main)
        target = _section_file(main, theirs, version)
        if target == main:
            theirs.setdefault(main, toml.Document(main, ""))
        _edit(theirs[target], version, options, seen, settings)
        _respell(theirs[target], settings)
        drop_in = None
    return {_drop_in(main): drop_in, **{path: one.checked() for path, one in theirs.items()}}


def _check_formats(main: str, documents: dict[str, toml.Document], release: tuple[int, int]) -> None:
    newest, version = _containerd.newest_format(release), 0
    for path in _order(main, documents):
        own = documents[path].tree.get("version", 0)
        # true and false are numbers to Python.
        if not isinstance(own, int) or isinstance(own, bool) or own not in (0, *_containerd.CRI_PLUGIN):
            raise BadInput(f"{path}: version {own!r} of containerd's configuration isn't known here")
        if own > newest:
            # 1.6 says nothing and runs with its defaults.
            raise BadInput(
                f"{path} has version {own}, and containerd {_dotted(release)} reads nothing newer than {newest}"
            )
        if own and version and own != version and release < _containerd.EACH_FILE_ITS_FORMAT:
            raise BadInput(
                f"{path} has version {own} and what it is read with has version {version}: containerd "
                f"{_dotted(release)} takes all files for the same and loses settings; give them one version"
            )
        version = version or own


def _format(main: str, documents: dict[str, toml.Document], release: tuple[int, int]) -> int:
    """The format that our settings are written in: the one that the other files have."""
    document = documents.get(main)
    if document is None or not document.tree:
        # Three is what every 2.x reads; four would bind the file to 2.3 and newer.
        version = min(_containerd.newest_format(release), 3)
        mark = MARK if document is not None else NEW_FILE
        documents.setdefault(main, toml.Document(main, "")).set(("version",), version, mark)
        return version
    versions = [int(documents[path].tree.get("version", 0)) for path in _order(main, documents)]
    said = [one for one in versions if one > 1]
    return said[0] if said else _without_version(main, documents, release)


def _without_version(main: str, documents: dict[str, toml.Document], release: tuple[int, int]) -> int:
    """No file has a version, which makes them version 1."""
    if release < (2, 0):
        return 1
    if release < _containerd.EACH_FILE_ITS_FORMAT:
        for path in _order(main, documents):
            if set(SECTIONS) & set(documents[path].tree):
                raise BadInput(
                    f"{path} has no version, and containerd {_dotted(release)} ignores plugins' settings of such a "
                    "file; convert it with 'containerd config migrate'"
                )
    return 3


def _order(main: str, documents: dict[str, toml.Document]) -> list[str]:
    return _containerd.load_order(main, {path: one.text for path, one in documents.items()})


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _enable_cri(options: Options, documents: dict[str, toml.Document]) -> None:
    names = {"cri", *_containerd.CRI_PLUGIN.values()}
    for path, document in documents.items():
        disabled = document.get(("disabled_plugins",)) or []
        if not isinstance(disabled, list) or not names & {str(one) for one in disabled}:
            continue
        if not options.enable_cri:
            raise BadInput(
                f"runtime_enable_cri: {path} switches containerd's CRI plugin off (disabled_plugins), so that "
                "Kubernetes can't use it; set runtime_enable_cri: true to have it switched on"
            )
        _put(document, ("disabled_plugins",), [one for one in disabled if one not in names])


def _as_enabled(
    main: str,
    documents: dict[str, toml.Document],
    seen: _containerd.Effective,
    version: int,
    release: tuple[int, int],
) -> _containerd.Effective:
    """What containerd will show once its CRI plugin is no longer switched off; until then its dump leaves that out."""
    off = seen.flat.get(("disabled_plugins",)) or []
    if seen.plugin and seen.plugin not in off and (release < (2, 0) or seen.plugin == _containerd.CRI_PLUGIN[3]):
        return seen
    flat: _containerd.Flat = {}
    for path in _order(main, documents):
        for name in sorted({_containerd.CRI_PLUGIN[version], _containerd.CRI_PLUGIN[1]}):
            section = documents[path].get(("plugins", name))
            if isinstance(section, dict):
                flat.update(_flatten(section, ("plugins", _containerd.CRI_PLUGIN[3])))
    found = _containerd.Effective(flat, _containerd.CRI_PLUGIN[3])
    flat.setdefault(
        ("plugins", found.plugin, "containerd", "runtimes", "runc", "runtime_type"), _containerd.RUNC_SHIMS[0]
    )
    if (1, 7) <= release < (2, 3):
        flat.setdefault(("plugins", found.plugin, "enable_cdi"), release >= (2, 0))
    return found


def _model(
    main: str, documents: dict[str, toml.Document], seen: _containerd.Effective, version: int, release: tuple[int, int]
) -> str:
    """The runtime that ours is a copy of, judged by the files as they are without ours."""
    plain = {}
    for path, document in documents.items():
        plain[path] = toml.Document(path, document.text) if MARK in document.text else document
        if MARK in document.text:
            _unmark(plain[path])
    # In old containerd one file's section counts alone.
    order = _order(main, plain) if release >= DEEP_MERGE_SINCE else [_section_file(main, plain, version)]
    default, named = "", set()
    for path in [one for one in order if one in plain]:
        for name in _containerd.CRI_PLUGIN.values():
            default = plain[path].get(("plugins", name, "containerd", "default_runtime_name")) or default
            runtimes = plain[path].get(("plugins", name, "containerd", "runtimes"))
            named |= set(runtimes) if isinstance(runtimes, dict) else set()
    own = default == _containerd.RUNTIME_NAME and _containerd.RUNTIME_NAME in named
    if own and not named & set(seen.models()):
        # Theirs is all that there is to go by; the runc that containerd brings isn't used.
        return _containerd.RUNTIME_NAME
    return seen.model(str(default))


def _flatten(tree: Json, path: Path) -> _containerd.Flat:
    flat: _containerd.Flat = {}
    for key, value in tree.items():
        flat.update(_flatten(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value})
    return flat


def _holder(documents: dict[str, toml.Document], key: Path, main: str) -> str:
    """The file that sets a key of the CRI plugin."""
    names = _containerd.CRI_PLUGIN.values()
    having = [path for path, one in documents.items() for name in names if one.get(("plugins", name, *key)) is not None]
    return having[-1] if having else main


def _overrule(main: str, documents: dict[str, toml.Document], ours: toml.Document) -> None:
    """Change, in files that are merged after our drop-in, what they would take back of it."""
    drop_in = _drop_in(main)
    order = _order(main, {**documents, drop_in: ours})
    said = _flatten(next(iter(ours.tree["plugins"].values())), ())
    for path in order[order.index(drop_in) + 1 :]:
        for name in sorted(set(_containerd.CRI_PLUGIN.values())):
            for key, value in said.items():
                full = ("plugins", name, *key)
                if documents[path].get(full) not in (None, value):
                    _put(documents[path], full, value)


def _respell(document: toml.Document, settings: _containerd.Flat) -> None:
    """Give our values to options of our runtime that somebody has written in another case, for those may win."""
    for name in sorted(set(_containerd.CRI_PLUGIN.values())):
        table = ("plugins", name, "containerd", "runtimes", _containerd.RUNTIME_NAME, "options")
        written = document.get(table)
        for key in list(written) if isinstance(written, dict) else []:
            proper = _containerd.OPTIONS.get(key.lower(), key)
            if proper != key:
                _put(document, (*table, key), settings[("options", proper)])


def _import(document: toml.Document, pattern: str, drop_in: str, main: str) -> None:
    imports = document.get(("imports",))
    if imports is None:
        document.set(("imports",), [pattern], MARK)
    elif not any(_matches(main, one, drop_in) for one in imports):
        trial = toml.Document(main, document.text)
        trial.listed(("imports",), pattern, present=True)
        trial = toml.Document(main, trial.text)
        trial.listed(("imports",), pattern, present=False)
        if trial.text == document.text:
            document.listed(("imports",), pattern, present=True)
        else:
            # Taken out of the list again it would leave a comma or a blank.
            _put(document, ("imports",), [*imports, pattern])


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
    having = [
        path
        for path in _order(main, documents)
        if documents[path].get(("plugins", _containerd.CRI_PLUGIN[version])) is not None
    ]
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
    if options.cdi and seen.cdi is False:
        # Behind the tables below it: tomlkit doesn't read a table again once the one above it has come.
        _put(document, (*plugin, "enable_cdi"), True)


def _put(document: toml.Document, path: Path, value: t.Any) -> None:
    """Set a key and note beside it what it was."""
    now = document.get(path)
    if now == value:
        return
    if now is not None and type(now) is not type(value):
        raise document.unsafe(f"{'.'.join(path)} isn't a {'list' if isinstance(value, list) else type(value).__name__}")
    there, comment = document.find(path), document.comment(path)
    if there is None:
        document.set(path, value, MARK)
    elif _marked(comment):
        document.set(path, value)
    else:
        document.set(path, value, f"{comment} {MARK}, was {_on_one_line(there.as_string().strip())}".strip())


def _marked(comment: str) -> t.Match[str] | None:
    return re.match(rf"^(.*?)\s*{re.escape(MARK)}(?:, was (.+))?$", comment)


def _take_back(document: toml.Document, path: Path) -> None:
    found = _marked(document.comment(path))
    if found and found[2]:
        document.set(path, document.written(_as_it_was(found[2])), found[1])
    elif found:
        document.delete(path)


def _on_one_line(literal: str) -> str:
    """A value as it is written, in a comment."""
    return literal.replace("\\", r"\\").replace("\n", r"\n").replace("\r", r"\r")


def _as_it_was(note: str) -> str:
    return re.sub(r"\\(.)", lambda found: {"n": "\n", "r": "\r"}.get(found[1], found[1]), note)


def _unmark(document: toml.Document) -> None:
    """Take out all that ``_edit`` and ``_overrule`` have put in."""
    for one in reversed(document.places() if MARK in document.text else []):
        if one.header and document.comment(one.path) == MARK:
            document.delete(one.path)
        elif one.path and not one.header and one.path[1:]:
            _take_back(document, one.path)


# --------------------------------------------------------------------------- absent


def _absent(options: Options, observed: Json, documents: dict[str, toml.Document]) -> dict[str, str | None]:
    main = observed["config_path"]
    _unimport(documents.get(main), main)
    after: dict[str, str | None] = {}
    for path, document in documents.items():
        if path == _drop_in(main):
            continue
        _unmark(document)
        if not options.enable_cri:
            _take_back(document, ("disabled_plugins",))
        mark = document.comment(("version",))
        # Plugins' settings that somebody wrote meanwhile need the version that we put there.
        if mark in (MARK, NEW_FILE) and not {one.path[0] for one in document.places() if one.path} & set(SECTIONS):
            document.delete(("version",))
        text = document.checked()
        after[path] = None if mark == NEW_FILE and not text.strip() else text
    # The import goes before the file that it names.
    return {**after, _drop_in(main): None}


def _unimport(document: toml.Document | None, main: str) -> None:
    imports = document.get(("imports",)) if document is not None else None
    if document is None or not imports or _pattern(main) not in imports:
        return
    if (noted := _marked(document.comment(("imports",)))) and noted[2]:
        was = document.written(_as_it_was(noted[2])).unwrap()
        if document.get(("imports",)) == [*was, _pattern(main)]:
            _take_back(document, ("imports",))
            return
    document.listed(("imports",), _pattern(main), present=False)
    if noted and noted[2]:
        # Somebody else has changed the list since: what it was is of no use any more.
        document.set(("imports",), document.find(("imports",)), noted[1])
    elif document.comment(("imports",)) == MARK:
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
