# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""containerd's configuration files: their order and formats, what counts of them, and what they say without ours. Pure.

https://github.com/containerd/containerd/blob/v2.2.0/docs/man/containerd-config.toml.5.md
"""

from __future__ import annotations

import typing as t

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._documents import toml_editor as toml
from .._documents.toml_tree import written_key
from . import containerd
from .containerd import CRI_PLUGIN, RUNTIME_NAME, EffectiveConfig
from .containerd_apply import shows_options
from .types import ContainerdState

# The newest format that a release reads.
NEWEST_FORMAT = (((2, 3), 4), ((2, 0), 3), ((0, 0), 2))
# Before it an imported file's plugin replaces the same plugin of the files before it.
DEEP_MERGE_SINCE = (2, 0)
# Before it containerd merges all files first, and reads the result in one format.
EACH_FILE_ITS_FORMAT = (2, 3)
# A pattern, so that containerd still starts when somebody deletes our file and leaves the import.
DROP_IN_PATTERN = "99-kubegpu-*.toml"
# The dump of 1.4 leaves out every runtime's options.
DUMP_HAS_OPTIONS = (1, 6)
BUILTIN_DEFAULT = "runc"
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

Documents = dict[str, toml.Document]


def newest_format(release: tuple[int, int]) -> int:
    """Return the newest configuration format that a release reads."""
    return next(number for since, number in NEWEST_FORMAT if release >= since)


def reads_one_format(release: tuple[int, int]) -> bool:
    """Return whether a release merges all files deeply, and migrates the result from one format."""
    return DEEP_MERGE_SINCE <= release < EACH_FILE_ITS_FORMAT


def own_format(tree: JsonObject) -> int:
    """Return the version that a file names; 0 for none, which means 1."""
    version = tree.get("version", 0)
    # To Python, true and false are numbers.
    return version if isinstance(version, int) and not isinstance(version, bool) else 0


def merged_format(release: tuple[int, int], trees: t.Iterable[JsonObject]) -> int:
    """Return the format in which a release reads the files that it has merged: that of the last one that names any.

    2.0 and newer rename the plugins of a file of version 1 while they load it, so that it names none. A file that is
    added in this format changes nothing in how the others are read.

    :param trees: the files in the order in which they are merged.
    """
    lowest, default = (2, 3) if release >= DEEP_MERGE_SINCE else (1, 1)
    named = [number for tree in trees if (number := own_format(tree)) >= lowest]
    return named[-1] if named else default


def cri_sections(release: tuple[int, int], trees: t.Mapping[str, JsonObject]) -> list[tuple[str, str]]:
    """Return the files' tables of the CRI plugin that count, by path and the plugin's name; the later one wins.

    :param trees: the files in the order in which they are merged.
    """
    merged = merged_format(release, trees.values())
    sections = []
    for path, tree in trees.items():
        own = own_format(tree)
        if release < DEEP_MERGE_SINCE:
            names = [CRI_PLUGIN[merged]]
        else:
            # A file of the newest format isn't migrated, and neither are tables under older names in it.
            old = (merged if reads_one_format(release) else own) < newest_format(release)
            names = [*([CRI_PLUGIN[1]] if old and own < 2 else []), *([CRI_PLUGIN[2]] if old else []), CRI_PLUGIN[3]]
        plugins = tree.get("plugins")
        sections += [
            (path, name) for name in names if isinstance(plugins, dict) and isinstance(plugins.get(name), dict)
        ]
    if release < DEEP_MERGE_SINCE:
        return sections[-1:]
    # Where all files are migrated together, a setting under the new name wins wherever it is.
    return sorted(sections, key=lambda section: section[1] == CRI_PLUGIN[3]) if reads_one_format(release) else sections


class Loaded(t.NamedTuple):
    """The files of a configuration.

    :param order: in which containerd merges them; the later one wins.
    :param missing: the importing file and the path of each import without a wildcard that doesn't exist: containerd
        doesn't start with them, and since 2.0 its dump doesn't report them.
    """

    order: list[str]
    missing: list[tuple[str, str]]


def loaded(main: str, texts: t.Mapping[str, str]) -> Loaded:
    """Follow a configuration's imports."""

    def names(folder: str) -> list[str]:
        start = folder.rstrip("/") + "/"
        return list({path[len(start) :].partition("/")[0] for path in texts if path.startswith(start)})

    order: list[str] = []
    missing: list[tuple[str, str]] = []
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in order or path not in texts:
            continue
        order.append(path)
        for pattern in containerd.imports_of(texts[path]):
            paths = containerd.resolve(path, [pattern], names)
            missing += [(path, imported) for imported in paths if "*" not in pattern and imported not in texts]
            pending += paths
    return Loaded(order, missing)


class UsersFiles(t.NamedTuple):
    """What the files say without our settings.

    :param documents: the files.
    :param version: the format of our settings: that of the other files.
    :param default: the default runtime.
    :param named: the runtimes that they name.
    :param by_systemd: whether their runtime nvidia leaves cgroups to systemd.
    :param effective: the configuration with the CRI plugin enabled, as containerd reads it beside our settings.
    :param ignored: a warning of each table that containerd ignores.
    """

    documents: Documents
    version: int
    default: str
    named: set[str]
    by_systemd: bool
    effective: EffectiveConfig
    ignored: list[str]


def cri_key(users: UsersFiles, *path: str) -> toml.Path:
    """Return the path of a setting of the CRI plugin in a drop-in of ours.

    :param path: below the plugin's table.
    """
    # In a file of version 2 a setting under version 3's name overrides the same one under its own.
    newer = ("plugins", CRI_PLUGIN[3], *path)
    named = users.version < 3 and any(
        value_at(document.tree, *newer) is not None for document in users.documents.values()
    )
    return newer if named else ("plugins", CRI_PLUGIN[users.version], *path)


class Files:
    """The files of a containerd, as its release reads them.

    :param present: NVIDIA's runtime is added; a removal leaves files without anything of ours alone, whatever they are.
    :ivar main: path of the main file, and ``drop_in`` that of ours.
    :ivar documents: the files that may be edited, without our drop-in.
    :ivar concerned: whether any of them is edited.
    :ivar effective: the effective configuration of all files.
    :raises BadInput: containerd can't read them, or they can't be edited.
    """

    def __init__(self, observed: ContainerdState, present: bool) -> None:
        self.main = observed["config_path"]
        self.release = containerd.release(observed["version"])
        self.drop_in = containerd.drop_in_path(self.main)
        files = observed["files"]
        if not present:
            files = {path: text for path, text in files.items() if toml.MARK in text or DROP_IN_PATTERN in text}
        self.documents = {path: _parse(path, text) for path, text in files.items() if path != self.drop_in}
        missing = loaded(self.main, observed["files"]).missing
        if missing and present:
            raise BadInput(
                f"{missing[0][0]} imports {missing[0][1]}, which doesn't exist: containerd doesn't start with that; "
                "remove the import or restore the file"
            )
        if present:
            self._check_formats()
        # A removal needs nothing of the node's files where none of them is ours.
        self.concerned = bool(present or files or self.drop_in in observed["files"])
        if observed["error"] and self.concerned and not missing:
            marked = [path for path, text in observed["files"].items() if text.startswith("\ufeff")]
            where = f" ({', '.join(marked)} begins with a byte order mark)" if marked else ""
            raise BadInput(f"containerd can't read its own configuration: {observed['error']}{where}")
        self._ours = observed["files"].get(self.drop_in)
        self.effective = containerd.effective(observed["dump"])
        if self.release < DUMP_HAS_OPTIONS:
            self.effective = self._with_options()

    def trees(self, documents: Documents) -> dict[str, JsonObject]:
        """Return the files' values, as containerd merges them, in this order; an edit may change what is imported."""
        order = loaded(self.main, {path: document.text for path, document in documents.items()}).order
        return {path: documents[path].tree for path in order}

    def sections(self, documents: Documents) -> list[tuple[str, str]]:
        return cri_sections(self.release, self.trees(documents))

    def _cri_tables(self, documents: Documents) -> list[tuple[str, JsonObject]]:
        """Return the CRI plugin's tables that count, each with its file; the later one wins."""
        return [(path, documents[path].tree["plugins"][name]) for path, name in self.sections(documents)]

    def holder(self, key: toml.Path) -> str:
        """Return the file that sets a key of the CRI plugin."""
        having = [path for path, table in self._cri_tables(self.documents) if value_at(table, *key) is not None]
        return having[-1] if having else self.main

    def without_ours(self) -> UsersFiles:
        """Read the files as they are without our settings."""
        plain = without_ours(self.documents)
        tables = [table for _path, table in self._cri_tables(plain)]
        default, named = self._users_default(tables)
        main = self.documents.get(self.main)
        if main is None or not main.tree:
            # Every 2.x reads 3; 4 would require 2.3.
            version = min(newest_format(self.release), 3)
        else:
            version = merged_format(self.release, self.trees(self.documents).values())
        seen = self._with_default_runtime(self._enabled(version), tables)
        ignored = self._ignored(plain) if self.release >= DEEP_MERGE_SINCE else []
        return UsersFiles(plain, version, default, named, _by_systemd(tables), seen, ignored)

    def _check_formats(self) -> None:
        newest, release = newest_format(self.release), _dotted(self.release)
        for path, tree in self.trees(self.documents).items():
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
        for tree in self.trees(self.documents).values():
            for name, table in (value_at(tree, *runtimes) or {}).items():
                for key, value in (table.get("options") or {}).items():
                    flat[(*runtimes, name, "options", key)] = value
        return containerd.config_of(flat, seen.plugin)

    def _enabled(self, version: int) -> EffectiveConfig:
        """Return the effective configuration with the CRI plugin enabled, as containerd reads it beside our settings.

        :param version: the format of our settings.
        """
        seen, release = self.effective, self.release
        off = seen.flat.get(("disabled_plugins",)) or []
        ours = own_format(toml.parse(self.drop_in, self._ours or ""))
        # Since our drop-in was written, the user has converted his files, and the dump has them in the former format.
        outdated = ours not in (0, version) and reads_one_format(release)
        enabled = bool(seen.plugin) and seen.plugin not in off
        if enabled and not outdated and (release < (2, 0) or seen.plugin == CRI_PLUGIN[3]):
            return seen
        # The dump lacks a disabled plugin.
        flat: containerd.Flat = {}
        for _path, table in self._cri_tables(self.documents):
            flat.update(flatten(table, ("plugins", CRI_PLUGIN[3])))
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
            default = value_at(table, "containerd", "default_runtime_name") or default
            if self.release < DEEP_MERGE_SINCE and value_at(table, *DEFAULT_TYPE):
                default = containerd.DEFAULT_TABLE
            runtimes = value_at(table, "containerd", "runtimes")
            named |= set(runtimes) if isinstance(runtimes, dict) else set()
        return str(default), named

    def _with_default_runtime(self, seen: EffectiveConfig, tables: t.Sequence[JsonObject]) -> EffectiveConfig:
        """Return an effective configuration with the type of the user's default_runtime, which ours replaces.

        :param tables: of the CRI plugin, without our settings.
        """
        types = [value_at(table, *DEFAULT_TYPE) for table in tables]
        if self.release >= DEEP_MERGE_SINCE or not any(types):
            return seen
        return containerd.config_of({**seen.flat, ("plugins", seen.plugin, *DEFAULT_TYPE): types[-1]}, seen.plugin)

    def _ignored(self, plain: Documents) -> list[str]:
        """Warn of settings that containerd ignores in the format in which it reads them, as it did before.

        :param plain: the user's files without our settings.
        """
        trees = self.trees(plain)
        counted = self.sections(plain)
        warnings = []
        merged = merged_format(self.release, trees.values())
        for path, tree in trees.items():
            for name in (CRI_PLUGIN[1], CRI_PLUGIN[2]):
                section = value_at(tree, "plugins", name)
                if (path, name) in counted or not isinstance(section, dict) or not set(section) - OF_THE_SERVER:
                    continue
                own = own_format(tree)
                number = merged if any(own_format(tree) > 1 for tree in trees.values()) else 2
                table, newer = (f"[plugins.{written_key((plugin,))}]" for plugin in (name, CRI_PLUGIN[2]))
                names = (
                    f"{newer} as the table's name" if number == 2 else "its tables as in `containerd config default`"
                )
                warnings.append(
                    f"containerd {_dotted(self.release)} ignores {table} of {path}, which has "
                    f"{f'version {own}' if own else 'no version'}, as it did before NVIDIA's runtime was added; to "
                    f"bring it into effect convert the file to version {number} by hand (`version = {number}`, and "
                    f"{names}; `containerd config migrate` would drop its settings) and run again"
                )
        return warnings


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


def without_ours(documents: Documents) -> Documents:
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


def _by_systemd(tables: t.Iterable[JsonObject]) -> bool:
    """Return whether the runtime nvidia of the user's files leaves cgroups to systemd.

    :param tables: of the CRI plugin, without our settings.
    """
    options = [value_at(table, "containerd", "runtimes", RUNTIME_NAME, "options") for table in tables]
    return any(
        key.lower() == "systemdcgroup" and value is True
        for table in options
        if isinstance(table, dict)
        for key, value in table.items()
    )


def value_at(tree: JsonObject, *path: str) -> t.Any:
    """Return the value at a path, or None."""
    value: t.Any = tree
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def flatten(tree: JsonObject, path: toml.Path) -> containerd.Flat:
    flat: containerd.Flat = {}
    for key, value in tree.items():
        flat.update(flatten(value, (*path, key)) if isinstance(value, dict) else {(*path, key): value})
    return flat
