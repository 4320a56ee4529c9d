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
from .containerd_apply import belongs_to, runtime_settings, unmet_requirements
from .containerd_files import (
    BUILTIN_DEFAULT,
    DEEP_MERGE_SINCE,
    DEFAULT_TYPE,
    DROP_IN_PATTERN,
    SECTIONS,
    Documents,
    Files,
    UsersFiles,
    cri_key,
    cri_sections,
    flatten,
    loaded,
    value_at,
    without_ours,
)
from .types import ContainerdState

NEW_FILE = f"{toml.MARK}, new file"
# In disabled_plugins.
CRI_NAMES = {"cri", *CRI_PLUGIN.values()}
IMAGES_PLUGIN = "io.containerd.cri.v1.images"
# Settings of older formats' containerd table that are the plugin's for images since 2.0.
MOVED = ("snapshotter", "disable_snapshot_annotations", "discard_unpacked_layers")
# Shim of 1.0, for which some settings of 1.x are.
LINUX_SHIM = "io.containerd.runtime.v1.linux"
# These settings, and their names in the options of newer shims.
LINUX_SETTINGS = {("systemd_cgroup",): "SystemdCgroup", ("containerd", "no_pivot"): "NoPivotRoot"}
# A runtime's program, the first one that is set; the others are of the shim of 1.0.
PROGRAMS = (("options", "BinaryName"), ("runtime_engine",), ("options", "Runtime"))
UNIT = "containerd.service"


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


def texts_without_ours(options: Options, observed: ContainerdState) -> dict[str, str | None]:
    """Return the files without our settings, None for one to delete; the CRI plugin stays enabled."""
    return _Edit(options, observed, serves_kubelet=True).absent()


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
        self._files = files = Files(observed, options.present)
        self._main, self._release, self._documents = files.main, files.release, files.documents
        self.drop_in, self.effective = files.drop_in, files.effective
        self._pattern = posixpath.join(posixpath.dirname(self.drop_in), DROP_IN_PATTERN)

    def present(self) -> dict[str, str | None]:
        """Add our settings; return every file's text."""
        theirs = self._documents
        self._enable_cri(theirs)
        users = self._files.without_ours()
        self._set_format(users.version)
        self.users_default, seen = users.default, users.effective
        self._check_linux_settings(seen)
        self.replacement = self._check_replacement(seen)
        settings = runtime_settings(seen, self._options.binary, self._model(users))
        drop_in: str | None = None
        if self._release >= DEEP_MERGE_SINCE:
            for document in theirs.values():
                document.restore_all(SECTIONS)
            self._note_moved(self._files.trees(users.documents))
            self.warnings += users.ignored
            self._import(theirs.setdefault(self._main, toml.Document(self._main, "")))
            ours = toml.Document(self.drop_in, self._drop_in_text(users, settings))
            sections = self._files.sections(theirs)
            self._override(theirs, sections, ours)
            for path, name in sections:
                _set_misspelled_options(theirs[path], name, settings)
            drop_in = ours.text
        else:
            if self._main in theirs:
                theirs[self._main].remove_item(("imports",), self._pattern)
            sections = self._files.sections(theirs)
            # The file whose section counts, or that gets one.
            target = sections[-1][0] if sections else self._main
            if target == self._main:
                theirs.setdefault(self._main, toml.Document(self._main, ""))
            self._edit_in_place(theirs, target, users.version, seen, settings)
            _set_misspelled_options(theirs[target], CRI_PLUGIN[users.version], settings)
        return {self.drop_in: drop_in, **{path: document.checked() for path, document in theirs.items()}}

    def _set_format(self, version: int) -> None:
        document = self._documents.get(self._main)
        if document is None or not document.tree:
            mark = toml.MARK if document is not None else NEW_FILE
            self._documents.setdefault(self._main, toml.Document(self._main, "")).set(("version",), version, mark)

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

    def _check_linux_settings(self, seen: EffectiveConfig) -> None:
        """Refuse settings of 1.x with which the CRI plugin doesn't load, which no dump shows."""
        kind = seen.runtimes.get(str(self.users_default), {}).get(("runtime_type",), "")
        for key, option in LINUX_SETTINGS.items():
            if not seen.flat.get(("plugins", seen.plugin, *key)) or self._release >= DEEP_MERGE_SINCE:
                continue
            conflict = f"{self._files.holder(key)} has {key[-1]} = true, with which containerd's CRI plugin"
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
                f"{self._files.holder(('containerd', 'default_runtime_name'))} has default_runtime_name = "
                f"{json.dumps(name)}, and no runtime of this name is configured, so that containerd's CRI plugin "
                "doesn't load; correct the name, or configure this runtime"
            )
        return check_replacement("containerd", name, lost, self._options, done, self._observed["low_level"])

    def _model(self, users: UsersFiles) -> str:
        """Return the runtime that ours is a copy of."""
        seen = users.effective
        model = users.default if users.default in seen.models else next(iter(seen.models), "")
        if users.default == RUNTIME_NAME and RUNTIME_NAME in users.named:
            if not users.named & set(seen.models):
                # The user's own runtime nvidia is the only one configured; the built-in runc isn't used.
                return RUNTIME_NAME
            if users.by_systemd and not seen.runtimes.get(model, {}).get(("options", "SystemdCgroup")):
                # Older tools leave it out of nvidia. Where only nvidia has it, all pods have run with it.
                return RUNTIME_NAME
        return model

    def _override(self, documents: Documents, sections: t.Sequence[tuple[str, str]], ours: toml.Document) -> None:
        """Change the keys of files that are merged after our drop-in and would override it.

        :param sections: of the CRI plugin, by path and the plugin's name.
        """
        texts = {path: document.text for path, document in documents.items()}
        order = loaded(self._main, {**texts, self.drop_in: ours.text}).order
        later = order[order.index(self.drop_in) + 1 :]
        values = {key: value for plugin in ours.tree["plugins"].values() for key, value in flatten(plugin, ()).items()}
        for path, name in [section for section in sections if section[0] in later]:
            for key, value in values.items():
                full = ("plugins", name, *key)
                if documents[path].get(full) not in (None, value):
                    documents[path].put(full, value)

    def _import(self, document: toml.Document) -> None:
        import_drop_in(document, self._main, self.drop_in)

    def _drop_in_text(self, users: UsersFiles, settings: containerd.Flat) -> str:
        """Return the text of our drop-in.

        :param settings: of our runtime.
        """
        version = users.version

        def key(*path: str) -> toml.Path:
            return cri_key(users, *path)

        tables: list[tuple[toml.Path, JsonObject]] = []
        if self._options.cdi and users.effective.cdi is not None:
            tables.append((key("enable_cdi")[:-1], {"enable_cdi": True}))
        if self._options.default:
            tables.append((key("containerd", "default_runtime_name")[:-1], {"default_runtime_name": RUNTIME_NAME}))
        runtime = (*key("containerd", "runtimes"), RUNTIME_NAME)
        tables += [((*runtime, *sub), keys_of(settings, sub)) for sub in tables_of(settings)]
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
        plain = without_ours({target: document})[target]
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
                for sub in tables_of(builtin):
                    document.add_table((*runtimes, name, *sub), keys_of(builtin, sub), toml.MARK)
        table = (*runtimes, RUNTIME_NAME)
        for sub in tables_of(settings):
            document.put_table((*table, *sub), keys_of(settings, sub))

    def absent(self) -> dict[str, str | None]:
        """Remove our settings; return the text of every file that has some, None for one to delete."""
        texts = self._observed["files"]
        if self._files.concerned and self._release >= DEEP_MERGE_SINCE:
            order = [path for path in loaded(self._main, texts).order if path != self.drop_in]
            self._note_moved({path: toml.parse(path, texts[path]) for path in order})
        # Another drop-in of ours is read by the same import.
        shared = any(path != self.drop_in and fnmatch.fnmatchcase(path, self._pattern) for path in texts)
        if self._main in self._documents and not shared:
            self._documents[self._main].remove_item(("imports",), self._pattern)
        after: dict[str, str | None] = {}
        for path, document in self._documents.items():
            document.restore_all(SECTIONS)
            self._disable_cri(path, document)
            mark = document.comment(("version",))
            # Plugins' settings that somebody added meanwhile need the version that we set.
            sections = {place.path[0] for place in document.places() if place.path} & set(SECTIONS)
            if mark in (toml.MARK, NEW_FILE) and not sections and not (shared and path == self._main):
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


def import_drop_in(document: toml.Document, main: str, drop_in: str) -> None:
    """Have the main file import a drop-in of ours, where no import does yet.

    :param main: path of the file.
    :param drop_in: path in the folder of our drop-ins.
    """
    for pattern in document.tree.get("imports") or []:
        full = posixpath.normpath(posixpath.join(posixpath.dirname(main), pattern))
        if posixpath.dirname(full) == posixpath.dirname(drop_in) and fnmatch.fnmatchcase(drop_in, full):
            return
    document.add_item(("imports",), posixpath.join(posixpath.dirname(drop_in), DROP_IN_PATTERN))


def tables_of(settings: containerd.Flat) -> list[toml.Path]:
    """Return the tables below a runtime's own that its settings need."""
    return sorted({path[:-1] for path in settings} | {()})


def keys_of(settings: containerd.Flat, table: toml.Path) -> JsonObject:
    """Return the settings of one of these tables."""
    return {path[-1]: settings[path] for path in sorted(settings) if path[:-1] == table}


def _set_misspelled_options(document: toml.Document, plugin: str, settings: containerd.Flat) -> None:
    """Set our values also for options of our runtime in another case, which may override ours.

    :param plugin: the CRI plugin's name in this file.
    """
    table = ("plugins", plugin, "containerd", "runtimes", RUNTIME_NAME, "options")
    written = value_at(document.tree, *table)
    for key in list(written) if isinstance(written, dict) else []:
        proper = containerd.OPTIONS.get(key.lower(), key)
        if proper != key:
            document.put((*table, key), settings[("options", proper)])
