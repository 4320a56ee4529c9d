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

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'|#[^\n]*|\[|\]')
_SECRET = re.compile(
    r"(?i)(\b(?:password|auth|identitytoken|identity_token|authorization|token)\b[\"']?\s*=\s*\[?\s*)"
    r"(\"(?:[^\"\\\n]|\\.)+\"|'[^'\n]+')"
)


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


# --------------------------------------------------------------------------- files


def imports_of(text: str) -> list[str]:
    """What a configuration file imports, as it is written there."""
    found = re.search(r"(?m)^[ \t]*imports[ \t]*=[ \t]*\[", text)
    header = re.search(r"(?m)^[ \t]*\[", text)
    # Below a table's header the key would belong to that table.
    if not found or (header and header.start() < found.start()):
        return []
    paths = []
    for token in _TOKEN.finditer(text, found.end()):
        if token.group() == "]":
            break
        if token.group()[0] in "\"'":
            paths.append(token.group()[1:-1])
    return paths


def resolve(parent: str, imports: t.Sequence[str], names: t.Callable[[str], list[str]]) -> list[str]:
    """Paths that imports stand for, in containerd's order.

    :param parent: the importing file; relative paths are relative to its folder.
    :param names: names in a folder.
    """
    paths: list[str] = []
    for one in imports:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(parent), one))
        if "*" in path:
            folder, pattern = posixpath.split(path)
            # Go's Glob: a star matches a leading dot too.
            paths.extend(
                posixpath.join(folder, name) for name in sorted(names(folder)) if fnmatch.fnmatchcase(name, pattern)
            )
        else:
            paths.append(path)
    return paths


def load_order(main: str, texts: t.Mapping[str, str]) -> list[str]:
    """The files that make up a configuration in the order in which containerd merges them; the later one wins."""

    def names(folder: str) -> list[str]:
        return [posixpath.basename(path) for path in texts if posixpath.dirname(path) == folder]

    order: list[str] = []
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in order or path not in texts:
            continue
        order.append(path)
        pending.extend(resolve(path, imports_of(texts[path]), names))
    return order


# --------------------------------------------------------------------------- secrets


def mask(text: str) -> str:
    """The text with each registry credential replaced by a numbered word, so that it may be shown and logged."""
    return _replace_secrets(text, lambda number, _value: f'"kubegpu-share-masked-{number}"')


def unmask(text: str, real: str) -> str:
    """A masked text (edited meanwhile) with the credentials of the file that it was made from."""
    secrets: dict[str, str] = {}

    def remember(number: int, value: str) -> str:
        secrets[f'"kubegpu-share-masked-{number}"'] = value
        return value

    _replace_secrets(real, remember)
    return re.sub(r'"kubegpu-share-masked-[0-9]+"', lambda found: secrets.get(found.group(), found.group()), text)


def _replace_secrets(text: str, value_of: t.Callable[[int, str], str]) -> str:
    count = 0

    def one(found: t.Match[str]) -> str:
        nonlocal count
        count += 1
        return found.group(1) + value_of(count, found.group(2))

    return _SECRET.sub(one, text)


# --------------------------------------------------------------------------- the dump


def read_dump(text: str) -> Flat:
    """All values of a ``containerd config dump`` by their full path; empty tables are ``{}``."""
    flat: Flat = {}
    table: tuple[str, ...] = ()
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            table = _path(line.strip("[]"))
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
        return str(self.value("containerd", "default_runtime_name") or "")

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
        found = {path[len(base) :]: value for path, value in self.flat.items() if path[: len(base)] == base}
        return {path: value for path, value in found.items() if path and value not in ("", 0, [], {})}

    def model(self) -> str:
        """The runtime that ours is a copy of: runc, else the first other one that runc's shim serves."""
        names = [name for name in self.runtimes() if name != RUNTIME_NAME]
        if "runc" in names:
            return "runc"
        fitting = [name for name in names if self.runtime(name).get(("runtime_type",)) == "io.containerd.runc.v2"]
        return fitting[0] if fitting else ""


def effective(dump: str) -> Effective:
    """A dump, read; ``plugin`` is empty where it has no CRI plugin at all."""
    flat = read_dump(dump)
    plugins = {path[1] for path in flat if path[0] == "plugins" and len(path) > 1}
    known = [name for name in (CRI_PLUGIN[3], CRI_PLUGIN[2]) if name in plugins]
    return Effective(flat, known[0] if known else "")


def runtime_settings(seen: Effective, binary: str) -> Flat:
    """What our runtime's table has to hold: all that its model has, and another binary."""
    settings = dict(seen.runtime(seen.model()))
    settings.setdefault(("runtime_type",), "io.containerd.runc.v2")
    settings[("options", "BinaryName")] = binary
    settings[("options", "SystemdCgroup")] = bool(settings.get(("options", "SystemdCgroup"), False))
    return settings


def shortcomings(seen: Effective, wanted: Wanted) -> list[str]:
    """Why a dump isn't what is wanted, each in a few words; none where it is."""
    if not seen.plugin:
        return ["the CRI plugin isn't in containerd's configuration"] if wanted.present else []
    is_default = seen.default_runtime == RUNTIME_NAME
    if not wanted.present:
        return []
    found = []
    if wanted.default and not is_default:
        found.append(f"default_runtime_name is {seen.default_runtime!r}")
    ours = seen.runtime(RUNTIME_NAME)
    for path, value in sorted(runtime_settings(seen, wanted.binary).items()):
        if ours.get(path, False if value is False else None) != value:
            found.append(f"runtimes.{RUNTIME_NAME}.{'.'.join(path)} is {ours.get(path)!r} and not {value!r}")
    if wanted.cdi and seen.cdi is False:
        found.append("enable_cdi is false")
    if cri_disabled(seen):
        found.append('disabled_plugins holds "cri"')
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
    table = (*after._base, "containerd", "runtimes", RUNTIME_NAME)

    def theirs(flat: Flat) -> Flat:
        return {
            path: value
            for path, value in flat.items()
            if path not in ours and path[: len(table)] != table and value not in ("", 0, [], {})
        }

    old, new = theirs(before.flat), theirs(after.flat)
    return sorted(".".join(path) for path in set(old) | set(new) if old.get(path) != new.get(path))
