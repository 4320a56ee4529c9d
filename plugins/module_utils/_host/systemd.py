# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read a daemon's systemd unit and process: program, arguments and age."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import shlex
import typing as t

from .system import System

# A log line that is no failure, with or without a time before it.
_HARMLESS = re.compile(r"level=\"?(?:trace|debug|info|warn(?:ing)?)\b|^(?:TRAC|DEBU|INFO|WARN)[A-Z]*\[", re.IGNORECASE)
# What Go's runtime and flag parsers print behind the reason.
_BEHIND = re.compile(r"^(?:goroutine [0-9]+ \[|\[signal |USAGE:|Usage:|NAME:|See '.* --help')")
_PANIC = re.compile(r"^(?:panic|fatal error): ")


# A daemon may restart within the second in which its file was written; times in /proc are exact to hundredths.
STALE_AFTER_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Unit:
    """A systemd unit.

    :param loaded: systemd has loaded it.
    :param binary: path of the program; empty without a unit.
    :param arguments: those of its next start, or of the running process if the unit takes them from variables.
    :param files: the unit's file, its drop-ins and environment files, which determine the arguments.
    :param pid: 0 if it doesn't run.
    """

    name: str
    loaded: bool
    binary: str
    arguments: tuple[str, ...]
    files: tuple[str, ...]
    active: bool
    pid: int
    # The command line of its next start and the variables of its own, as systemctl shows them.
    command: str = ""
    variables: str = ""
    environment_files: tuple[str, ...] = ()

    def values(self, *names: str) -> list[str]:
        """Return the values of a flag with any of these names, in order."""
        values = []
        rest = list(self.arguments)
        while rest:
            word = rest.pop(0)
            flag, equals, value = word.partition("=")
            if flag in names:
                if not equals and rest:
                    value = rest.pop(0)
                values.append(value)
        return values


_PROPERTIES = (
    *("LoadState", "ActiveState", "MainPID", "ExecStart", "FragmentPath", "DropInPaths"),
    *("EnvironmentFiles", "Environment"),
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def unit(system: System, name: str) -> Unit:
    """Read a unit as systemd has loaded it, and its process."""
    wanted = [word for key in _PROPERTIES for word in ("-p", key)]
    done = system.run(["systemctl", "show", name, *wanted])
    values = dict(line.split("=", 1) for line in done.out.splitlines() if "=" in line)
    start = values.get("ExecStart", "")
    binary = re.search(r"\bpath=(\S+)", start)
    argv = re.search(r"argv\[\]=(.*?) ; ", start)
    pid = values.get("MainPID") or "0"
    arguments = tuple(argv.group(1).split()) if argv else ()
    if pid.isdigit() and pid != "0" and (not arguments or any("$" in argument for argument in arguments)):
        arguments = command_line(system, int(pid)) or arguments
    # A line for each file.
    lines = [line for line in done.out.splitlines() if line.startswith("EnvironmentFiles=")]
    named = re.findall(r"(\S+) \(ignore_errors=", "\n".join(line.partition("=")[2] for line in lines))
    variables = [path for pattern in named for path in _matching(system, pattern)]
    files = [values.get("FragmentPath", ""), *values.get("DropInPaths", "").split(), *variables]
    return Unit(
        name=name,
        loaded=values.get("LoadState", "loaded" if start else "") == "loaded",
        binary=binary.group(1) if binary else "",
        arguments=arguments[1:],
        files=tuple(file for file in files if file),
        active=values.get("ActiveState") == "active",
        pid=int(pid) if pid.isdigit() else 0,
        command=argv.group(1) if argv else "",
        variables=values.get("Environment", ""),
        environment_files=tuple(variables),
    )


def _matching(system: System, pattern: str) -> list[str]:
    """Return the files of an EnvironmentFile=, whose name may be a pattern."""
    folder, _slash, name = pattern.rpartition("/")
    if not re.search(r"[*?[]", name):
        return [pattern]
    hidden = name.startswith(".")
    matching = fnmatch.filter(system.names(folder or "/"), name)
    return [f"{folder}/{file}" for file in sorted(matching) if hidden or not file.startswith(".")]


def environment(system: System, where: Unit) -> dict[str, str]:
    """Return the environment of a unit's next start: its own variables, and those of its files, which override them.

    https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html#EnvironmentFile=
    """
    variables = dict(word.split("=", 1) for word in _words(where.variables) if "=" in word)
    for path in where.environment_files:
        text = re.sub(r"\\\n", "", system.read(path) or "")
        for line in text.splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and name[:1] not in ("#", ";"):
                value = value.strip()
                variables[name.strip()] = "".join(_words(value)) if value[:1] in ("'", '"') else value
    return variables


def next_arguments(where: Unit, variables: t.Mapping[str, str]) -> list[str]:
    """Return the arguments of a unit's next start, without the program.

    A variable that is a word of its own becomes the words of its value, as systemd does it. Some daemons hide their
    arguments behind a title, so the process can't be asked.
    """
    words: list[str] = []
    for word in _words(where.command)[1:]:
        if re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", word):
            words += _words(variables.get(word[1:], ""))
        else:
            words.append(_VARIABLE.sub(lambda name: variables.get(name.group(1), ""), word))
    return words


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        # A quote that isn't one.
        return text.split()


def command_line(system: System, pid: int) -> tuple[str, ...]:
    """Return the arguments of a process, the program's name first; empty if it does not exist."""
    text = system.read(f"/proc/{pid}/cmdline") or ""
    return tuple(text.split("\0")[:-1]) if text else ()


def naming(system: System, where: Unit, word: str) -> str:
    """Return the file of a unit that contains a word, for a message; the last one, which takes effect."""
    having = [path for path in where.files if word in (system.read(path) or "")]
    return having[-1] if having else f"the command line of {where.name}"


def stale(system: System, pid: int, paths: t.Sequence[str]) -> bool:
    """Return whether a file was changed after the process had started."""
    return changed_since_start(system, pid, paths, STALE_AFTER_SECONDS) is True


def changed_since_start(system: System, pid: int, paths: t.Sequence[str], tolerance: float = 0.0) -> bool | None:
    """Return whether one of these files was changed since a process started.

    :param paths: those that don't exist are left out.
    :param tolerance: seconds after the start in which a change doesn't count.
    :returns: None where that is unknown: there is no such process or file, or none was changed since and the change of
        one is in the future, as after the clock was set back.
    """
    # The clock before the uptime: the time between both makes the process older.
    before, age = _clock(system), process_age(system, pid)
    changes = changed_at(system, paths)
    now = _clock(system)
    if before is None or age is None or now is None or not changes:
        return None
    started = before - age
    if any(started + tolerance <= changed <= now for changed in changes):
        return True
    return None if any(changed > now for changed in changes) else False


def changed_at(system: System, paths: t.Sequence[str]) -> list[float]:
    """Return when each of these files that exists was last changed, in seconds since 1970.

    That is the ctime, which only the kernel sets: dpkg and ``cp -p`` give new files an old time of modification.
    """
    if not paths:
        return []
    done = system.run(["stat", "-L", "-c", "%.6Z", *paths])
    try:
        return [float(line) for line in done.out.split()]
    except ValueError:
        return []


def _clock(system: System) -> float | None:
    try:
        return float(system.run(["date", "+%s.%N"]).out)
    except ValueError:
        return None


def process_age(system: System, pid: int) -> float | None:
    """Return the age of a process in seconds; None if it does not exist."""
    stat = system.read(f"/proc/{pid}/stat")
    uptime = system.read("/proc/uptime")
    if not stat or not uptime:
        return None
    # The name in parentheses may contain blanks; field 22 counts hundredths of a second since boot on every Linux.
    fields = stat.rpartition(")")[2].split()
    return float(uptime.split()[0]) - int(fields[19]) / 100


def reason_of(output: str, otherwise: str) -> str:
    """Return the line with the reason: that of a panic, else the first one that isn't a harmless log line.

    :param output: of the failed program.
    :param otherwise: returned where it printed nothing.
    """
    lines = []
    for line in output.splitlines():
        if _BEHIND.match(line):
            break
        if line.strip():
            lines.append(line.strip())
    panic = next((line for line in lines if _PANIC.match(line)), "")
    failed = next((line for line in lines if not _HARMLESS.search(line)), "")
    return panic or failed or (lines[-1] if lines else otherwise)
