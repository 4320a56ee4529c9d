# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the sections ``rpm`` and ``packages``: one rpm command, and files for the rest."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.digest import digest
from .._core.errors import ShareError
from .._host.system import System
from .paths import MANAGERS, MARK, RPM_KEY_MARK, RPM_KEYS, Manager, install_only
from .rpm_locks import Lock
from .rpm_version import newest
from .types import InstalledPackage, RpmRepository, RpmState

QUERY = (
    "rpm",
    "-qa",
    "--qf",
    "%{NAME}\\t%|EPOCH?{%{EPOCH}}:{0}|\\t%{VERSION}-%{RELEASE}\\t%{ARCH}\\t%{INSTALLTIME}\\t%{VENDOR}\\n",
)
DATABASES = ("/var/lib/rpm", "/usr/lib/sysimage/rpm")
DATABASE_FILES = ("rpmdb.sqlite", "Packages", "Packages.db")
MODULES = "/etc/dnf/modules.d"
UNKNOWN = "(none)"


class Installed(t.NamedTuple):
    """One row of rpm's list."""

    name: str
    version: str
    arch: str
    time: int
    vendor: str


Packages = dict[str, InstalledPackage]


def observe(system: System) -> tuple[RpmState | None, Packages]:
    """Return the section ``rpm`` (None on a node without rpm, dnf or zypper) and all installed packages.

    :raises ShareError: rpm can't list its packages.
    """
    manager = manager_of(system)
    if manager is None:
        return None, {}
    done = system.run(QUERY, timeout=60)
    if done.rc != 0:
        raise ShareError(f"rpm can't list the packages: {done.err.strip() or done.rc}")
    rows = parse_query(done.out)
    lock_plugin, lock_path = _lock_plugin(system, manager)
    locks = manager.locks.parse(system.read(lock_path) or "")
    files = [f"{manager.repositories}/{name}" for name in system.names(manager.repositories) if name.endswith(".repo")]
    keys = [f"{RPM_KEYS}/{name}" for name in system.names(RPM_KEYS) if name.startswith(RPM_KEY_MARK)]
    texts = {path: system.read(path) or "" for path in files}
    return {
        "manager": manager.name,
        "files": {path: text for path, text in texts.items() if posixpath.basename(path).startswith(MARK)},
        "keys": {path: digest(system.read(path) or "") for path in keys},
        "imported": sorted(row.version for row in rows if row.name == "gpg-pubkey"),
        "repositories": [one for path, text in texts.items() for one in parse_repositories(path, text)],
        "lock_path": lock_path,
        "lock_plugin": lock_plugin,
        "locks": [lock.json() for lock in locks],
        "streams": _streams(system) if manager.streams else {},
        "duplicates": duplicates(rows),
    }, packages_of(rows, locks)


def manager_of(system: System) -> Manager | None:
    """Return the package manager that works with this machine's rpm; None where there is none that is supported."""
    if not any(name in DATABASE_FILES for folder in DATABASES for name in system.names(folder)):
        return None
    if system.exists("/usr/bin/zypper"):
        return MANAGERS["zypper"]
    if system.exists("/usr/bin/dnf"):
        # Where dnf 5 is the default, dnf is a link to it.
        return MANAGERS["dnf5" if (system.link("/usr/bin/dnf") or "").endswith("dnf5") else "dnf"]
    return MANAGERS["dnf5"] if system.exists("/usr/bin/dnf5") else None


def parse_query(text: str) -> list[Installed]:
    rows = []
    for line in text.splitlines():
        name, epoch, version, arch, time, vendor = (line.split("\t", 5) + [""] * 6)[:6]
        if version:
            whole = version if epoch in ("0", UNKNOWN, "") else f"{epoch}:{version}"
            moment = int(time) if time.isdigit() else 0
            rows.append(Installed(name, whole, arch, moment, "" if vendor == UNKNOWN else vendor))
    return rows


def packages_of(rows: t.Iterable[Installed], locks: t.Sequence[Lock]) -> Packages:
    """Return the packages by name; the newest where several versions are installed, which is usual for kernels."""
    found: dict[str, dict[str, Installed]] = {}
    for row in rows:
        if row.name != "gpg-pubkey":
            found.setdefault(row.name, {})[row.version] = row
    packages: Packages = {}
    for name, by_number in found.items():
        versions = newest(by_number)
        packages[name] = {
            "version": versions[0],
            "held": any(lock.keeps(name, versions[0]) for lock in locks),
            "origin": by_number[versions[0]].vendor,
        }
        if len(versions) > 1:
            packages[name]["versions"] = versions
    return packages


def duplicates(rows: t.Iterable[Installed]) -> list[str]:
    """Return packages that a killed transaction left in two versions of which rpm keeps one."""
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        if not install_only(row.name):
            seen[row.name, row.arch] = seen.get((row.name, row.arch), 0) + 1
    return sorted({name for (name, _arch), count in seen.items() if count > 1})


def parse_repositories(path: str, text: str) -> t.Iterator[RpmRepository]:
    """Yield the repositories of a .repo file (dnf.conf(5), "Repo options")."""
    for found in re.finditer(r"^\[([^\]\n]+)\][^\n]*\n?((?:(?!\[)[^\n]*\n?)*)", text, re.MULTILINE):
        fields = {}
        for line in found.group(2).splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith(("#", ";")):
                fields[key.strip().lower()] = value.strip()
        if found.group(1) != "main":
            yield {
                "file": path,
                "id": found.group(1),
                "url": next((fields[key] for key in ("baseurl", "metalink", "mirrorlist") if fields.get(key)), ""),
                "enabled": fields.get("enabled", "1").lower() in ("1", "yes", "true", "on"),
            }


def _lock_plugin(system: System, manager: Manager) -> tuple[str, str]:
    """Return the state of the lock plugin (``enabled``, ``disabled``, or empty: missing), and the path of the locks."""
    if not manager.lock_plugin:
        return "enabled", manager.lock_path
    text = system.read(manager.lock_plugin_file)
    if text is None:
        return "", manager.lock_path
    settings = dict(re.findall(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
    state = "disabled" if settings.get("enabled", "1").lower() in ("0", "no", "false", "off") else "enabled"
    return state, re.sub(r"^file:(//)?", "", settings.get("locklist", "")) or manager.lock_path


def emptied_module_file(system: System, module: str) -> str:
    """Return the file that dnf leaves of a module that is reset; empty where there is none, or it has a state."""
    path = f"{MODULES}/{module}.module"
    text = system.read(path)
    return "" if text is None or re.search(r"^[ \t]*state[ \t]*=[ \t]*\S", text, re.MULTILINE) else path


def _streams(system: System) -> dict[str, str]:
    """Return the enabled streams, by module."""
    found = {}
    for name in system.names(MODULES):
        if name.endswith(".module"):
            text = system.read(f"{MODULES}/{name}") or ""
            for block in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
                fields = dict(re.findall(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
                if fields.get("state") == "enabled" and fields.get("stream"):
                    found[fields.get("name") or block.partition("]")[0]] = fields["stream"]
    return found
