# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""containerd on a node: its files, its dump, its credentials, and whether the daemon has loaded them.

Nodes have no TOML library, so this parses only containerd's own output, one value per line. Files that people write are
parsed and edited on the controller (``containerd_plan``).
https://github.com/containerd/containerd/blob/v2.2.0/docs/man/containerd-config.toml.5.md
"""

from __future__ import annotations

import dataclasses
import fnmatch
import posixpath
import re
import typing as t

from .._core.secrets import URL, Span, in_words, is_secret, mask_words, masked, unmasked, without_overlap
from .._host.system import System
from .._host.systemd import Unit, reason_of, stale, unit
from .._rancher.settings import K3S, RKE2
from .types import ContainerdState

Flat = dict[tuple[str, ...], t.Any]

TOOLKIT_CONFIG = "/etc/nvidia-container-runtime/config.toml"
# The programs that the toolkit searches for unless its configuration names others, and where; the first one wins.
LOW_LEVEL = ("docker-runc", "runc", "crun")
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
RUNTIME_NAME = "nvidia"
# In 1.x a default runtime as a table, and the name under which containerd runs it.
DEFAULT_RUNTIME = "default_runtime"
DEFAULT_TABLE = "default"
DROP_IN_NAME = "99-kubegpu-nvidia.toml"
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

# containerd ignores the case of these names; "systemdCgroup" is common.
OPTIONS = {"binaryname": "BinaryName", "systemdcgroup": "SystemdCgroup"}
# Shims that run the program of BinaryName.
RUNC_SHIMS = ("io.containerd.runc.v2", "io.containerd.runc.v1")

_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"""|'
    + r"'''.*?'''|"
    + r'"(?:[^"\\\n]|\\.)*"|'
    + r"'[^'\n]*'|#[^\n]*|[\[\]{}=,\n]|[^\s\"'#\[\]{}=,]+",
    re.DOTALL,
)
# In a proxy's address, with a scheme or without.
_PROXY = re.compile(r"^(?:[a-z0-9]+://)?(?P<secret>[^\s/]+)@", re.IGNORECASE)


def credentials(text: str) -> list[Span]:
    """Find the credentials of a configuration file, valid or not: strings below a secret key, and those of URLs."""
    ranges: list[Span] = []
    # The open brackets.
    nested: list[str] = []
    # A string is a value only behind a "=".
    word, key, value = "", "", False
    for token in _PIECE.finditer(text):
        piece, start = token.group(), token.start()
        if piece[0] == "#":
            ranges += [(start + a, start + b) for a, b in in_words(piece)]
        elif piece[0] in "\"'":
            width = 3 if piece[:3] in ('"""', "'''") else 1
            word = piece[width:-width]
            if value and word and is_secret(key):
                spans = [(0, len(word))]
            else:
                patterns = [URL, _PROXY] if value and "proxy" in key.lower() else [URL]
                spans = [hit.span("secret") for pattern in patterns for hit in pattern.finditer(word)]
            ranges += [(start + width + a, start + width + b) for a, b in spans]
        elif piece == "=":
            if nested[-1:] == ["["]:
                # A list that nothing closes: what follows is a key of the file again.
                nested.clear()
            key, value = word, True
        elif piece in ("[", "{"):
            # A table's header isn't a value.
            if value:
                nested.append(piece)
                value = piece == "["
        elif piece in ("]", "}"):
            nested[-1:] = []
            value = nested[-1:] == ["["]
        elif (piece == "\n" and not nested) or (piece == "," and nested[-1:] == ["{"]):
            value = False
        elif piece not in ("\n", ","):
            word = piece.rpartition(".")[2]
    return without_overlap(ranges)


def mask(text: str) -> str:
    """Replace a file's credentials by placeholders."""
    return masked(text, credentials(text))


def unmask(text: str, real: str) -> str:
    """Restore the credentials of a masked text, which may have been edited, from the file that was masked."""
    return unmasked(text, real, credentials(real))


def drop_in_path(main: str) -> str:
    """Return the path of our drop-in, by that of the main configuration file."""
    return posixpath.join(posixpath.dirname(main), "conf.d", DROP_IN_NAME)


def version_of(text: str) -> str:
    """Parse the output of ``containerd --version``; empty without a version.

    ``containerd github.com/containerd/containerd/v2 v2.2.9 <commit>``; Debian's has ``1.6.20~ds1`` in its place.
    """
    match = re.search(r"(?:^|\s)v?([0-9]+\.[0-9]+\.[0-9]+\S*)", text)
    return match.group(1) if match else ""


def release(version: str) -> tuple[int, int]:
    """Return a version's major and minor number; (0, 0) for an unknown one."""
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else (0, 0)


def imports_of(text: str) -> list[str]:
    """Return a configuration file's imports, as they are written."""
    paths: list[str] = []
    depth, key = 0, ""
    for piece in _PIECE.findall(text.lstrip("\ufeff")):
        if piece[0] == "#" or (piece == "\n" and depth):
            continue
        if piece == "\n":
            key = ""
        elif piece in ("[", "{"):
            if not key:
                # After a table's header the key would belong to that table.
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
    """Resolve imports to paths, in containerd's order.

    :param parent: the importing file; relative paths are relative to its directory.
    :param names: lists a directory.
    """
    paths: list[str] = []
    for pattern in imports:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(parent), pattern))
        paths.extend(_glob(path, names) if "*" in path else [path])
    return paths


def _glob(path: str, names: t.Callable[[str], list[str]]) -> list[str]:
    folder, pattern = posixpath.split(path)
    folders = _glob(folder, names) if "*" in folder else [folder]
    # Go's Glob: a star matches a leading dot too.
    return [
        posixpath.join(folder, name)
        for folder in folders
        for name in sorted(names(folder))
        if fnmatch.fnmatchcase(name, pattern)
    ]


def read_dump(text: str) -> Flat:
    """Parse a ``containerd config dump`` to values by their full path; empty tables are ``{}``."""
    flat: Flat = {}
    table: tuple[str, ...] = ()
    rows: dict[tuple[str, ...], int] = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            table = path_of(line.strip("[]"))
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
            # Only an empty table is a value.
            if flat.get(path[:depth]) == {}:
                del flat[path[:depth]]
    return flat


def path_of(text: str) -> tuple[str, ...]:
    """Return the names in a table's header, without its brackets."""
    parts: list[str] = []
    for match in re.finditer(r"\"((?:[^\"\\]|\\.)*)\"|'([^']*)'|([A-Za-z0-9_-]+)", text):
        parts.append(next(group for group in match.groups() if group is not None))
    return tuple(parts)


def _first_key(line: str) -> tuple[str, str]:
    match = re.match(r"(\"(?:[^\"\\]|\\.)*\"|'[^']*'|[A-Za-z0-9_-]+)\s*=\s*(.*)$", line)
    if not match:
        return line, ""
    return match.group(1).strip("\"'"), match.group(2)


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
        return [match.group()[1:-1] for match in re.finditer(r'"(?:[^"\\]|\\.)*"|\'[^\']*\'', text[1:-1])]
    return text


@dataclasses.dataclass(frozen=True)
class Options:
    """The requested state of a container runtime.

    :param present: NVIDIA's runtime is configured; otherwise it isn't the default.
    :param default: it is the default runtime.
    :param binary: its program.
    :param cdi: CDI is enabled, where the runtime has a setting for it.
    :param enable_cri: "cri" is removed from containerd's disabled_plugins.
    :param replace_default: it becomes the default even where the user's default runtime isolates pods in another way.
    """

    present: bool
    default: bool = True
    binary: str = ""
    cdi: bool = True
    enable_cri: bool = False
    replace_default: bool = False


@dataclasses.dataclass(frozen=True)
class EffectiveConfig:
    """The configuration that containerd has after its next start.

    :param flat: its values by their full path, as a dump has them.
    :param plugin: the CRI plugin's name; empty where it isn't there.
    :param cdi: whether CDI is enabled; None where this containerd doesn't support it.
    :param names: of the runtimes with a table below ``runtimes``.
    :param runtimes: each runtime's settings without empty strings, zeros and empty lists.
    :param default_is_table: DEFAULT_TABLE is DEFAULT_RUNTIME, which has no type where ours replaces it.
    :param models: the runtimes that ours can be a copy of, because they use runc's shim: runc first.
    :param cgroup_driver: of most pods, ``systemd`` or ``cgroupfs``; empty where it is unknown.
    """

    flat: Flat
    plugin: str
    default_runtime: str
    socket: str
    cdi: bool | None
    names: tuple[str, ...]
    runtimes: t.Mapping[str, Flat]
    default_is_table: bool
    models: tuple[str, ...]
    cgroup_driver: str


def config_of(flat: Flat, plugin: str) -> EffectiveConfig:
    """Return the configuration with these values, of which ``plugin`` is the CRI plugin."""
    base = ("plugins", plugin, "containerd")
    tables: dict[str, Flat] = {}
    default_table: Flat = {}
    for full, value in flat.items():
        settings, path = default_table, full[4:]
        if full[:4] == (*base, "runtimes") and path:
            settings, path = tables.setdefault(path[0], {}), path[1:]
        elif full[:4] != (*base, DEFAULT_RUNTIME):
            continue
        if len(path) == 2 and path[0] == "options":
            path = ("options", OPTIONS.get(path[1].lower(), path[1]))
        if path:
            settings[path] = value
    names = tuple(sorted(tables))
    has_type = bool(default_table.get(("runtime_type",)))
    default_is_table = has_type or DEFAULT_TABLE not in tables
    if default_is_table:
        tables[DEFAULT_TABLE] = default_table
    runtimes = {
        name: {path: value for path, value in settings.items() if value not in ("", 0, [], {})}
        for name, settings in tables.items()
    }
    # In 1.x this older table overrides the name; the dump has both.
    default = DEFAULT_TABLE if has_type else str(flat.get((*base, "default_runtime_name")) or "")
    known = {*names, DEFAULT_TABLE} if default == DEFAULT_TABLE else {*names}
    known.discard(RUNTIME_NAME)
    fitting = [name for name in known if runtimes[name].get(("runtime_type",), RUNC_SHIMS[0]) in RUNC_SHIMS]
    models = tuple(sorted(fitting, key=lambda name: (name != "runc", name)))
    driver = ""
    if plugin and models:
        driver = "systemd" if runtimes[models[0]].get(("options", "SystemdCgroup")) else "cgroupfs"
    moved = ("plugins", "io.containerd.server.v1.grpc", "address")
    socket = str(flat.get(("grpc", "address")) or flat.get(moved) or DEFAULT_SOCKET)
    enabled = flat.get(("plugins", plugin, "enable_cdi"))
    cdi = enabled if isinstance(enabled, bool) else None
    return EffectiveConfig(flat, plugin, default, socket, cdi, names, runtimes, default_is_table, models, driver)


def effective(dump: str) -> EffectiveConfig:
    """Parse a dump."""
    flat = read_dump(dump)
    plugins = {path[1] for path in flat if path[0] == "plugins" and len(path) > 1}
    return config_of(flat, next((name for name in (CRI_PLUGIN[3], CRI_PLUGIN[2]) if name in plugins), ""))


UNIT = "containerd.service"

# Kubernetes distributions with a containerd of their own, by paths that only they create. Data alone may be left of an
# earlier installation.
EMBEDDED: dict[str, tuple[str, ...]] = {
    **{kind.name: tuple(path for path in kind.marks if path != kind.data) for kind in (K3S, RKE2)},
    "microk8s": ("/var/snap/microk8s",),
    "k0s": ("/etc/k0s",),
}


def distribution(system: System) -> str:
    """Return the distribution of this machine that has its own containerd; empty for none."""
    return next((name for name, paths in EMBEDDED.items() if any(map(system.exists, paths))), "")


def config_path(daemon: Unit) -> str:
    """Return the path of the daemon's main configuration file."""
    return (daemon.values("--config", "-c") or [DEFAULT_CONFIG])[-1]


def read_files(system: System, main: str) -> dict[str, str]:
    """Read the main file and all its imports, in containerd's order; empty without a main file."""
    texts: dict[str, str] = {}
    pending = [main]
    while pending:
        path = pending.pop(0)
        if path in texts:
            continue
        text = system.read(path)
        if text is None:
            continue
        texts[path] = text
        pending.extend(resolve(path, imports_of(text), system.names))
    return texts


def dump(system: System, binary: str, config_path: str) -> tuple[str, str]:
    """Have containerd print the effective configuration of the files.

    :returns: the dump with its credentials, or an empty text and containerd's error without any.
    """
    # Without a file containerd runs with its defaults, but refuses to dump them.
    arguments = ["--config", config_path, "config", "dump"] if system.exists(config_path) else ["config", "default"]
    done = system.run([binary, *arguments])
    if done.rc != 0 or not done.out.strip():
        return "", mask_words(reason_of(done.err, f"config dump ended with {done.rc}"))
    return done.out, ""


def observe(system: System) -> ContainerdState | None:
    """Collect containerd's facts; None where it isn't installed."""
    embedded = distribution(system)
    daemon = unit(system, UNIT)
    binary = daemon.binary or "containerd"
    version = version_of(system.run([binary, "--version"]).out)
    if not version and not embedded:
        return None
    config = config_path(daemon)
    texts = read_files(system, config)
    text, error = dump(system, binary, config) if version else ("", "")
    drop_in = system.read(drop_in_path(config))
    return {
        "version": version,
        "config_path": config,
        "files": {path: mask(text) for path, text in texts.items()},
        "drop_in": None if drop_in is None else mask(drop_in),
        "dump": mask(text),
        "error": error,
        "service_active": daemon.active,
        "stale": daemon.active and stale(system, daemon.pid, list(texts)),
        "pending": system.exists(PENDING_PATH),
        "embedded": embedded,
        "operator": system.exists("/run/nvidia/toolkit/toolkit.pid"),
        "low_level": low_level(system),
    }


def low_level(system: System) -> str:
    """Return the program by which NVIDIA's runtime runs containers: the first of its list that is there, or nothing."""
    listed = re.search(r"(?m)^\s*runtimes\s*=\s*\[([^\]]*)\]", system.read(TOOLKIT_CONFIG) or "")
    names = re.findall(r"[\"']([^\"']+)[\"']", listed.group(1)) if listed else LOW_LEVEL
    there = (
        name
        for name in names
        if name.startswith("/") or any(system.exists(posixpath.join(folder, name)) for folder in PATH)
    )
    return next(there, "")
