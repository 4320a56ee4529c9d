# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Choose the flavour of the kernel module, and compare what is wanted with the node's package lists. Pure.

By NVIDIA's matrix of drivers and architectures, and the chapter on kernel modules of its driver installation guide.

A node knows its distribution's packages, and those of NVIDIA's repository only where it has that already. So a missing
version is reported where the lists have the repository that it would come from, and nothing is said where they don't.
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from .._core.natural import natural
from .._core.types import JsonObject
from .._packages.names import DRIVER, matches_any
from .._packages.rpm_locks import matches
from .catalog import FLAVOURS, MACHINES, Catalog, DriverOptions
from .types import Headers, ListFinding, NodeFacts

OPEN, PROPRIETARY = "open", "proprietary"
FLAVOUR_OPTIONS = ("auto", OPEN, PROPRIETARY)
UNKNOWN = "unknown"

# The first and the last branch that supports an architecture.
BRANCHES: dict[str, tuple[int, int | None]] = {
    "kepler": (0, 470),
    "maxwell": (0, 580),
    "pascal": (0, 580),
    "volta": (0, 580),
    "turing": (410, None),
    "ampere": (450, None),
    "ada": (520, None),
    "hopper": (520, None),
    "blackwell": (570, None),
}
# The open module needs the GSP, which came with Turing.
PROPRIETARY_ONLY = ("kepler", "maxwell", "pascal", "volta")
OPEN_ONLY = ("blackwell",)
OPEN_SINCE = 515
# Since this branch there is no proprietary module.
OPEN_FOREVER = 620


@dataclasses.dataclass(frozen=True)
class Cards:
    """The cards' architectures, the machine's (amd64, arm64) and the driver's version.

    :param host: its name in messages.
    """

    host: str
    generations: tuple[str, ...]
    arch: str
    version: str

    @property
    def branch(self) -> int:
        return int(self.version.split(".")[0])

    @property
    def before_turing(self) -> tuple[str, ...]:
        return tuple(generation for generation in self.generations if generation in PROPRIETARY_ONLY)

    @property
    def open_only(self) -> tuple[str, ...]:
        """Blackwell; and Hopper where the processor is Grace."""
        grace = "hopper" if self.arch == "arm64" else ""
        return tuple(generation for generation in self.generations if generation in (*OPEN_ONLY, grace))


def refused_branches(cards: Cards) -> list[str]:
    """Return why the version's branch doesn't support these cards."""
    sentences = []
    for generation in cards.generations:
        first, last = BRANCHES.get(generation, (0, None))
        start = f"driver_version is {cards.version}, and cards of {listed([generation])} (host {cards.host}) "
        if cards.branch < first:
            sentences.append(f"{start}need branch {first} or later.")
        elif last and cards.branch > last:
            sentences.append(f"{start}are supported up to branch {last}: set driver_version to one of {last}.")
    return sentences


def branches(generations: t.Iterable[str]) -> tuple[int, int | None]:
    """Return the first and the last branch that support all of these cards; None where no last one is known."""
    bounds = [BRANCHES.get(generation, (0, None)) for generation in generations]
    lasts = [last for _first, last in bounds if last]
    return max((first for first, _last in bounds), default=0), min(lasts) if lasts else None


def choose(asked: str, cards: Cards, has: t.Callable[[str], bool]) -> tuple[str, str, str]:
    """Choose the module's flavour.

    :param asked: one of ``FLAVOURS``.
    :param has: whether the source of packages has a flavour at this branch.
    :returns: the flavour; the message of a refusal, or ""; the message of a warning, or "".
    """
    old, new = cards.before_turing, cards.open_only
    if old and new:
        why = (
            f"Host {cards.host} has cards of {listed(old)}, which need the proprietary module, and of "
            f"{listed(new)}, which need the open one: no driver supports both."
        )
        return PROPRIETARY, why, ""
    if asked == "auto":
        return _automatic(cards, has)
    return asked, _misfit(asked, cards, has), ""


def _automatic(cards: Cards, has: t.Callable[[str], bool]) -> tuple[str, str, str]:
    if cards.before_turing:
        return PROPRIETARY, _lacking(PROPRIETARY, cards, has), ""
    if cards.open_only:
        return OPEN, _lacking(OPEN, cards, has), ""
    if cards.branch < OPEN_SINCE:
        return PROPRIETARY, "", ""
    if not has(OPEN):
        note = f"Host {cards.host} gets the proprietary module, because there are no packages of the open one."
        return PROPRIETARY, _lacking(PROPRIETARY, cards, has), note
    note = ""
    if UNKNOWN in cards.generations:
        note = (
            f"Host {cards.host} has cards of an unknown architecture: it gets the open module, which doesn't support "
            "cards before Turing; driver_flavour chooses another one."
        )
    return OPEN, "", note


def _lacking(flavour: str, cards: Cards, has: t.Callable[[str], bool]) -> str:
    if has(flavour):
        return ""
    return f"Host {cards.host} has cards that need the {flavour} module, and driver_source has no packages of it."


def _misfit(asked: str, cards: Cards, has: t.Callable[[str], bool]) -> str:
    why = ""
    if asked == OPEN and cards.before_turing:
        why = f"cards of {listed(cards.before_turing)} need the proprietary module"
    elif asked == OPEN and cards.branch < OPEN_SINCE:
        why = f"the open module exists from branch {OPEN_SINCE} on, and driver_version is {cards.version}"
    elif asked == PROPRIETARY and cards.open_only:
        why = f"cards of {listed(cards.open_only)} need the open module"
    elif asked == PROPRIETARY and cards.branch >= OPEN_FOREVER:
        why = f"branch {OPEN_FOREVER} and later have no proprietary module, and driver_version is {cards.version}"
    elif not has(asked):
        why = "driver_source has no packages of it"
    return f"driver_flavour is {asked} and doesn't fit host {cards.host}: {why}." if why else ""


def listed(generations: t.Sequence[str]) -> str:
    """Return architectures for a message."""
    return " and ".join(generation.capitalize() for generation in generations)


# Id and description of what the lists show.
IDS: dict[str, str] = {
    "driver-version-missing": "The machine's package lists have no packages of driver_version for it.",
    "kernel-package-missing": "The machine's package lists have no headers or compiled module for one of its kernels.",
    "package-lists-old": "The machine's package lists are older than a week, and lack packages of the driver.",
    "package-lists-unknown": "The machine's package lists are empty or can't be read: what there is isn't known.",
}
PROBLEM, WARNING, NOTE = "problem", "warning", "note"
# Lists that are older don't show what there is.
OLD_HOURS = 7 * 24
CUDA = re.compile(r"/compute/cuda/repos/")
# Part of the id of this collection's own repository file.
OURS = "kubegpu-cuda"
VERSION = re.compile(r"(?:[0-9]+:)?([0-9]{3}(?:[.][0-9]+){1,2})[-_~+].*")
# The kernel's release in a version of Ubuntu's packages for kernels.
RELEASE = re.compile(r"([0-9]+[.][0-9]+[.][0-9]+)[.-]([0-9]+)")
# Versions that a message names.
MOST = 8
# Versions that are looked at, the newest first: no repository has as many, and each takes its time.
MOST_VERSIONS = 1000


def findings(
    gpu_node: NodeFacts,
    data: JsonObject,
    options: DriverOptions,
    flavour: str,
    packages: t.Sequence[str],
    headers: t.Sequence[Headers],
) -> list[ListFinding]:
    """Return what prevents the installation according to the node's lists.

    :param data: the catalogue of the node's distribution.
    :param flavour: of the kernel module, as it was chosen.
    :param packages: that would be installed, each ``name`` or ``name=version``.
    :param headers: the packages of headers that would be installed.
    """
    lists = gpu_node.get("package_lists")
    if lists is None or options.source not in ("repository", "distribution"):
        return []
    if lists["error"] or not lists["packages"]:
        why = f"can't be read ({lists['error']})" if lists["error"] else "are empty"
        reason = f"has package lists that {why}: whether they have driver {options.version} isn't known"
        return [
            _finding("package-lists-unknown", NOTE, reason, "role driver downloads them before it installs", why=why)
        ]
    asked = _Lists(gpu_node, data, options, packages)
    missing = [*asked.of_driver(flavour), *asked.of_kernels(flavour, headers)]
    age = lists["age_hours"]
    if missing and age is not None and age > OLD_HOURS:
        days = int(age // 24)
        reason = f"has package lists that are {days} days old; by these it " + "; it ".join(
            finding["found"] for finding in missing
        )
        remedy = "download them ('apt-get update', 'dnf makecache' or 'zypper refresh') and run preflight again"
        names = [name for finding in missing for name in finding["packages"]]
        return [_finding("package-lists-old", WARNING, reason, remedy, packages=names, days=days)]
    return missing


def may_have(gpu_node: NodeFacts, packages: t.Iterable[str]) -> bool:
    """Return whether the lists have all of these packages, or weren't asked or say nothing."""
    lists = gpu_node.get("package_lists")
    return not (lists and lists["packages"]) or all(_has(lists["packages"], package) for package in packages)


def has_release(gpu_node: NodeFacts, package: str, kernel: str) -> bool:
    """Return whether the newest version of a metapackage that the lists have is of a kernel's release.

    :param kernel: version of the kernel's metapackage, such as 6.8.0-64.67 or 5.15.0.140.136.
    """
    lists = gpu_node.get("package_lists")
    versions = list(lists["packages"].get(package) or ()) if lists else []
    wanted, newest = (RELEASE.match(release) for release in (kernel, max(versions, key=natural, default="")))
    return bool(wanted and newest and wanted.groups() == newest.groups())


def _finding(id: str, severity: str, found: str, remedy: str, **fields: t.Any) -> ListFinding:
    given: JsonObject = {"packages": [], "versions": [], "kernels": [], **fields}
    return t.cast("ListFinding", {"id": id, "severity": severity, "found": found, "remedy": remedy, **given})


class _Lists:
    """The lists of one node, restricted to the repositories that the driver would come from."""

    def __init__(
        self, gpu_node: NodeFacts, data: JsonObject, options: DriverOptions, packages: t.Sequence[str]
    ) -> None:
        self._node, self._data, self._options = gpu_node, data, options
        lists = gpu_node.get("package_lists")
        self._all: t.Mapping[str, t.Mapping[str, t.Sequence[str]]] = lists["packages"] if lists else {}
        self._catalog = self._of(options.version)
        self._packages = packages
        self._fabric = bool(set(self._catalog.fabric(nvlink5=False)) & set(packages))
        self._url = self._catalog.url()
        rpm: t.Mapping[str, t.Any] = gpu_node.get("rpm") or {}
        self._urls = {
            repository["id"]: str(repository.get("url") or "") for repository in rpm.get("repositories") or ()
        }
        self._sources = {
            source for versions in self._all.values() for sources in versions.values() for source in sources
        }
        self._driver: dict[str, list[str]] = {}
        # By the driver's version, what has it.
        self._of_version: dict[str, dict[str, list[str]]] = {}
        for name, versions in self._all.items():
            for version, sources in versions.items():
                if any(self._counts(source) for source in sources):
                    self._driver.setdefault(name, []).append(version)
                    if match := VERSION.fullmatch(version):
                        self._of_version.setdefault(match.group(1), {}).setdefault(name, []).append(version)

    def _of(self, version: str) -> Catalog:
        return Catalog(self._node, self._data, dataclasses.replace(self._options, version=version))

    def _counts(self, source: str) -> bool:
        """Return whether the driver may come from a repository.

        :param source: its URL or, of rpm, its id.
        """
        if self._options.source == "repository":
            return self._is_ours(source)
        # On SUSE a part of it comes from NVIDIA's repository.
        return bool(self._url) or not (CUDA.search(self._urls.get(source, source)) or source.startswith(OURS))

    def _is_ours(self, source: str) -> bool:
        """Return whether a repository is the one that role driver writes into the node's sources."""
        url = self._plain(self._urls.get(source, source))
        return source.startswith(OURS) or (bool(self._url) and url.startswith(self._plain(self._url)))

    def _plain(self, url: str) -> str:
        """Return a URL without its scheme, with the architecture as NVIDIA names it."""
        distribution: t.Mapping[str, t.Any] = self._node.get("distribution") or {}
        machine = MACHINES.get(str(distribution.get("arch")), "")
        return re.sub(r"^https?://|/+$", "", url.replace("$basearch", machine).replace("/aarch64", "/sbsa"))

    def _lacking(self, packages: t.Iterable[str]) -> list[str]:
        missing = (package for package in packages if not _has(self._driver, package))
        return [package for package in missing if matches_any(_name(package), DRIVER)]

    def _has_all(self, version: str, packages: t.Iterable[str]) -> bool:
        """Return whether none of a version's packages is missing."""
        named = self._of_version[version]
        return all(
            _has(named if f"={version}" in package else self._driver, package)
            for package in packages
            if matches_any(_name(package), DRIVER)
        )

    def _versions(self, flavour: str) -> list[str]:
        """Return the versions of which the lists have every package for this node, the newest first."""
        newest = sorted(self._of_version, key=natural, reverse=True)[:MOST_VERSIONS]
        return [version for version in newest if self._whole(version, flavour)]

    def _whole(self, version: str, flavour: str) -> bool:
        catalog = self._of(version)
        has_flavour = catalog.row.get(flavour) or (catalog.row.get("per_kernel") or {}).get(flavour)
        # With the fabric manager where the machine needs it.
        fabric = catalog.fabric(nvlink5=False) if self._fabric else []
        return bool(has_flavour) and self._has_all(version, [*catalog.packages(flavour), *fabric])

    def _compiled(self) -> dict[str, str]:
        """Return the kernels of compiled modules that have packages for one kernel each, by the packages' names."""
        kernels = self._catalog.kernels()
        return {
            package: kernel for package in self._packages for kernel in kernels if _name(package).endswith(f"-{kernel}")
        }

    def of_driver(self, flavour: str) -> t.Iterator[ListFinding]:
        """Yield that the lists lack packages of the version, with the versions that they have."""
        if self._url and not any(self._is_ours(source) for source in self._sources):
            # The node doesn't have this repository yet, of which all or a part of the driver comes.
            return
        compiled = self._compiled()
        missing = self._lacking(package for package in self._packages if package not in compiled)
        if not missing:
            return
        there = self._versions(flavour)
        other = next(other_flavour for other_flavour in FLAVOURS if other_flavour != flavour)
        others = self._versions(other) if not self._options.packages else []
        names = [_name(package) for package in missing]
        version = self._options.version
        sentence = f"has no {', '.join(names)} of version {version} in its package lists"
        if there:
            sentence += f", which have {_listed(there)}"
            remedy = f"set driver_version to {self._nearest(there)}"
        elif version in others:
            sentence += f", which have its {other} module only"
            remedy = f"set driver_flavour to {other} where the cards allow it, or driver_source to another source"
        elif others:
            sentence += f", which have the {other} module only, of {_listed(others)}"
            remedy = "set driver_source to another source, or add a repository that has these packages"
        else:
            sentence += ", and no other version that is complete for this host"
            remedy = "enable the component or the repository that has them, or set driver_source to another source"
        yield _finding("driver-version-missing", PROBLEM, sentence, remedy, packages=names, versions=there)

    def _nearest(self, there: t.Sequence[str]) -> str:
        """Return the newest version of the wanted branch or, without one, of all."""
        branch = self._options.version.partition(".")[0]
        return next((version for version in there if version.partition(".")[0] == branch), there[0])

    def of_kernels(self, flavour: str, headers: t.Sequence[Headers]) -> t.Iterator[ListFinding]:
        """Yield the packages of headers and compiled modules that the lists lack for the node's kernels."""
        missing: dict[str, list[str]] = {}
        for row in headers:
            lacking = [name for name in row["packages"] if not _has(self._all, name)]
            if lacking:
                missing[row["kernel"]] = lacking
        modules = {name: kernel for name, kernel in self._compiled().items() if not _has(self._driver, name)}
        for name, kernel in modules.items():
            missing.setdefault(kernel, []).append(name)
        if not missing:
            return
        names = [_name(name) for lacking in missing.values() for name in lacking]
        there = self._versions(flavour) if modules else []
        kernels = list(missing)
        sentence = (
            f"has no {', '.join(names)} in its package lists, which the driver needs for kernel {', '.join(kernels)}"
        )
        remedy = "update the kernel to one that they are there for and boot it"
        if there:
            sentence += f"; for this kernel there is driver {_listed(there)}"
            remedy = f"set driver_version to {self._nearest(there)}, or {remedy}"
        elif modules:
            remedy += ", or set driver_source to repository, whose module is built on the host"
        fields = {"packages": names, "versions": there, "kernels": kernels}
        yield _finding("kernel-package-missing", PROBLEM, sentence, remedy, **fields)


def _name(package: str) -> str:
    return package.partition("=")[0]


def _has(lists: t.Mapping[str, t.Iterable[str]], package: str) -> bool:
    name, _equals, pattern = package.partition("=")
    return any(matches(pattern, version) for version in lists.get(name) or ())


def _listed(versions: t.Sequence[str]) -> str:
    return ", ".join(versions[:MOST]) + (", …" if len(versions) > MOST else "")
