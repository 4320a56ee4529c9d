# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""containerd's configuration as the node sees it: what a dump says, which files make it up, what in it is secret.

Pure, and for the nodes' old Pythons, which have no TOML library: it reads only what containerd itself prints, one value
per line. Files that people write are read and edited on the controller (``plugin_utils/_containerd_plan.py``).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import posixpath
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._masking import Masking

Flat = t.Dict[t.Tuple[str, ...], t.Any]

RUNTIME_NAME = "nvidia"
DROP_IN_NAME = "99-kubegpu-nvidia.toml"
# A pattern, so that containerd still starts when somebody deletes our file and leaves the import.
DROP_IN_PATTERN = "99-kubegpu-*.toml"
PENDING_PATH = "/var/lib/kubegpu-share/containerd.json"
DEFAULT_CONFIG = "/etc/containerd/config.toml"
DEFAULT_SOCKET = "/run/containerd/containerd.sock"

# The plugin that holds the CRI's runtimes, by the version of the configuration file.
CRI_PLUGIN = {
    1: "cri",
    2: "io.containerd.grpc.v1.cri",
    3: "io.containerd.cri.v1.runtime",
    4: "io.containerd.cri.v1.runtime",
}

CRI_PARTS = (CRI_PLUGIN[2], CRI_PLUGIN[3], "io.containerd.cri.v1.images")
# Formats that a containerd reads, the newest one; from 2.3 on each imported file is brought up to date by itself.
NEWEST_FORMAT = (((2, 3), 4), ((2, 0), 3), ((0, 0), 2))
EACH_FILE_ITS_FORMAT = (2, 3)
# 1.4 leaves every runtime's options out of its dump; 1.6 shows them.
DUMP_HAS_OPTIONS = (1, 6)
# What has a containerd of its own that only its own file can configure.
ELSEWHERE = {
    "microk8s": "/var/snap/microk8s/current/args/containerd-template.toml",
    "k0s": "/etc/k0s/containerd.d",
}
# containerd takes the options' names in any case; "systemdCgroup" is a usual one.
OPTIONS = {"binaryname": "BinaryName", "systemdcgroup": "SystemdCgroup"}
# Shims that run what BinaryName says.
RUNC_SHIMS = ("io.containerd.runc.v2", "io.containerd.runc.v1")

_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|'
    + r"'''.*?'''|"
    + r'"(?:[^"\\\n]|\\.)*"|'
    + r"'[^'\n]*'|#[^\n]*|[\[\]{}=,\n]|[^\s\"'#\[\]{}=,]+",
    re.DOTALL,
)
_SECRET = re.compile(
    r"(?i)(\b(?:password|auth|identitytoken|identity_token|authorization|token)\b[\"']?\s*=\s*\[?\s*)"
    r"(\"(?:[^\"\\\n]|\\.)+\"|'[^'\n]+')"
)
# A credential's quotes go with it.
_MASKING = Masking(_SECRET, '"')
mask, unmask = _MASKING.mask, _MASKING.unmask


# --------------------------------------------------------------------------- versions


def version_of(text: str) -> str:
    """The version in ``containerd --version``'s answer, or nothing.

    ``containerd github.com/containerd/containerd/v2 v2.2.9 <commit>``; Debian's has ``1.6.20~ds1`` in its place.
    """
    found = re.search(r"(?:^|\s)v?([0-9]+\.[0-9]+\.[0-9]+\S*)", text)
    return found.group(1) if found else ""


def release(version: str) -> tuple[int, int]:
    """Major and minor of a version; (0, 0) where it can't be told."""
    found = re.match(r"([0-9]+)\.([0-9]+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def belongs_to(name: str) -> str:
    """Why the containerd that comes with k3s, RKE2, microk8s or k0s isn't configured as one by itself, and what is."""
    if name in ELSEWHERE:
        return (
            f"runtime_name: this node's containerd belongs to {name}, which writes its configuration itself; "
            f"set the default runtime in {ELSEWHERE[name]}"
        )
    return f"runtime_name: this node's containerd belongs to {name}; set runtime_name: {name} (or auto)"


def newest_format(release: tuple[int, int]) -> int:
    """The newest format of configuration files that a release reads."""
    return next(number for since, number in NEWEST_FORMAT if release >= since)


# --------------------------------------------------------------------------- files


def imports_of(text: str) -> list[str]:
    """What a configuration file imports, as it is written there."""
    paths: list[str] = []
    depth, key = 0, ""
    for piece in _PIECE.findall(text.lstrip("\ufeff")):
        if piece[0] == "#" or (piece == "\n" and depth):
            continue
        if piece == "\n":
            key = ""
        elif piece in ("[", "{"):
            if not key:
                # Below a table's header the key would belong to that table.
                break
            depth += 1
        elif piece in ("]", "}"):
            depth -= 1
        elif not key:
            key = piece.strip("\"'")
        elif key == "imports" and depth == 1 and piece[0] in "\"'":
            paths.append(str(_value(piece[2:-2] if piece[:3] in ('"""', "'''") else piece)))
    return paths


def resolve(parent: str, imports: t.Sequence[str], names: t.Callable[[str], list[str]]) -> list[str]:
    """Paths that imports stand for, in containerd's order.

    :param parent: the importing file; relative paths are relative to its folder.
    :param names: names in a folder.
    """
    paths: list[str] = []
    for one in imports:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(parent), one))
        paths.extend(_glob(path, names) if "*" in path else [path])
    return paths


def _glob(path: str, names: t.Callable[[str], list[str]]) -> list[str]:
    folder, pattern = posixpath.split(path)
    folders = _glob(folder, names) if "*" in folder else [folder]
    # Go's Glob: a star matches a leading dot too.
    return [
        posixpath.join(one, name)
        for one in folders
        for name in sorted(names(one))
        if fnmatch.fnmatchcase(name, pattern)
    ]


def load_order(main: str, texts: t.Mapping[str, str]) -> list[str]:
    """The files that make up a configuration in the order in which containerd merges them; the later one wins."""

    def names(folder: str) -> list[str]:
        start = folder.rstrip("/") + "/"
        return list({path[len(start) :].partition("/")[0] for path in texts if path.startswith(start)})

    order: list[str] = []
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in order or path not in texts:
            continue
        order.append(path)
        pending.extend(resolve(path, imports_of(texts[path]), names))
    return order


def missing_imports(main: str, texts: t.Mapping[str, str]) -> list[tuple[str, str]]:
    """Files that are imported by their name and don't exist, each behind the file that imports it.

    containerd doesn't start with them, and from 2.0 on its dump doesn't say so.
    """
    return [
        (path, one)
        for path in load_order(main, texts)
        for one in resolve(path, [name for name in imports_of(texts[path]) if "*" not in name], lambda _folder: [])
        if one not in texts
    ]


# --------------------------------------------------------------------------- the dump


def read_dump(text: str) -> Flat:
    """All values of a ``containerd config dump`` by their full path; empty tables are ``{}``."""
    flat: Flat = {}
    table: tuple[str, ...] = ()
    rows: dict[tuple[str, ...], int] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            table = _path(line.strip("[]"))
            if line.startswith("[["):
                # One row of several: its number is part of its path.
                rows[table] = rows.get(table, -1) + 1
                table = (*table, str(rows[table]))
            flat.setdefault(table, {})
            continue
        key, rest = _first_key(line)
        flat[(*table, key)] = _value(rest)
    for path in list(flat):
        for depth in range(1, len(path)):
            # A table that holds something isn't a value.
            if flat.get(path[:depth]) == {}:
                del flat[path[:depth]]
    return flat


def _path(text: str) -> tuple[str, ...]:
    parts: list[str] = []
    for found in re.finditer(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'|([A-Za-z0-9_-]+)", text):
        parts.append(next(group for group in found.groups() if group is not None))
    return tuple(parts)


def _first_key(line: str) -> tuple[str, str]:
    found = re.match(r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[A-Za-z0-9_-]+)\s*=\s*(.*)$", line)
    if not found:
        return line, ""
    return found.group(1).strip("\"'"), found.group(2)


def _value(text: str) -> t.Any:
    if text in ("true", "false"):
        return text == "true"
    if re.match(r"^-?[0-9]+$", text):
        return int(text)
    if text[:1] == '"' and text[-1:] == '"':
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    if text[:1] == "'" and text[-1:] == "'":
        return text[1:-1]
    if text[:1] == "[" and text[-1:] == "]":
        return [found.group()[1:-1] for found in re.finditer(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', text[1:-1])]
    return text


@dataclasses.dataclass(frozen=True)
class Wanted:
    """How containerd's effective configuration has to look.

    :param present: our runtime is there; otherwise it isn't the default.
    :param default: it is the default runtime.
    :param binary: what it runs.
    :param enable_cri: "cri" may have left disabled_plugins.
    """

    present: bool
    default: bool = True
    binary: str = ""
    cdi: bool = True
    enable_cri: bool = False


@dataclasses.dataclass(frozen=True)
class Effective:
    """What of a dump matters to us; equal to what containerd runs with after its next start."""

    flat: Flat
    plugin: str

    @property
    def _base(self) -> tuple[str, ...]:
        return ("plugins", self.plugin)

    def value(self, *path: str) -> t.Any:
        return self.flat.get((*self._base, *path))

    @property
    def default_runtime(self) -> str:
        # A table of old that decides over the name, in 1.x; the dump shows both.
        if self.value("containerd", "default_runtime", "runtime_type"):
            return "default"
        return str(self.value("containerd", "default_runtime_name") or "")

    @property
    def socket(self) -> str:
        """Where this containerd listens."""
        moved = ("plugins", "io.containerd.server.v1.grpc", "address")
        return str(self.flat.get(("grpc", "address")) or self.flat.get(moved) or DEFAULT_SOCKET)

    def shows_options(self) -> bool:
        """Whether the dump tells runtimes' options; that of containerd 1.4 has every such table empty."""
        base = (*self._base, "containerd", "runtimes")
        return any(path[: len(base)] == base and path[len(base) + 1 : -1] == ("options",) for path in self.flat)

    @property
    def cdi(self) -> bool | None:
        """None where this containerd knows nothing of CDI."""
        found = self.value("enable_cdi")
        return found if isinstance(found, bool) else None

    def runtimes(self) -> list[str]:
        base = (*self._base, "containerd", "runtimes")
        return sorted({path[len(base)] for path in self.flat if path[: len(base)] == base and len(path) > len(base)})

    def runtime(self, name: str) -> Flat:
        """One runtime's settings that say something: empty strings, zeros and empty lists are left out."""
        base = (*self._base, "containerd", "runtimes", name)
        found = {_spelled(path[len(base) :]): value for path, value in self.flat.items() if path[: len(base)] == base}
        return {path: value for path, value in found.items() if path and value not in ("", 0, [], {})}

    def models(self) -> list[str]:
        """Runtimes that ours can be a copy of, for runc's shim serves them: runc, then the others."""
        names = [name for name in self.runtimes() if name != RUNTIME_NAME]
        fitting = [name for name in names if self.runtime(name).get(("runtime_type",), RUNC_SHIMS[0]) in RUNC_SHIMS]
        return sorted(fitting, key=lambda name: (name != "runc", name))

    def model(self, default: str = "") -> str:
        """The runtime that ours is a copy of: what pods get when they ask for none, else runc, else another one.

        :param default: the default runtime without ours.
        """
        fitting = self.models()
        return default if default in fitting else (fitting[0] if fitting else "")

    def bare_runc(self) -> bool:
        """Nobody says anything of runc: it is there because containerd brings it."""
        return set(self.runtime("runc")) <= {("runtime_type",), ("sandboxer",)}


def _spelled(path: tuple[str, ...]) -> tuple[str, ...]:
    return ("options", OPTIONS.get(path[1].lower(), path[1])) if len(path) == 2 and path[0] == "options" else path


def effective(dump: str) -> Effective:
    """A dump, read; ``plugin`` is empty where it has no CRI plugin at all."""
    flat = read_dump(dump)
    plugins = {path[1] for path in flat if path[0] == "plugins" and len(path) > 1}
    known = [name for name in (CRI_PLUGIN[3], CRI_PLUGIN[2]) if name in plugins]
    return Effective(flat, known[0] if known else "")


def runtime_settings(seen: Effective, binary: str, model: str) -> Flat:
    """What our runtime's table has to hold: all that its model has, and another binary."""
    settings = dict(seen.runtime(model)) if model else {}
    # Of the shims of old alone: with any other the CRI plugin doesn't load.
    for old in ("runtime_engine", "runtime_root"):
        settings.pop((old,), None)
    if settings.get(("sandboxer",)) == "podsandbox":
        # What containerd takes by itself, and says in its dump only.
        del settings[("sandboxer",)]
    if settings.get(("runtime_type",)) not in RUNC_SHIMS:
        settings[("runtime_type",)] = RUNC_SHIMS[0]
    settings[("options", "BinaryName")] = binary
    settings[("options", "SystemdCgroup")] = bool(settings.get(("options", "SystemdCgroup"), False))
    return settings


def shortcomings(seen: Effective, wanted: Wanted) -> list[str]:
    """Why a dump isn't what is wanted, each in a few words; none where it is."""
    if not wanted.present:
        return []
    if not seen.plugin:
        return ["the CRI plugin isn't in containerd's configuration"]
    found = []
    if wanted.default and seen.default_runtime != RUNTIME_NAME:
        found.append(f"default_runtime_name is {seen.default_runtime!r}")
    # A copy of any runtime that there is; of itself, where nobody has set up another.
    models = seen.models() + ([RUNTIME_NAME] if seen.bare_runc() else [])
    found += sorted([_differences(seen, wanted.binary, model) for model in models or [""]], key=len)[0]
    if wanted.cdi and seen.cdi is False:
        found.append("enable_cdi is false")
    if cri_disabled(seen):
        found.append('disabled_plugins holds "cri"')
    return found


def _differences(seen: Effective, binary: str, model: str) -> list[str]:
    ours = seen.runtime(RUNTIME_NAME)
    return [
        f"runtimes.{RUNTIME_NAME}.{'.'.join(path)} is {ours.get(path)!r} and not {value!r}"
        for path, value in sorted(runtime_settings(seen, binary, model).items())
        if ours.get(path, False if value is False else None) != value and (path[0] != "options" or seen.shows_options())
    ]


def obstacles(seen: Effective) -> list[tuple[tuple[str, ...], str]]:
    """Settings of old, in 1.x, with which our runtime can't be the default, as keys of the CRI plugin and words.

    No dump says so: only the daemon does when it starts.
    """
    found: list[tuple[tuple[str, ...], str]] = []
    if seen.value("containerd", "default_runtime", "runtime_type"):
        words = "containerd.default_runtime decides over default_runtime_name; make it one of containerd.runtimes"
        found.append((("containerd", "default_runtime"), words))
    for old in ("systemd_cgroup", "no_pivot"):
        if seen.value(old):
            words = f"{old} = true only works with a default runtime of type io.containerd.runtime.v1.linux; "
            found.append(((old,), words + "say it in the options of each runtime"))
    return found


def cri_disabled(seen: Effective) -> bool:
    """The CRI plugin is switched off, under whichever of its names."""
    disabled = seen.flat.get(("disabled_plugins",)) or []
    return any(name in ("cri", *CRI_PLUGIN.values()) for name in disabled)


def losses(before: Effective, after: Effective, wanted: Wanted) -> list[str]:
    """What of the user's settings a change took away or altered, as paths; ours are not among them."""
    ours = {
        (*after._base, "containerd", "default_runtime_name"),
        (*after._base, "enable_cdi"),
        # Which files were read, and the number of the format, aren't settings.
        ("imports",),
        ("version",),
    }
    if wanted.enable_cri:
        ours.add(("disabled_plugins",))
    hidden = [(*after._base, "containerd", "runtimes", RUNTIME_NAME)]
    if wanted.enable_cri and (cri_disabled(before) or not before.plugin):
        # A dump leaves out what is switched off.
        hidden += [("plugins", name) for name in CRI_PARTS]

    def theirs(flat: Flat) -> Flat:
        return {
            path: value
            for path, value in flat.items()
            if path not in ours and not any(path[: len(one)] == one for one in hidden) and value not in ("", 0, [], {})
        }

    old, new = theirs(before.flat), theirs(after.flat)
    return sorted(".".join(path) for path in set(old) | set(new) if old.get(path) != new.get(path))
