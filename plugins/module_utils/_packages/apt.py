# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plan a package set with apt.

A set (``name``) owns these files of a node and no others:

* ``/etc/apt/sources.list.d/kubegpu-<repository>.sources`` and ``/etc/apt/keyrings/kubegpu-<repository>.asc``
* ``/etc/apt/preferences.d/kubegpu-<set>.pref``
* ``/etc/apt/apt.conf.d/90kubegpu-<set>``
"""

from __future__ import annotations

import fnmatch
import re
import typing as t

from .._core.errors import BadInput
from .._core.plan import Change
from .names import described
from .options import PackageSet, Repository
from .paths import APT_CONFIGURATION, APT_KEYRINGS, APT_PREFERENCES, APT_SOURCES, MARK
from .plan import KEY_ORIGIN, WRITTEN_BY, Planner, Release, SetPackage, set_package
from .steps import FinishInterrupted, RemovePackage
from .types import AptState, InstalledPackage

DISABLED = "Enabled: no\n"


class AptPlanner(Planner):
    """Plans one package set with apt."""

    key_directory = APT_KEYRINGS
    remove_command = "apt-get purge"

    def __init__(self, spec: PackageSet, apt: AptState, packages: t.Mapping[str, InstalledPackage]) -> None:
        super().__init__(spec, packages, apt["files"], apt["keys"])
        self._apt = apt

    def validate(self) -> None:
        for repository in self.spec.repositories:
            _check_repository(repository)
        for package in self.spec.packages:
            if not re.fullmatch(r"[a-z0-9][a-z0-9+.-]+(=[0-9A-Za-z.+:~-]+\*?)?", str(package)):
                raise BadInput(f"packages: {str(package)!r} is neither a package name nor name=version")
        if self.spec.streams:
            raise BadInput("streams: apt has no module streams")
        if self.spec.present:
            self._refuse_other_keys()

    def _refuse_other_keys(self) -> None:
        """Refuse a repository that a list of the user names with another key: apt then reads no list at all."""
        for repository in self.spec.repositories:
            for source in self._apt["sources"]:
                same = source["url"].rstrip("/") == repository.url.rstrip("/") and source["suite"] in repository.suites
                if same and source["signed_by"] != self.key_path(repository):
                    raise BadInput(
                        f"{source['file']} names {source['url']} {source['suite']} with "
                        + (f"Signed-By {source['signed_by']}" if source["signed_by"] else "no Signed-By")
                        + f", which apt refuses beside repository {repository.name}: "
                        "remove that entry, or leave the repository out and use that entry's packages"
                    )

    def repository_path(self, repository: Repository) -> str:
        return f"{APT_SOURCES}/{MARK}{repository.name}.sources"

    def repository_text(self, repository: Repository) -> str:
        lines = [
            f"# {WRITTEN_BY}",
            f"{KEY_ORIGIN}{repository.key_origin}",
            "Types: deb",
            f"URIs: {repository.url}",
            f"Suites: {' '.join(repository.suites)}",
        ]
        if repository.components:
            lines.append(f"Components: {' '.join(repository.components)}")
        if repository.architectures:
            lines.append(f"Architectures: {' '.join(repository.architectures)}")
        if repository.targets:
            lines.append(f"Targets: {' '.join(repository.targets)}")
        lines.append(f"Signed-By: {self.key_path(repository)}")
        return "\n".join(lines) + "\n"

    def disabled(self, text: str) -> str:
        return text if text.endswith(DISABLED) else text + DISABLED

    def enabled(self, text: str) -> str:
        return text.removesuffix(DISABLED)

    def file_changes(self) -> t.Iterator[Change]:
        present = self.spec.present
        yield from self.file_change(
            f"{APT_PREFERENCES}/{MARK}{self.spec.name}.pref", preferences(self.spec) if present else ""
        )
        yield from self.file_change(
            f"{APT_CONFIGURATION}/90{MARK}{self.spec.name}", unattended_upgrades(self.spec) if present else ""
        )

    def interrupted(self, packages: bool) -> t.Iterator[Change]:
        unfinished, pending = self._apt["unfinished"], self._apt["interrupted"]
        if self.spec.present:
            needed = pending or (packages and bool(unfinished))
        else:
            needed = (packages and (pending or bool(unfinished))) or bool(self.spec.names.intersection(unfinished))
        if needed:
            yield Change("dpkg --configure -a", "interrupted\n", "finished\n", FinishInterrupted())

    def package_changes(self) -> t.Iterator[Change]:
        for package in self.spec.packages:
            have = self.packages.get(package.name)
            fits = have is not None and fnmatch.fnmatchcase(have["version"], package.version or "*")
            held = have is not None and have["held"]
            if not fits or held != self.spec.hold:
                step = SetPackage(package, not fits, have["version"] if have else "", held)
                yield set_package(package, step, self.spec.hold, "latest of pin")

    def package_removals(self) -> t.Iterator[Change]:
        for name in (package.name for package in self.spec.packages):
            have = self.packages.get(name)
            if have is None:
                if name in self._apt["unfinished"] and not self.spec.kept(name):
                    yield Change(f"package {name}", "installed in part\n", "", RemovePackage(name, False))
                continue
            before = described(have["version"], have["held"])
            if not self.spec.kept(name):
                yield Change(f"package {name}", before, "", RemovePackage(name, have["held"]))
            elif have["held"] and self.spec.hold:
                yield Change(f"package {name}", before, described(have["version"], False), Release(name))


def preferences(spec: PackageSet) -> str:
    """Return the set's preferences file; empty where nothing is pinned."""
    stanzas = [f"Package: {pin.package}\nPin: {pin.pin}\nPin-Priority: {pin.priority}\n" for pin in spec.pins]
    return f"# {WRITTEN_BY}\n" + "\n".join(stanzas) if stanzas else ""


def unattended_upgrades(spec: PackageSet) -> str:
    """Return the file that excludes packages from unattended-upgrades; empty where there are none."""
    if not spec.never_upgrade:
        return ""
    names = "".join(f'    "{name}";\n' for name in spec.never_upgrade)
    return f"// {WRITTEN_BY}\nUnattended-Upgrade::Package-Blacklist {{\n{names}}};\n"


def _check_repository(repository: Repository) -> None:
    where = f"repositories: {repository.name}:"
    if not re.match(r"(https?|file|copy|mirror\+https?):", repository.url):
        raise BadInput(f"{where} url {repository.url!r} isn't the URL of a repository of apt")
    flat = [suite.endswith("/") for suite in repository.suites]
    if not flat or any(flat) != all(flat) or all(flat) == bool(repository.components):
        raise BadInput(f"{where} a suite that ends in / has no components, any other needs them")
