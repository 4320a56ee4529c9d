# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The settings of k3s and RKE2, as they read them themselves. Pure.

Both make flags of a file and of its drop-ins, in the order of their names, put them before the flags of the command
line, and read flags that are nowhere from the environment.
https://github.com/k3s-io/k3s/blob/v1.34.1%2Bk3s1/pkg/configfilearg/parser.go
"""

from __future__ import annotations

import dataclasses
import posixpath
import typing as t

from . import yaml_reader
from .yaml_reader import Pairs, Unreadable, Value

# Names of one letter that a flag has, too.
DROP_IN_NAME = "99-kubegpu-nvidia.yaml"
# Folders of units, where their installers and packages put them.
UNITS = ("/etc/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system")
ALIASES = {"d": "data-dir"}
# Flags that are read from the environment, too, without its prefix K3S_ or RKE2_.
VARIABLES = {
    "data-dir": "DATA_DIR",
    "selinux": "SELINUX",
    "kube-scheduler-extra-mount": "KUBE_SCHEDULER_EXTRA_MOUNT",
    "kube-scheduler-extra-env": "KUBE_SCHEDULER_EXTRA_ENV",
}
# The settings that are collected. Others may be secrets, and stay on the machine.
KEYS = (
    "data-dir",
    "default-runtime",
    "docker",
    "container-runtime-endpoint",
    "selinux",
    "disable-scheduler",
    "disable-apiserver",
    "disable-agent",
    "kubelet-arg",
    "kube-scheduler-arg",
    "kube-scheduler-extra-mount",
    "kube-scheduler-extra-env",
)
# The same that are yes or no: on the command line none of them takes the next word as its value.
SWITCHES = ("docker", "selinux", "disable-scheduler", "disable-apiserver", "disable-agent")
# Values of one file: an alias has a list's values again.
MOST_VALUES = 10_000
TRUE, FALSE = ("1", "t", "T", "TRUE", "true", "True"), ("0", "f", "F", "FALSE", "false", "False")
# What is wrong beside ``yaml_reader.WHY``, by code.
WHY = {
    **yaml_reader.WHY,
    "value": "a setting that is a mapping or a nested list where a text or a list of texts is needed",
    "switch": "a value that is neither true nor false",
    "two-names": "the same setting by two names, with which it doesn't start",
    "place": "settings that aren't in a file of this machine",
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One of the two.

    :param units: its systemd units, that of a server first.
    :param one_binary: its clients are commands of its binary, not files of their own.
    """

    name: str
    title: str
    units: tuple[str, ...]
    one_binary: bool

    @property
    def marks(self) -> tuple[str, ...]:
        """Return paths of which one exists where it is installed.

        An agent with its settings and its state elsewhere has only its unit.
        """
        files = (f"{folder}/{name}" for folder in UNITS for name in self.units)
        return (posixpath.dirname(self.config), self.data, *files)

    @property
    def config(self) -> str:
        return f"/etc/rancher/{self.name}/config.yaml"

    @property
    def folder(self) -> str:
        return f"{self.config}.d"

    @property
    def drop_in(self) -> str:
        return posixpath.join(self.folder, DROP_IN_NAME)

    @property
    def data(self) -> str:
        return f"/var/lib/rancher/{self.name}"

    @property
    def record(self) -> str:
        return f"/var/lib/kubegpu-share/{self.name}.json"

    def client(self, name: str, binary: str, data: str) -> tuple[str, ...]:
        """Return the command of the client ``crictl`` or ``ctr`` that it brings along.

        :param binary: its own; empty if unknown.
        :param data: the directory of its state.
        """
        if not self.one_binary:
            return (posixpath.join(data, "bin", name),)
        # By itself k3s takes the directory of its files, and unpacks its programs there. Releases before August 2024
        # don't know the first variable, and need the second one for a directory that only their command line has.
        variables = (f"{self.name.upper()}_DATA_DIR={data}", "CRI_CONFIG_FILE=/dev/null")
        return ("env", *variables, binary or self.name, name)


# https://docs.rke2.io/reference/cli_tools
K3S = Kind("k3s", "k3s", ("k3s.service", "k3s-agent.service"), True)
RKE2 = Kind("rke2", "RKE2", ("rke2-server.service", "rke2-agent.service"), False)


class Entry(t.TypedDict):
    """One key of a file: ``add`` by its ``+``, and its values as texts.

    ``single`` isn't a list; without a value it is null.
    """

    key: str
    add: bool
    single: bool
    values: list[str]


class SettingsFile(t.TypedDict):
    """One file, with the collected keys alone."""

    path: str
    entries: list[Entry]


class Problem(t.TypedDict):
    """What can't be read: a file, or a unit's command line; ``line`` is 0 where it is none of a file."""

    path: str
    line: int
    code: str


class Settings(t.TypedDict):
    """All settings.

    ``path`` is the settings' file, ``files`` are those that exist in the order in which they are read, ``flags`` those
    of the command line; ``environment`` counts for a flag that neither has. ``problem`` is None where all was read.
    """

    path: str
    files: list[SettingsFile]
    flags: dict[str, list[str]]
    environment: dict[str, list[str]]
    problem: Problem | None


def read(
    program: str,
    arguments: t.Sequence[str],
    environment: t.Mapping[str, str],
    content: t.Callable[[str], str | None],
    names: t.Callable[[str], t.Sequence[str]],
    keys: t.Container[str] = KEYS,
) -> Settings:
    """Read the settings with which a service starts next.

    :param program: ``k3s`` or ``rke2``.
    :param arguments: of its command line, without the program.
    :param environment: of its unit and its unit's files.
    :param content: reads a file; None for a missing one.
    :param names: lists a folder.
    """
    prefix = program.upper()
    path = environment.get(f"{prefix}_CONFIG_FILE") or _named(arguments) or f"/etc/rancher/{program}/config.yaml"
    found: Settings = {"path": path, "files": [], "flags": {}, "environment": {}, "problem": None}
    if not path.startswith("/"):
        found["problem"] = {"path": path, "line": 0, "code": "place"}
        return found
    seen: dict[str, set[str]] = {}
    for word, value in _flags(arguments):
        _take(found["flags"], seen, word, value, keys)
    for key, name in VARIABLES.items():
        value = environment.get(f"{prefix}_{name}")
        # An empty variable is none.
        if value and key in keys:
            found["environment"][key] = [value]
    for file in [path, *(f"{folder_of(path)}/{name}" for name in drop_ins(names(folder_of(path))))]:
        text = content(file)
        if text is None:
            continue
        try:
            entries, used = _entries(text, keys)
        except Unreadable as error:
            found["problem"] = {"path": file, "line": error.line, "code": error.code}
            return found
        for key, words in used.items():
            seen.setdefault(key, set()).update(words)
        found["files"].append({"path": file, "entries": entries})
    twice = sorted(key for key, words in seen.items() if len(words) > 1)
    # It refuses each value that is neither, also one before the last, or of a variable beside a flag.
    wrong = twice or [
        key for key in SWITCHES if {*values(found, key), *found["environment"].get(key, ())}.difference((*TRUE, *FALSE))
    ]
    if wrong:
        having = [file["path"] for file in found["files"] if any(entry["key"] == wrong[0] for entry in file["entries"])]
        found["problem"] = {"path": (having or [path])[-1], "line": 0, "code": "two-names" if twice else "switch"}
    return found


def folder_of(path: str) -> str:
    """Return the folder of drop-ins of a settings' file."""
    return f"{path}.d"


def drop_ins(names: t.Iterable[str]) -> list[str]:
    """Return the names of a folder that are read, in the order in which they are."""
    return sorted((name for name in names if name.lower().endswith((".yaml", ".yml"))), key=_bytes)


def _bytes(name: str) -> bytes:
    """Return a name of a file as the kernel has it, which may be no UTF-8."""
    return name.encode("utf-8", "surrogateescape")


def values(settings: Settings, key: str, without: t.Container[str] = (), flags: bool = True) -> list[str]:
    """Return the values with which a flag is given, in order: of a text the last one counts.

    :param without: paths of files that are left out.
    :param flags: also those of the command line, and where none is given those of the environment.
    """
    found: list[str] = []
    there = single = False
    for file in settings["files"]:
        for entry in file["entries"] if file["path"] not in without else ():
            if entry["key"] != key:
                continue
            if entry["add"] and there:
                found += entry["values"]
                single = False
            else:
                found, single = list(entry["values"]), entry["single"]
            there = True
    if single and not found:
        found = [""]
    given = [*found, *(settings["flags"].get(key, ()) if flags else ())]
    return given if given or not flags else list(settings["environment"].get(key, ()))


def value(settings: Settings, key: str, without: t.Container[str] = ()) -> str:
    """Return the text of a setting; empty where it isn't set."""
    return _last(values(settings, key, without)) or ""


def on(settings: Settings, key: str, without: t.Container[str] = ()) -> bool:
    """Return whether a setting that is yes or no is on."""
    return value(settings, key, without) in TRUE


def variable(settings: Settings, key: str, program: str, without: t.Container[str] = ()) -> str:
    """Return the name of the environment's variable by which a flag is set; empty where it isn't."""
    given = settings["flags"].get(key) or any(path not in without for path in setters(settings, key))
    return f"{program.upper()}_{VARIABLES[key]}" if settings["environment"].get(key) and not given else ""


def only(settings: Settings, keys: t.Container[str], names: t.Container[str] = ()) -> Settings:
    """Return the settings with these keys alone.

    :param names: keys whose values are variables, of which the names are kept.
    """

    def shown(key: str, words: t.Sequence[str]) -> list[str]:
        return [word.partition("=")[0] for word in words] if key in names else list(words)

    files: list[SettingsFile] = []
    for file in settings["files"]:
        entries = [entry for entry in file["entries"] if entry["key"] in keys]
        kept: list[Entry] = [{**entry, "values": shown(entry["key"], entry["values"])} for entry in entries]
        files.append({"path": file["path"], "entries": kept})
    return {
        "path": settings["path"],
        "files": files,
        "flags": {key: shown(key, words) for key, words in settings["flags"].items() if key in keys},
        "environment": {key: shown(key, words) for key, words in settings["environment"].items() if key in keys},
        "problem": settings["problem"],
    }


def replaced(settings: Settings, path: str, wanted: t.Mapping[str, t.Sequence[str]]) -> Settings:
    """Return the settings as they are with another drop-in.

    :param path: of the drop-in.
    :param wanted: its values by key, which may end with ``+``.
    """
    entries: list[Entry] = [
        {"key": key.rstrip("+"), "add": key.endswith("+"), "single": False, "values": list(words)}
        for key, words in wanted.items()
    ]
    files = {file["path"]: file for file in settings["files"]} | {path: SettingsFile(path=path, entries=entries)}
    order = sorted(files, key=lambda name: (name != settings["path"], _bytes(name)))
    return {**settings, "files": [files[file] for file in order]}


def after(settings: Settings, path: str, key: str) -> list[str]:
    """Return the files that are read after a drop-in and set a key."""
    paths = [file["path"] for file in settings["files"]]
    later = {*paths[paths.index(path) + 1 :]} if path in paths else set()
    return [setter for setter in setters(settings, key) if setter in later]


def setters(settings: Settings, key: str) -> dict[str, list[str]]:
    """Return each file that sets a key, with its values, in the order in which they are read."""
    by_file = {}
    for file in settings["files"]:
        values = [entry["values"] for entry in file["entries"] if entry["key"] == key]
        if values:
            by_file[file["path"]] = [word for words in values for word in words]
    return by_file


def explain(title: str, problem: Problem) -> str:
    """Return a problem in a sentence without its end.

    :param title: of the program.
    """
    where = f"{problem['path']}, line {problem['line']}" if problem["line"] else problem["path"]
    return f"{where}: {title}'s settings can't be read here: {WHY.get(problem['code'], 'an unknown reason')}"


def _last(words: t.Sequence[str]) -> str | None:
    return words[-1] if words else None


def _named(arguments: t.Sequence[str]) -> str:
    """Return the first --config of a command line."""
    for number, argument in enumerate(arguments):
        name, equals, path = argument.partition("=")
        if name in ("--config", "-c"):
            return path if equals else "".join(arguments[number + 1 : number + 2])
    return ""


def _flags(arguments: t.Sequence[str]) -> t.Iterator[tuple[str, str | None]]:
    """Yield the flags of a command line with their values; None where the next word isn't one.

    Go's flags have one dash or two. A list of arguments may have a value that begins with a dash.
    """
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            continue
        if word == "--":
            return
        name, equals, text = word.lstrip("-").partition("=")
        if equals:
            yield name, text
        elif name not in SWITCHES and rest and (name.endswith("-arg") or not rest[0].startswith("-")):
            yield name, rest.pop(0)
        else:
            yield name, None


def _take(
    flags: dict[str, list[str]], seen: dict[str, set[str]], word: str, given: str | None, keys: t.Container[str]
) -> None:
    key = ALIASES.get(word, word)
    if key in keys:
        seen.setdefault(key, set()).add(word)
        if given is None:
            given = "true" if key in SWITCHES else ""
        flags.setdefault(key, []).append(given)


def _entries(text: str, keys: t.Container[str]) -> tuple[list[Entry], dict[str, set[str]]]:
    """Return a file's entries of these keys, and the names by which it has them."""
    entries: list[Entry] = []
    used: dict[str, set[str]] = {}
    pairs, left = yaml_reader.read(text), MOST_VALUES
    for (word, given), line in zip(pairs, pairs.lines):
        word = word.strip()
        name = word[:-1] if word.endswith("+") else word
        key = ALIASES.get(name, name)
        if key not in keys:
            continue
        used.setdefault(key, set()).add(name)
        single = not isinstance(given, list) or isinstance(given, Pairs)
        items: list[Value] = [given] if single or not isinstance(given, list) else given
        left -= len(items)
        if left < 0:
            raise Unreadable("size", line)
        if any(isinstance(item, list) for item in items):
            # Go prints its own form of them.
            raise Unreadable("value", line)
        words = [] if given is None else [str(item or "").strip() for item in items]
        entries.append({"key": key, "add": word.endswith("+"), "single": single, "values": words})
    return entries, used
