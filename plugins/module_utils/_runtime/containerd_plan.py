# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan for containerd.

containerd 2.0 and newer merges imported files deeply: all our settings are in a drop-in, and the main file gets one
import. Before 2.0 an imported file replaces a whole plugin, so our keys go into the file that holds the CRI plugin's
section, each with a mark (see ``toml_editor``). So does a key of an imported file that would override our drop-in.
https://github.com/containerd/containerd/blob/v2.2.0/docs/man/containerd-config.toml.5.md
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import posixpath
import typing as t

from .._core.errors import BadInput, NotInEffect
from .._core.types import JsonObject
from .._documents import toml_editor as toml
from .._documents.toml_tree import written_key
from . import common, containerd
from .common import (
    HEADER,
    FileChange,
    RuntimePlan,
    check_replacement,
    plan_of,
    refuse_missing,
    refuse_operator,
    restart_reason,
)
from .containerd import CRI_PLUGIN, RUNTIME_NAME, EffectiveConfig, Options
from .containerd_apply import belongs_to, runtime_settings, shows_options, unmet_requirements
from .containerd_files import (
    DEEP_MERGE_SINCE,
    cri_sections,
    loaded,
    merged_format,
    newest_format,
    own_format,
    reads_one_format,
)
from .types import ContainerdState

NEW_FILE = f"{toml.MARK}, new file"
# A pattern, so that containerd still starts when somebody deletes our file and leaves the import.
DROP_IN_PATTERN = "99-kubegpu-*.toml"
# The dump of 1.4 leaves out every runtime's options.
DUMP_HAS_OPTIONS = (1, 6)
# In disabled_plugins.
CRI_NAMES = {"cri", *CRI_PLUGIN.values()}
BUILTIN_DEFAULT = "runc"
IMAGES_PLUGIN = "io.containerd.cri.v1.images"
# Settings of older formats' containerd table that are the plugin's for images since 2.0.
MOVED = ("snapshotter", "disable_snapshot_annotations", "discard_unpacked_layers")
# A file without any of these means the same in every format, except for the names in its lists.
SECTIONS = ("plugins", "proxy_plugins", "stream_processors")
# In the CRI plugin's section of version 2, settings of its server, which keep this name in version 3.
OF_THE_SERVER = {
    "disable_tcp_service",
    "stream_server_address",
    "stream_server_port",
    "stream_idle_timeout",
    "enable_tls_streaming",
    "x509_key_pair_streaming",
}
# The type of a default runtime that is a table: 1.x knows it beside the name.
DEFAULT_TYPE = ("containerd", containerd.DEFAULT_RUNTIME, "runtime_type")
# Shim of 1.0, for which some settings of 1.x are.
LINUX_SHIM = "io.containerd.runtime.v1.linux"
# These settings, and their names in the options of newer shims.
LINUX_SETTINGS = {("systemd_cgroup",): "SystemdCgroup", ("containerd", "no_pivot"): "NoPivotRoot"}
# A runtime's program, the first one that is set; the others are of the shim of 1.0.
PROGRAMS = (("options", "BinaryName"), ("runtime_engine",), ("options", "Runtime"))
UNIT = "containerd.service"

Documents = dict[str, toml.Document]


def make_plan(options: Options, observed: ContainerdState | None, serves_kubelet: bool = False) -> RuntimePlan:
    """Compare the node with the requested state.

    :param serves_kubelet: the node's kubelet uses this containerd.
    :raises BadInput: this containerd can't be configured as requested; nothing was changed.
    :raises NotInEffect: our files are in place and the effective configuration differs.
    """
    if not observed or (not observed["version"] and not options.present):
        return refuse_missing("containerd", options)
    if observed["embedded"]:
        if options.present:
            raise BadInput(belongs_to(observed["embedded"]))
        return RuntimePlan()
    if options.present:
        refuse_operator("containerd", observed["operator"])
    edit = _Edit(options, observed, serves_kubelet)
    texts = edit.present() if options.present else edit.absent()
    before = {**observed["files"]}
    if edit.drop_in not in before and observed["drop_in"] is not None:
        before[edit.drop_in] = observed["drop_in"]
    # An empty main file is none.
    files = [FileChange(path, before.get(path), text) for path, text in texts.items() if text or path in before]
    changed = any(file.before != file.after for file in files)
    wrong = [] if changed or not options.present else unmet_requirements(edit.effective, options, edit.users_default)
    if wrong:
        others = [
            path for path, text in observed["files"].items() if path != edit.drop_in and "default_runtime" in text
        ]
        raise NotInEffect(
            "this collection's settings are in place and containerd's effective configuration differs: "
            + "; ".join(wrong)
            + (f" (check {', '.join(others)})" if others else "")
        )
    active = observed["service_active"] or not options.present or changed or observed["pending"]
    reason = restart_reason(options.present, active, changed or observed["pending"], observed["stale"])
    return dataclasses.replace(
        plan_of(files, UNIT, reason),
        warnings=(*edit.replacement, *(edit.warnings if changed else ())),
        expected=tuple(edit.expected),
        users_default=edit.users_default,
    )


class _Edit:
    """The files of one containerd under edit.

    :ivar effective: its effective configuration before the edit.
    :ivar users_default: the default runtime of the user's files, once our settings were added; None before.
    :ivar expected: the user's settings that take effect, or no longer do, by the edit.
    :ivar warnings: for the user, of what changes.
    :ivar replacement: a warning of the default runtime that an earlier run replaced.
    """

    def __init__(self, options: Options, observed: ContainerdState, serves_kubelet: bool) -> None:
        self._options = options
        self._observed = observed
        self._serves_kubelet = serves_kubelet
        self.users_default: str | None = None
        self.expected: list[JsonObject] = []
        self.warnings: list[str] = []
        self.replacement: tuple[str, ...] = ()
        self._main = observed["config_path"]
        self._release = containerd.release(observed["version"])
        self.drop_in = containerd.drop_in_path(self._main)
        self._pattern = posixpath.join(posixpath.dirname(self.drop_in), DROP_IN_PATTERN)
        files = observed["files"]
        if not options.present:
            # Files without anything of ours are left alone, whatever they are.
            files = {path: text for path, text in files.items() if toml.MARK in text or DROP_IN_PATTERN in text}
        self._documents = {path: _parse(path, text) for path, text in files.items() if path != self.drop_in}
        self._order, missing = loaded(self._main, observed["files"])
        if missing and options.present:
            raise BadInput(
                f"{missing[0][0]} imports {missing[0][1]}, which doesn't exist: containerd doesn't start with that; "
                "remove the import or restore the file"
            )
        if options.present:
            self._check_formats()
        # A removal needs nothing of the node's files where none of them is ours.
        self._concerned = bool(options.present or files or self.drop_in in observed["files"])
        if observed["error"] and self._concerned and not missing:
            marked = [path for path, text in observed["files"].items() if text.startswith("\ufeff")]
            where = f" ({', '.join(marked)} begins with a byte order mark)" if marked else ""
            raise BadInput(f"containerd can't read its own configuration: {observed['error']}{where}")
        self.effective = containerd.effective(observed["dump"])
        if self._release < DUMP_HAS_OPTIONS:
            self.effective = self._with_options()

    def _trees(self, documents: Documents) -> dict[str, JsonObject]:
        """Return the files' values, in the order in which containerd merges them."""
        return {path: documents[path].tree for path in self._order if path in documents}

    def _sections(self, documents: Documents) -> list[tuple[str, str]]:
        return cri_sections(self._release, self._trees(documents))

    def _cri_tables(self, documents: Documents) -> list[tuple[str, JsonObject]]:
        """Return the CRI plugin's tables that count, each with its file; the later one wins."""
        return [(path, documents[path].tree["plugins"][name]) for path, name in self._sections(documents)]

    def _check_formats(self) -> None:
        newest, release = newest_format(self._release), _dotted(self._release)
        for path, tree in self._trees(self._documents).items():
            own = tree.get("version", 0)
            # To Python, true and false are numbers.
            if not isinstance(own, int) or isinstance(own, bool) or own not in (0, *CRI_PLUGIN):
                raise BadInput(f"{path}: version {own!r} of containerd's configuration isn't supported")
            if own > newest:
                # 1.6 ignores the file without an error.
                raise BadInput(f"{path} has version {own}, and containerd {release} reads nothing newer than {newest}")

    def _with_options(self) -> EffectiveConfig:
        """Add the runtimes' options from the files to a dump that leaves them out."""
        seen = self.effective
        if not seen.plugin or shows_options(seen):
            return seen
        flat = dict(seen.flat)
        runtimes = ("plugins", seen.plugin, "containerd", "runtimes")
        for tree in self._trees(self._documents).values():
            for name, table in (_value(tree, *runtimes) or {}).items():
                for key, value in (table.get("options") or {}).items():
                    flat[(*runtimes, name, "options", key)] = value
        return containerd.config_of(flat, seen.plugin)

    def present(self) -> dict[str, str | None]:
        """Add our settings; return every file's text."""
        theirs = self._documents
        self._enable_cri(theirs)
        version = self._format(theirs)
        plain = _without_ours(theirs)
        tables = [table for _path, table in self._cri_tables(plain)]
        self.users_default, named = self._users_default(tables)
        seen = self._with_default_runtime(self._enabled(theirs, version), tables)
        self._check_linux_settings(seen, theirs)
        self.replacement = self._check_replacement(seen)
        settings = runtime_settings(seen, self._options.binary, self._model(seen, named, tables))
        drop_in: str | None = None
        if self._release >= DEEP_MERGE_SINCE:
            for document in theirs.values():
                document.restore_all(SECTIONS)
            self._note_moved(self._trees(plain))
            self._note_ignored(plain)
            self._import(theirs.setdefault(self._main, toml.Document(self._main, "")))
            ours = toml.Document(self.drop_in, self._drop_in_text(plain, version, seen, settings))
            sections = self._sections(theirs)
            self._override(theirs, sections, ours)
            for path, name in sections:
                _set_misspelled_options(theirs[path], name, settings)
            drop_in = ours.text
        else:
            if self._main in theirs:
                theirs[self._main].remove_item(("imports",), self._pattern)
            sections = self._sections(theirs)
            # The file whose section counts, or that gets one.
            target = sections[-1][0] if sections else self._main
            if target == self._main:
                theirs.setdefault(self._main, toml.Document(self._main, ""))
            self._edit_in_place(theirs, target, version, seen, settings)
            _set_misspelled_options(theirs[target], CRI_PLUGIN[version], settings)
        return {self.drop_in: drop_in, **{path: document.checked() for path, document in theirs.items()}}

    def _format(self, documents: Documents) -> int:
        """Return the format of our settings: that of the other files."""
        document = documents.get(self._main)
        if document is None or not document.tree:
            # Every 2.x reads 3; 4 would require 2.3.
            version = min(newest_format(self._release), 3)
            mark = toml.MARK if document is not None else NEW_FILE
            documents.setdefault(self._main, toml.Document(self._main, "")).set(("version",), version, mark)
            return version
        return merged_format(self._release, self._trees(documents).values())

    def _enable_cri(self, documents: Documents) -> None:
        for path, document in documents.items():
            disabled = document.tree.get("disabled_plugins") or []
            if not isinstance(disabled, list) or not CRI_NAMES & {str(plugin) for plugin in disabled}:
                continue
            if not self._options.enable_cri:
                raise BadInput(
                    f"runtime_enable_cri: {path} disables containerd's CRI plugin (disabled_plugins), so Kubernetes "
                    "can't use this containerd; set runtime_enable_cri: true to enable it"
                )
            document.put(("disabled_plugins",), [plugin for plugin in disabled if plugin not in CRI_NAMES])

    def _enabled(self, documents: Documents, version: int) -> EffectiveConfig:
        """Return the effective configuration with the CRI plugin enabled, as containerd reads it beside our settings.

        :param version: the format of our settings.
        """
        seen, release = self.effective, self._release
        off = seen.flat.get(("disabled_plugins",)) or []
        ours = self._observed["files"].get(self.drop_in)
        # Since our drop-in was written, the user has converted his files, and the dump has them in the former format.
        outdated = own_format(toml.parse(self.drop_in, ours or "")) not in (0, version) and reads_one_format(release)
        if (
            not outdated
            and seen.plugin
            and seen.plugin not in off
            and (release < (2, 0) or seen.plugin == CRI_PLUGIN[3])
        ):
            return seen
        # The dump lacks a disabled plugin.
        flat: containerd.Flat = {}
        for _path, table in self._cri_tables(documents):
            flat.update(_flatten(table, ("plugins", CRI_PLUGIN[3])))
        runtimes = ("plugins", CRI_PLUGIN[3], "containerd", "runtimes")
        runc = (*runtimes, "runc")
        if release == (1, 7) and not any(path[:5] == runc for path in flat):
            # The built-in one of this release, which a table of ours in the file has to equal.
            flat[(*runc, "sandbox_mode")] = "podsandbox"
        flat.setdefault((*runc, "runtime_type"), containerd.RUNC_SHIMS[0])
        if (1, 7) <= release < (2, 3):
            flat.setdefault(("plugins", CRI_PLUGIN[3], "enable_cdi"), release >= (2, 0))
        return containerd.config_of(flat, CRI_PLUGIN[3])

    def _users_default(self, tables: t.Sequence[JsonObject]) -> tuple[str, set[str]]:
        """Return the default runtime of the user's files and the runtimes that they name.

        :param tables: of the CRI plugin, without our settings.
        """
        default, named = BUILTIN_DEFAULT, set()
        for table in tables:
            default = _value(table, "containerd", "default_runtime_name") or default
            if self._release < DEEP_MERGE_SINCE and _value(table, *DEFAULT_TYPE):
                default = containerd.DEFAULT_TABLE
            runtimes = _value(table, "containerd", "runtimes")
            named |= set(runtimes) if isinstance(runtimes, dict) else set()
        return str(default), named

    def _with_default_runtime(self, seen: EffectiveConfig, tables: t.Sequence[JsonObject]) -> EffectiveConfig:
        """Return an effective configuration with the type of the user's default_runtime, which ours replaces.

        :param tables: of the CRI plugin, without our settings.
        """
        types = [_value(table, *DEFAULT_TYPE) for table in tables]
        if self._release >= DEEP_MERGE_SINCE or not any(types):
            return seen
        return containerd.config_of({**seen.flat, ("plugins", seen.plugin, *DEFAULT_TYPE): types[-1]}, seen.plugin)

    def _check_linux_settings(self, seen: EffectiveConfig, documents: Documents) -> None:
        """Refuse settings of 1.x with which the CRI plugin doesn't load, which no dump shows."""
        kind = seen.runtimes.get(str(self.users_default), {}).get(("runtime_type",), "")
        for key, option in LINUX_SETTINGS.items():
            if not seen.flat.get(("plugins", seen.plugin, *key)) or self._release >= DEEP_MERGE_SINCE:
                continue
            conflict = f"{self._holder(documents, key)} has {key[-1]} = true, with which containerd's CRI plugin"
            instead = (
                f"take it out, and give each runtime the type {containerd.RUNC_SHIMS[0]} and the option {option} = true"
            )
            if kind != LINUX_SHIM:
                raise BadInput(f"{conflict} doesn't load beside a default runtime of the type {kind!r}: {instead}")
            if self._options.default:
                raise BadInput(
                    f"runtime_set_default: {conflict} only loads beside a default runtime of the type {LINUX_SHIM}, "
                    f"which NVIDIA's can't be: {instead}"
                )

    def _check_replacement(self, seen: EffectiveConfig) -> tuple[str, ...]:
        name = self.users_default or BUILTIN_DEFAULT
        runtime = seen.runtimes.get(name, {}) if name != RUNTIME_NAME else {}
        kind = runtime.get(("runtime_type",), "")
        programs = (runtime.get(key, "") for key in PROGRAMS)
        lost = common.replaced(name, str(kind), str(next(filter(None, programs), "")))
        done = self.effective.default_runtime == RUNTIME_NAME
        if lost and not runtime and not done and self._options.default and not self._options.replace_default:
            raise BadInput(
                f"{self._holder(self._documents, ('containerd', 'default_runtime_name'))} has default_runtime_name = "
                f"{json.dumps(name)}, and no runtime of this name is configured, so that containerd's CRI plugin "
                "doesn't load; correct the name, or configure this runtime"
            )
        return check_replacement("containerd", name, lost, self._options, done, self._observed["low_level"])

    def _model(self, seen: EffectiveConfig, named: set[str], tables: t.Sequence[JsonObject]) -> str:
        """Return the runtime that ours is a copy of.

        :param named: runtimes of the user's files.
        :param tables: of the CRI plugin, without our settings.
        """
        default = str(self.users_default)
        model = default if default in seen.models else next(iter(seen.models), "")
        if self.users_default == RUNTIME_NAME and RUNTIME_NAME in named:
            if not named & set(seen.models):
                # The user's own runtime nvidia is the only one configured; the built-in runc isn't used.
                return RUNTIME_NAME
            if _by_systemd(tables) and not seen.runtimes.get(model, {}).get(("options", "SystemdCgroup")):
                # Older tools leave it out of nvidia. Where only nvidia has it, all pods have run with it.
                return RUNTIME_NAME
        return model

    def _holder(self, documents: Documents, key: toml.Path) -> str:
        """Return the file that sets a key of the CRI plugin."""
        having = [path for path, table in self._cri_tables(documents) if _value(table, *key) is not None]
        return having[-1] if having else self._main

    def _override(self, documents: Documents, sections: t.Sequence[tuple[str, str]], ours: toml.Document) -> None:
        """Change the keys of files that are merged after our drop-in and would override it.

        :param sections: of the CRI plugin, by path and the plugin's name.
        """
        texts = {path: document.text for path, document in documents.items()}
        order = loaded(self._main, {**texts, self.drop_in: ours.text}).order
        later = order[order.index(self.drop_in) + 1 :]
        values = {key: value for plugin in ours.tree["plugins"].values() for key, value in _flatten(plugin, ()).items()}
        for path, name in [section for section in sections if section[0] in later]:
            for key, value in values.items():
                full = ("plugins", name, *key)
                if documents[path].get(full) not in (None, value):
                    documents[path].put(full, value)

    def _import(self, document: toml.Document) -> None:
        if not any(self._matches(pattern) for pattern in document.tree.get("imports") or []):
            document.add_item(("imports",), self._pattern)

    def _matches(self, pattern: str) -> bool:
        full = posixpath.normpath(posixpath.join(posixpath.dirname(self._main), pattern))
        same_folder = posixpath.dirname(full) == posixpath.dirname(self.drop_in)
        return same_folder and fnmatch.fnmatchcase(self.drop_in, full)

    def _drop_in_text(self, plain: Documents, version: int, seen: EffectiveConfig, settings: containerd.Flat) -> str:
        """Return the text of our drop-in.

        :param plain: the user's files without our settings.
        :param version: the drop-in's format.
        :param seen: the effective configuration.
        :param settings: of our runtime.
        """

        def key(*path: str) -> toml.Path:
            # In a file of version 2 a setting under version 3's name overrides the same one under its own.
            newer = ("plugins", CRI_PLUGIN[3], *path)
            named = version < 3 and any(_value(document.tree, *newer) is not None for document in plain.values())
            return newer if named else ("plugins", CRI_PLUGIN[version], *path)

        tables: list[tuple[toml.Path, JsonObject]] = []
        if self._options.cdi and seen.cdi is not None:
            tables.append((key("enable_cdi")[:-1], {"enable_cdi": True}))
        if self._options.default:
            tables.append((key("containerd", "default_runtime_name")[:-1], {"default_runtime_name": RUNTIME_NAME}))
        runtime = (*key("containerd", "runtimes"), RUNTIME_NAME)
        tables += [((*runtime, *sub), _keys(settings, sub)) for sub in _tables(settings)]
        return toml.new_file(f"{HEADER}version = {version}\n", tables)

    def _note_moved(self, trees: t.Mapping[str, JsonObject]) -> None:
        """Note the settings that containerd 2 moves to another plugin only beside a table of runtimes, like ours.

        :param trees: the user's files in the order in which containerd merges them.
        """
        settings: dict[str, tuple[t.Any, str]] = {}
        for path, name in cri_sections(self._release, trees):
            table = trees[path]["plugins"][name].get("containerd") if name != CRI_PLUGIN[3] else {}
            settings |= {key: (table[key], path) for key in MOVED if isinstance(table, dict) and key in table}
        for key, (value, path) in settings.items():
            moved = ("plugins", IMAGES_PLUGIN, key)
            now = self.effective.flat.get(moved)
            if now is None or (self._options.present and now == value):
                continue
            self.expected.append({"path": list(moved), "value": value})
            if self._options.present:
                self.warnings.append(
                    f"containerd has ignored `{key} = {json.dumps(value)}` in {path} so far, because no table of "
                    f"runtimes was beside it; with NVIDIA's runtime it takes effect, instead of {json.dumps(now)}"
                )

    def _note_ignored(self, plain: Documents) -> None:
        """Note the settings that containerd ignores in the format in which it reads them, as it did before.

        :param plain: the user's files without our settings.
        """
        trees = self._trees(plain)
        counted = self._sections(plain)
        merged = merged_format(self._release, trees.values())
        for path, tree in trees.items():
            for name in (CRI_PLUGIN[1], CRI_PLUGIN[2]):
                section = _value(tree, "plugins", name)
                if (path, name) in counted or not isinstance(section, dict) or not set(section) - OF_THE_SERVER:
                    continue
                own = own_format(tree)
                number = merged if any(own_format(tree) > 1 for tree in trees.values()) else 2
                table, newer = (f"[plugins.{written_key((plugin,))}]" for plugin in (name, CRI_PLUGIN[2]))
                names = (
                    f"{newer} as the table's name" if number == 2 else "its tables as in `containerd config default`"
                )
                self.warnings.append(
                    f"containerd {_dotted(self._release)} ignores {table} of {path}, which has "
                    f"{f'version {own}' if own else 'no version'}, as it did before NVIDIA's runtime was added; to "
                    f"bring it into effect convert the file to version {number} by hand (`version = {number}`, and "
                    f"{names}; `containerd config migrate` would drop its settings) and run again"
                )

    # ----------------------------------------------------------------- before 2.0

    def _edit_in_place(
        self, documents: Documents, target: str, version: int, seen: EffectiveConfig, settings: containerd.Flat
    ) -> None:
        """Write our settings into a file of the user's.

        :param documents: in which the file may be replaced.
        :param target: the file.
        :param version: the file's format.
        :param seen: the effective configuration.
        :param settings: of our runtime.
        """
        plugin: toml.Path = ("plugins", CRI_PLUGIN[version])
        name_key, cdi_key = (*plugin, "containerd", "default_runtime_name"), (*plugin, "enable_cdi")
        document = documents[target]
        plain = _without_ours({target: document})[target]
        # A default runtime as a table overrides the name, unless it has no type.
        type_key = (*plugin, *DEFAULT_TYPE)
        ours = [key for key in (name_key, type_key, cdi_key) if document.get(key) != plain.get(key)]
        is_default = name_key in ours or type_key in ours
        if (is_default and not self._options.default) or (cdi_key in ours and not self._options.cdi):
            # What is no longer requested is taken back with all of ours, so that the file is as if it had never been.
            document = documents[target] = plain
        cdi_is_off = seen.cdi is False or cdi_key in ours
        if self._options.cdi and cdi_is_off:
            document.put(cdi_key, True)
        if self._options.default:
            document.put(name_key, RUNTIME_NAME)
            if document.get(type_key):
                document.put(type_key, "")
        runtimes = (*plugin, "containerd", "runtimes")
        # Before 2.0 the first runtime in a file removes the built-in ones.
        for name in [runtime for runtime in seen.names if runtime != RUNTIME_NAME]:
            if document.get((*runtimes, name)) is None:
                builtin = seen.runtimes[name]
                for sub in _tables(builtin):
                    document.add_table((*runtimes, name, *sub), _keys(builtin, sub), toml.MARK)
        table = (*runtimes, RUNTIME_NAME)
        for sub in _tables(settings):
            document.put_table((*table, *sub), _keys(settings, sub))

    def absent(self) -> dict[str, str | None]:
        """Remove our settings; return the text of every file that has some, None for one to delete."""
        if self._concerned and self._release >= DEEP_MERGE_SINCE:
            texts = self._observed["files"]
            order = [path for path in loaded(self._main, texts).order if path != self.drop_in]
            self._note_moved({path: toml.parse(path, texts[path]) for path in order})
        if self._main in self._documents:
            self._documents[self._main].remove_item(("imports",), self._pattern)
        after: dict[str, str | None] = {}
        for path, document in self._documents.items():
            document.restore_all(SECTIONS)
            self._disable_cri(path, document)
            mark = document.comment(("version",))
            # Plugins' settings that somebody added meanwhile need the version that we set.
            sections = {place.path[0] for place in document.places() if place.path} & set(SECTIONS)
            if mark in (toml.MARK, NEW_FILE) and not sections:
                document.delete(("version",))
            text = document.checked()
            after[path] = None if mark == NEW_FILE and not text.strip() else text
        # The import is removed before the file that it names.
        return {**after, self.drop_in: None}

    def _disable_cri(self, path: str, document: toml.Document) -> None:
        """Disable the CRI plugin again where we enabled it, unless the kubelet has come to use it."""
        key = ("disabled_plugins",)
        mark = document.mark(key)
        if not mark or not mark.was:
            return
        was, now = document.item(mark.was).value, document.get(key)
        if not self._serves_kubelet:
            document.restore(key)
            if now != [plugin for plugin in was if plugin not in CRI_NAMES]:
                # Somebody else has changed the list since.
                document.set(key, [*now, *(plugin for plugin in was if plugin in CRI_NAMES)])
            return
        document.set(key, document.find(key), mark.comment)
        self.warnings.append(
            f"containerd's CRI plugin stays enabled, because this node's kubelet uses it; {path} had "
            f"disabled_plugins = {mark.was} before this collection enabled it"
        )


def _parse(path: str, text: str) -> toml.Document:
    try:
        document = toml.Document(path, text)
    except toml.Unparsable:
        if path.endswith(".tmpl") or "{{" in text:
            raise BadInput(
                f"{path} is a template from which another program generates the configuration; it is left as it is: "
                "set the runtime in that program's own settings (k3s and RKE2: default-runtime in config.yaml)"
            ) from None
        raise
    for key in ("imports", "disabled_plugins"):
        listed = document.tree.get(key)
        if listed is not None and not (isinstance(listed, list) and all(isinstance(item, str) for item in listed)):
            raise BadInput(f"{path}: {key} isn't a list of texts; correct it, it is left as it is")
    return document


def _by_systemd(tables: t.Iterable[JsonObject]) -> bool:
    """Return whether the runtime nvidia of the user's files leaves cgroups to systemd.

    :param tables: of the CRI plugin, without our settings.
    """
    options = [_value(table, "containerd", "runtimes", RUNTIME_NAME, "options") for table in tables]
    return any(
        key.lower() == "systemdcgroup" and value is True
        for table in options
        if isinstance(table, dict)
        for key, value in table.items()
    )


def _value(tree: JsonObject, *path: str) -> t.Any:
    """Return the value at a path, or None."""
    value: t.Any = tree
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def _flatten(tree: JsonObject, path: toml.Path) -> containerd.Flat:
    flat: containerd.Flat = {}
    for key, value in tree.items():
        flat.update(_flatten(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value})
    return flat


def _tables(settings: containerd.Flat) -> list[toml.Path]:
    return sorted({path[:-1] for path in settings} | {()})


def _keys(settings: containerd.Flat, table: toml.Path) -> JsonObject:
    return {path[-1]: settings[path] for path in sorted(settings) if path[:-1] == table}


def _set_misspelled_options(document: toml.Document, plugin: str, settings: containerd.Flat) -> None:
    """Set our values also for options of our runtime in another case, which may override ours.

    :param plugin: the CRI plugin's name in this file.
    """
    table = ("plugins", plugin, "containerd", "runtimes", RUNTIME_NAME, "options")
    written = _value(document.tree, *table)
    for key in list(written) if isinstance(written, dict) else []:
        proper = containerd.OPTIONS.get(key.lower(), key)
        if proper != key:
            document.put((*table, key), settings[("options", proper)])


def _without_ours(documents: Documents) -> Documents:
    """Return the same files without our settings."""
    plain = {}
    for path, document in documents.items():
        plain[path] = document
        if toml.MARK in document.text:
            unmarked = toml.Document(path, document.checked())
            # Other marked keys have their own rules.
            unmarked.restore_all(SECTIONS)
            plain[path] = toml.Document(path, unmarked.checked())
    return plain
