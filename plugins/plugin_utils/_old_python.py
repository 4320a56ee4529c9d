# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What to say of a node whose Python is too old for ansible-core, or that has none. Pure."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._node_info_host import FAMILIES, os_release

Version = tuple[int, ...]

# Every name that a newer interpreter may have, the newest first.
NAMES = tuple(f"python3.{minor}" for minor in range(14, 8, -1))
VAULT = " (in the software collections of CentOS' vault)"


@dataclasses.dataclass(frozen=True)
class Package:
    """The newest Python that a distribution has for its users.

    :param install: the command that installs it.
    :param interpreter: where it is then.
    :param version: what it is at least.
    :param note: what to know of it, in parentheses.
    """

    name: str
    install: str
    interpreter: str
    version: Version
    note: str = ""


# By the distribution's id or family and its version's first number; None is any version.
PACKAGES: t.Mapping[tuple[str, int | None], Package] = {
    ("amzn", 2): Package("python3.8", "amazon-linux-extras install python3.8", "/usr/bin/python3.8", (3, 8)),
    ("amzn", None): Package("python3", "dnf install python3", "/usr/bin/python3", (3, 9)),
    ("ubuntu", 18): Package("python3.8", "apt-get install python3.8", "/usr/bin/python3.8", (3, 8), " (in universe)"),
    ("ubuntu", 20): Package("python3.9", "apt-get install python3.9", "/usr/bin/python3.9", (3, 9), " (in universe)"),
    ("redhat", 7): Package(
        "rh-python38", "yum install rh-python38", "/opt/rh/rh-python38/root/usr/bin/python3", (3, 8), VAULT
    ),
    ("redhat", 8): Package(
        "python3.12", "dnf install python3.12", "/usr/bin/python3.12", (3, 12), " (before release 8.10 it is python39)"
    ),
    ("redhat", None): Package("python3", "dnf install python3", "/usr/bin/python3", (3, 9)),
    ("suse", 15): Package("python311", "zypper install python311", "/usr/bin/python3.11", (3, 11)),
    ("suse", None): Package("python3", "zypper install python3", "/usr/bin/python3", (3, 11)),
    ("debian", None): Package("python3", "apt-get install python3", "/usr/bin/python3", (3, 9)),
}
# The last ansible-core that can use a Python on a node, for those above that newer ones have left behind.
LAST_CORE: t.Mapping[Version, str] = {(3, 8): "2.19"}


@dataclasses.dataclass(frozen=True)
class Node:
    """What a shell on the node tells.

    :param version: of the interpreter that was tried, in its own words; empty where there is none.
    :param newer: an interpreter that would do and is there already; empty where there is none.
    """

    name: str
    id: str
    family: str
    major: int
    version: str
    newer: str


def question(interpreter: str) -> str:
    """The shell command that asks a node what ``node`` reads; a POSIX shell is all it needs."""
    # The interpreter may be a command with a blank in it, and is then none that could be asked.
    asked = interpreter if re.fullmatch(r"[\w./+-]+", interpreter) else "python3"
    look = " ".join(f"command -v {name};" for name in NAMES)
    release = "cat /etc/os-release || cat /usr/lib/os-release"
    return f"echo VERSION; {asked} -V 2>&1; echo NEWER; {look} echo RELEASE; {release}"


def node(answer: str) -> Node:
    """What the node answered."""
    parts = re.match(r".*?^VERSION\s*$(.*)^NEWER\s*$(.*)^RELEASE\s*$(.*)", answer, re.MULTILINE | re.DOTALL)
    version, newer, release = parts.groups() if parts else ("", "", "")
    fields = os_release(release)
    words = [fields.get("ID", ""), *fields.get("ID_LIKE", "").split()]
    told = re.search(r"^Python (\d+(?:\.\d+)+)", version, re.MULTILINE)
    major = re.match(r"\d+", fields.get("VERSION_ID", ""))
    return Node(
        name=fields.get("PRETTY_NAME", ""),
        id=words[0],
        family=next((FAMILIES[word] for word in words if word in FAMILIES), ""),
        major=int(major.group()) if major else 0,
        version=told.group(1) if told else "",
        newer=next((line for line in newer.split() if line.startswith("/")), ""),
    )


def numbers(version: str) -> Version:
    """A version in its own words as numbers."""
    return tuple(int(part) for part in version.split(".") if part)


def sentence(host: str, interpreter: str, seen: Node, least: Version, core: str) -> str:
    """What is wrong with the host's Python and how to mend it.

    :param least: the oldest Python that this ansible-core can use on a node.
    :param core: ansible-core's version.
    """
    where = f"Host {host}" + (f" ({seen.name})" if seen.name else "")
    wanted = ".".join(str(part) for part in least)
    fault = f"{interpreter} is Python {seen.version}" if seen.version else f"there is no {interpreter}"
    start = f"{where}: {fault}, and ansible-core {core} needs Python {wanted} or newer on the node"
    keys = [(name, major) for name in (seen.id, seen.family) for major in (seen.major, None)]
    package = next((PACKAGES[key] for key in keys if key in PACKAGES), None)
    if seen.newer:
        return f"{start}; {seen.newer} is there already: set ansible_python_interpreter to it for this host."
    if package is None:
        return f"{start}; install one and set ansible_python_interpreter to it for this host."
    mend = (
        f"{start}; install {package.name}{package.note} there by '{package.install}' and set ansible_python_interpreter"
        f" to {package.interpreter} for this host"
    )
    if package.version >= least:
        return f"{mend}."
    return f"{mend}, and run this with ansible-core {LAST_CORE[package.version]}, the last that can use it."
