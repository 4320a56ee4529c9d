# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The error message for a node whose Python is missing or too old, and the shell command that finds out. Pure."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ...module_utils._host.facts import FAMILIES, os_release

Version = tuple[int, ...]

# The oldest Python that this collection's modules run on.
FLOOR: Version = (3, 9)
# Names of interpreters that would do, the newest first.
NAMES = tuple(f"python3.{minor}" for minor in range(14, 8, -1))


@dataclasses.dataclass(frozen=True)
class Package:
    """The newest Python that a distribution offers.

    :param install: the command that installs it.
    :param interpreter: its path.
    :param version: at least this one.
    :param note: a remark in parentheses.
    """

    name: str
    install: str
    interpreter: str
    version: Version
    note: str = ""


# By the distribution's id or family and its major version (None: any). The value None: it has no such Python.
PACKAGES: t.Mapping[tuple[str, int | None], Package | None] = {
    ("amzn", 2): None,
    ("amzn", None): Package("python3", "dnf install python3", "/usr/bin/python3", (3, 9)),
    ("ubuntu", 18): None,
    ("ubuntu", 20): Package("python3.9", "apt-get install python3.9", "/usr/bin/python3.9", (3, 9), " (in universe)"),
    ("redhat", 7): None,
    ("redhat", 8): Package(
        "python3.12", "dnf install python3.12", "/usr/bin/python3.12", (3, 12), " (before release 8.10 it is python39)"
    ),
    ("redhat", None): Package("python3", "dnf install python3", "/usr/bin/python3", (3, 9)),
    ("suse", 15): Package("python311", "zypper install python311", "/usr/bin/python3.11", (3, 11)),
    ("suse", None): Package("python3", "zypper install python3", "/usr/bin/python3", (3, 11)),
    ("debian", None): Package("python3", "apt-get install python3", "/usr/bin/python3", (3, 9)),
}


@dataclasses.dataclass(frozen=True)
class Node:
    """A node as its shell reports it.

    :param version: of the interpreter that was tried; empty where there is none.
    :param newer: path of an interpreter that is new enough; empty where there is none.
    """

    name: str
    id: str
    family: str
    major: int
    version: str
    newer: str


def question(interpreter: str) -> str:
    """Return the command whose output ``node`` parses; it needs a POSIX shell only."""
    # An interpreter that is a command with arguments has no version of its own.
    asked = interpreter if re.fullmatch(r"[\w./+-]+", interpreter) else "python3"
    newer = " ".join(f"command -v {name};" for name in NAMES)
    release = "cat /etc/os-release || cat /usr/lib/os-release"
    return f"echo VERSION; {asked} -V 2>&1; echo NEWER; {newer} echo RELEASE; {release}"


def node(answer: str) -> Node:
    """Parse the output of the command of ``question``."""
    version, newer, release = _sections(answer)
    fields = os_release(release)
    words = [fields.get("ID", ""), *fields.get("ID_LIKE", "").split()]
    match = re.search(r"^Python (\d+(?:\.\d+)+)", version, re.MULTILINE)
    major = re.match(r"\d+", fields.get("VERSION_ID", ""))
    return Node(
        name=fields.get("PRETTY_NAME", ""),
        id=words[0],
        family=next((FAMILIES[word] for word in words if word in FAMILIES), ""),
        major=int(major.group()) if major else 0,
        version=match.group(1) if match else "",
        newer=next((line for line in newer.split() if line.startswith("/")), ""),
    )


def _sections(answer: str) -> tuple[str, str, str]:
    """Return what follows each heading of ``question``; empty texts unless all are there, in their order."""
    headings, sections = ["VERSION", "NEWER", "RELEASE"], list[list[str]]()
    for line in answer.splitlines():
        if headings and line.rstrip() == headings[0]:
            sections.append([])
            del headings[0]
        elif sections:
            sections[-1].append(line)
    version, newer, release = ("", "", "") if headings else ("\n".join(section) for section in sections)
    return version, newer, release


def numbers(version: str) -> Version:
    """Return a version's numbers."""
    return tuple(int(part) for part in version.split(".") if part)


def message(host: str, interpreter: str, seen: Node, least: Version, core: str) -> str:
    """Return what is wrong with the host's Python and what to do.

    :param interpreter: the one that Ansible tried.
    :param least: the oldest Python that modules of this collection run on under this ansible-core.
    :param core: ansible-core's version.
    """
    where = f"Host {host}" + (f" ({seen.name})" if seen.name else "")
    wanted = ".".join(str(part) for part in least)
    fault = f"{interpreter} is Python {seen.version}" if seen.version else f"there is no {interpreter}"
    start = f"{where}: {fault}, and this collection with ansible-core {core} needs Python {wanted} or newer on the node"
    keys = [(name, major) for name in (seen.id, seen.family) for major in (seen.major, None)]
    known = next((key for key in keys if key in PACKAGES), None)
    package = PACKAGES[known] if known else None
    if seen.newer:
        return f"{start}; {seen.newer} is there already: set ansible_python_interpreter to it for this host."
    if package is None or package.version < least:
        missing = ", which its distribution doesn't offer" if known else ""
        return f"{start}{missing}; install one and set ansible_python_interpreter to it for this host."
    return (
        f"{start}; install {package.name}{package.note} there by '{package.install}' and set ansible_python_interpreter"
        f" to {package.interpreter} for this host."
    )
