# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collect the sections ``packages``, ``apt`` and ``rpm`` of ``gpu_node``."""

from __future__ import annotations

import posixpath
import re
import typing as t

from .._core.digest import digest
from .._core.errors import ShareError
from .._host.system import System
from .names import matches_any
from .paths import (
    APT_CONFIGURATION,
    APT_KEYRINGS,
    APT_PREFERENCES,
    APT_SOURCES,
    MANAGERS,
    MARK,
    RPM_KEY_MARK,
    RPM_KEYS,
    Manager,
    install_only,
)
from .rpm_locks import Lock, newest
from .types import AptSource, AptState, InstalledPackage, PackageFacts, RpmRepository, RpmState

DPKG_QUERY = (
    "dpkg-query",
    "-W",
    "-f",
    "${db:Status-Abbrev}\\t${Package}\\t${Version}\\t${Architecture}\\t${Maintainer}\\n",
)
STATUS = "/var/lib/dpkg/status"
JOURNAL = "/var/lib/dpkg/updates"


Packages = dict[str, InstalledPackage]


def observe_apt(system: System, native: str) -> tuple[AptState | None, Packages]:
    """Return the section ``apt`` (None on a node without dpkg) and all installed packages.

    :param native: dpkg's name of the machine's own architecture; packages of others are left out.
    :raises ShareError: dpkg can't list its packages.
    """
    if not system.exists(STATUS):
        return None, {}
    done = system.run(DPKG_QUERY, timeout=30)
    if done.rc != 0:
        raise ShareError(f"dpkg-query can't list the packages: {done.err.strip() or done.rc}")
    packages, unfinished, triggers = parse_dpkg(done.out, native)
    return {
        "files": {
            path: system.read(path) or ""
            for folder in (APT_SOURCES, APT_PREFERENCES, APT_CONFIGURATION)
            for path in _files(system, folder)
            if MARK in path
        },
        "keys": {path: digest(system.read(path) or "") for path in _files(system, APT_KEYRINGS) if MARK in path},
        "sources": _foreign_sources(system),
        # The journal contains what a killed dpkg hasn't written into its database.
        "interrupted": triggers or bool(system.names(JOURNAL)),
        "unfinished": unfinished,
    }, packages


def parse_dpkg(text: str, native: str) -> tuple[Packages, list[str], bool]:
    """Parse dpkg-query's rows.

    :returns: the installed packages; the names of those unpacked or configured in part; whether triggers are pending.
    """
    packages: Packages = {}
    unfinished = []
    triggers = False
    for line in text.splitlines():
        status, name, version, architecture, maintainer = ([*line.split("\t", 4), "", "", ""])[:5]
        if not status or architecture not in (native, "all"):
            continue
        # First letter: the desired state (h is hold). Second: the state (W and t wait for triggers, and work).
        if status[1] in "iWt":
            packages[name] = {"version": version, "held": status[0] == "h", "origin": maintainer}
            triggers = triggers or status[1] != "i"
        elif status[1] in "HUF":
            unfinished.append(name)
    return packages, sorted(unfinished), triggers


def _files(system: System, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in system.names(folder)]


def _foreign_sources(system: System) -> list[AptSource]:
    """Return every repository of a list that this collection didn't write."""
    sources: list[AptSource] = []
    for path in ["/etc/apt/sources.list", *_files(system, APT_SOURCES)]:
        text = system.read(path) if MARK not in path else None
        if text and path.endswith(".list"):
            sources += parse_list(path, text)
        elif text and path.endswith(".sources"):
            sources += parse_deb822(path, text)
    return sources


def parse_list(path: str, text: str) -> t.Iterator[AptSource]:
    """Yield the repositories of one-line entries (sources.list(5))."""
    for line in text.splitlines():
        match = re.match(r"\s*deb\s+(?:\[([^\]]*)\]\s*)?(\S+)\s+(\S+)", line)
        if match:
            options = dict(word.split("=", 1) for word in (match.group(1) or "").split() if "=" in word)
            signed_by = options.get("signed-by", "")
            yield {"file": path, "url": match.group(2), "suite": match.group(3), "signed_by": signed_by}


def parse_deb822(path: str, text: str) -> t.Iterator[AptSource]:
    """Yield the repositories of deb822 stanzas (sources.list(5))."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for stanza in re.split(r"\n\s*\n", "\n".join(lines)):
        fields: dict[str, str] = {}
        last = ""
        for line in stanza.splitlines():
            if line[:1] in " \t" and last:
                fields[last] += "\n" + line.strip()
            elif ":" in line:
                last, value = line.split(":", 1)
                last = last.strip().lower()
                fields[last] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        for url in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                signed_by = fields.get("signed-by", "").strip()
                yield {"file": path, "url": url, "suite": suite, "signed_by": signed_by}


RPM_QUERY = (
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


def observe_rpm(system: System) -> tuple[RpmState | None, Packages]:
    """Return the section ``rpm`` (None on a node without rpm, dnf or zypper) and all installed packages.

    :raises ShareError: rpm can't list its packages.
    """
    manager = manager_of(system)
    if manager is None:
        return None, {}
    done = system.run(RPM_QUERY, timeout=60)
    if done.rc != 0:
        raise ShareError(f"rpm can't list the packages: {done.err.strip() or done.rc}")
    rows = parse_rpm(done.out)
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
        "repositories": [repository for path, text in texts.items() for repository in parse_repositories(path, text)],
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


def parse_rpm(text: str) -> list[Installed]:
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
    by_name: dict[str, dict[str, Installed]] = {}
    for row in rows:
        if row.name != "gpg-pubkey":
            by_name.setdefault(row.name, {})[row.version] = row
    packages: Packages = {}
    for name, by_number in by_name.items():
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
    for match in re.finditer(r"^\[([^\]\n]+)\][^\n]*\n?((?:(?!\[)[^\n]*\n?)*)", text, re.MULTILINE):
        fields = {}
        for line in match.group(2).splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.lstrip().startswith(("#", ";")):
                fields[key.strip().lower()] = value.strip()
        if match.group(1) != "main":
            yield {
                "file": path,
                "id": match.group(1),
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
    streams = {}
    for name in system.names(MODULES):
        if name.endswith(".module"):
            text = system.read(f"{MODULES}/{name}") or ""
            for block in re.split(r"^\[", text, flags=re.MULTILINE)[1:]:
                fields = dict(re.findall(r"^[ \t]*(\w+)[ \t]*=[ \t]*(.*?)[ \t]*$", block, re.MULTILINE))
                if fields.get("state") == "enabled" and fields.get("stream"):
                    streams[fields.get("name") or block.partition("]")[0]] = fields["stream"]
    return streams


# gpu_node lists these of the several hundred packages.
REPORTED = (
    "*nvidia*",
    "*cuda*",
    "*nvlsm*",
    "*libnvsdm*",
    "infiniband-diags",
    "linux-headers-*",
    "linux-image-*",
    "proxmox-*",
    "pve-headers*",
    "pve-kernel-*",
    "kernel*-devel*",
    "kernel-headers*",
    "kernel-syms*",
    "dkms",
)
RPM_FAMILIES = ("redhat", "suse")


def observe(system: System, family: str, native: str) -> PackageFacts:
    """Return the sections ``apt``, ``rpm`` and all ``packages``.

    :param family: the distribution's family, whose own database counts: tools of the other may be installed beside it.
    :param native: dpkg's name of the machine's architecture.
    """
    if family in RPM_FAMILIES or not system.exists(STATUS):
        section, packages = observe_rpm(system)
        if section is not None:
            return {"apt": None, "rpm": section, "packages": packages}
    apt_section, packages = observe_apt(system, native)
    return {"apt": apt_section, "rpm": None, "packages": packages}


def reported(packages: t.Mapping[str, InstalledPackage], patterns: t.Sequence[str]) -> dict[str, InstalledPackage]:
    """Return the packages that ``gpu_node`` lists.

    :param patterns: of further package names.
    """
    wanted = (*REPORTED, *patterns)
    return {name: package for name, package in packages.items() if matches_any(name, wanted)}
