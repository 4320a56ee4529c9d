# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Packages at exact versions from repositories of their own, held: what is wanted, and the plan. Pure.

A *set* (``name``) owns these files of a node and no other:

* ``/etc/apt/sources.list.d/kubegpu-<repository>.sources`` and ``/etc/apt/keyrings/kubegpu-<repository>.asc``
* ``/etc/apt/preferences.d/kubegpu-<set>.pref``
* ``/etc/apt/apt.conf.d/90kubegpu-<set>``

What has been seen of a node is plain JSON, as ``gpu_node_info`` returns it: ``apt`` {files, keys, sources, interrupted,
unfinished} and ``packages`` {name: {version, held}}.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._key_folders import MADE_COMMENT, made, without
from ansible_collections.kubegpu.share.plugins.module_utils._package_names import (
    check_patterns,
    described,
    matches_any,
    refuse_conflicts,
)
from ansible_collections.kubegpu.share.plugins.module_utils._package_options import (
    check_addresses,
    check_once,
    check_word,
    key_fields,
)
from ansible_collections.kubegpu.share.plugins.module_utils._repository_key import check_key, sha256_of
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

SOURCES = "/etc/apt/sources.list.d"
KEYRINGS = "/etc/apt/keyrings"
PREFERENCES = "/etc/apt/preferences.d"
CONFIGURATION = "/etc/apt/apt.conf.d"
MARK = "kubegpu-"

WRITTEN_BY = "Written by kubegpu.share; what is changed here by hand is written again."
KEY_COMMENT = "# Key: "
SWITCHED_OFF = "Enabled: no\n"

ARGUMENTS: Json = {
    "name": {"type": "str", "required": True},
    "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
    "repositories": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "name": {"type": "str", "required": True},
            "url": {"type": "str", "required": True},
            "suites": {"type": "list", "elements": "str", "default": ["/"]},
            "components": {"type": "list", "elements": "str", "default": []},
            "architectures": {"type": "list", "elements": "str", "default": []},
            "key_url": {"type": "str", "no_log": False},
            "key_text": {"type": "str", "no_log": False},
            "key_sha256": {"type": "str", "no_log": False},
        },
        "mutually_exclusive": [("key_url", "key_text")],
        "required_one_of": [("key_url", "key_text")],
    },
    "pins": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "package": {"type": "str", "required": True},
            "pin": {"type": "str", "required": True},
            "priority": {"type": "int", "default": 1001},
        },
    },
    "packages": {"type": "list", "elements": "str", "default": []},
    "hold": {"type": "bool", "default": True},
    "never_upgrade": {"type": "list", "elements": "str", "default": []},
    "conflicts": {"type": "list", "elements": "str", "default": []},
    "replaces": {"type": "list", "elements": "str", "default": []},
    "source_dir": {"type": "path"},
    "node_dir": {"type": "path"},
    "keep": {"type": "list", "elements": "str", "default": []},
    "erase_dependencies": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class Repository:
    """One repository and its key; exactly one of ``key_url`` and ``key_text`` is set."""

    name: str
    url: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    architectures: tuple[str, ...]
    key_url: str
    key_text: str
    key_sha256: str

    @property
    def sources_path(self) -> str:
        return f"{SOURCES}/{MARK}{self.name}.sources"

    @property
    def key_path(self) -> str:
        return f"{KEYRINGS}/{MARK}{self.name}.asc"

    @property
    def key_origin(self) -> str:
        return self.key_url or "given as text"

    def sources(self) -> str:
        """The deb822 stanza; the key's origin stands in it, so that another origin is a change."""
        lines = [
            f"# {WRITTEN_BY}",
            f"{KEY_COMMENT}{self.key_origin}",
            "Types: deb",
            f"URIs: {self.url}",
            f"Suites: {' '.join(self.suites)}",
        ]
        if self.components:
            lines.append(f"Components: {' '.join(self.components)}")
        if self.architectures:
            lines.append(f"Architectures: {' '.join(self.architectures)}")
        lines.append(f"Signed-By: {self.key_path}")
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Package:
    """A package and, where it is pinned, its version; one that ends in ``*`` stands for all that begin so."""

    name: str
    version: str

    def satisfied_by(self, version: str) -> bool:
        return not self.version or fnmatch.fnmatchcase(version, self.version)

    def __str__(self) -> str:
        return f"{self.name}={self.version}" if self.version else self.name


@dataclasses.dataclass(frozen=True)
class PackageSet:
    """What is wanted of a node."""

    name: str
    present: bool
    repositories: tuple[Repository, ...]
    pins: tuple[tuple[str, str, int], ...]
    packages: tuple[Package, ...]
    hold: bool
    never_upgrade: tuple[str, ...]
    conflicts: tuple[str, ...]
    replaces: tuple[str, ...]
    node_dir: str
    keep: tuple[str, ...]
    erase_dependencies: bool

    @property
    def preferences_path(self) -> str:
        return f"{PREFERENCES}/{MARK}{self.name}.pref"

    @property
    def configuration_path(self) -> str:
        return f"{CONFIGURATION}/90{MARK}{self.name}"

    def preferences(self) -> str:
        """The preferences file; empty where nothing is pinned."""
        stanzas = [
            f"Package: {package}\nPin: {pin}\nPin-Priority: {priority}\n" for package, pin, priority in self.pins
        ]
        return f"# {WRITTEN_BY}\n" + "\n".join(stanzas) if stanzas else ""

    def configuration(self) -> str:
        """What keeps unattended-upgrades away; empty where nothing is to be kept."""
        if not self.never_upgrade:
            return ""
        names = "".join(f'    "{name}";\n' for name in self.never_upgrade)
        return f"// {WRITTEN_BY}\nUnattended-Upgrade::Package-Blacklist {{\n{names}}};\n"


# --------------------------------------------------------------------------- steps of a plan


@dataclasses.dataclass(frozen=True)
class PutKey:
    repository: Repository


@dataclasses.dataclass(frozen=True)
class PutSources:
    repository: Repository


@dataclasses.dataclass(frozen=True)
class RemoveSources:
    """``text``: what stands there now."""

    path: str
    text: str

    @property
    def made(self) -> tuple[str, ...]:
        return made(self.text)


@dataclasses.dataclass(frozen=True)
class PutFile:
    path: str
    text: str


@dataclasses.dataclass(frozen=True)
class RemoveFile:
    path: str


@dataclasses.dataclass(frozen=True)
class FinishDpkg:
    """An earlier run of dpkg was interrupted."""


@dataclasses.dataclass(frozen=True)
class SetPackage:
    """``install``: not there in a version that was asked for. ``held``: it is held now."""

    package: Package
    install: bool
    held: bool


@dataclasses.dataclass(frozen=True)
class Purge:
    name: str
    held: bool


@dataclasses.dataclass(frozen=True)
class Release:
    """It stays, and its hold goes."""

    name: str


# --------------------------------------------------------------------------- from the module's options


def package_set(params: Json) -> PackageSet:
    """What the module's options ask for.

    :raises BadInput: an option's value can't be served; the sentence names the option.
    """
    check_word("name", params["name"])
    repositories = tuple(_repository(one) for one in params["repositories"])
    packages = tuple(_package(text) for text in params["packages"])
    check_once(repositories, packages)
    for pin in params["pins"]:
        for field in ("package", "pin"):
            _line(f"pins: {field}", pin[field])
    for pattern in params["never_upgrade"]:
        if not re.fullmatch(r'[^"\s]+', pattern):
            raise BadInput(f"never_upgrade: {pattern!r} isn't a pattern of package names")
    check_patterns(params, ("conflicts", "replaces", "keep"))
    return PackageSet(
        name=params["name"],
        present=params["state"] == "present",
        repositories=repositories,
        pins=tuple((pin["package"], pin["pin"], pin["priority"]) for pin in params["pins"]),
        packages=packages,
        hold=params["hold"],
        never_upgrade=tuple(params["never_upgrade"]),
        conflicts=tuple(params["conflicts"]),
        replaces=tuple(params["replaces"]),
        node_dir=params["node_dir"] or "",
        keep=tuple(params["keep"]),
        erase_dependencies=params["erase_dependencies"],
    )


def _repository(option: Json) -> Repository:
    check_word("repositories: name", option["name"])
    where = f"repositories: {option['name']}:"
    check_addresses(option, r"https?|file|copy|mirror\+https?")
    for field in ("suites", "components", "architectures"):
        for word in option[field]:
            if not re.fullmatch(r"[^\s]+", word):
                raise BadInput(f"{where} {field} holds {word!r}, which isn't one word")
    flat = [suite.endswith("/") for suite in option["suites"]]
    if not flat or any(flat) != all(flat) or all(flat) == bool(option["components"]):
        raise BadInput(f"{where} a suite that ends in / has no components, any other needs them")
    repository = Repository(
        name=option["name"],
        url=option["url"],
        suites=tuple(option["suites"]),
        components=tuple(option["components"]),
        architectures=tuple(option["architectures"]),
        **key_fields(option),
    )
    if repository.key_text:
        check_key(repository, repository.key_text)
    return repository


def _package(text: str) -> Package:
    found = re.fullmatch(r"([a-z0-9][a-z0-9+.-]+)(?:=([0-9A-Za-z.+:~-]+\*?))?", text)
    if not found:
        raise BadInput(f"packages: {text!r} is neither a package's name nor name=version")
    return Package(found.group(1), found.group(2) or "")


def _line(option: str, value: str) -> None:
    if not value.strip() or "\n" in value:
        raise BadInput(f"{option}: {value!r} isn't one line of text")


# --------------------------------------------------------------------------- the plan


def plan(wanted: PackageSet, seen: Json) -> Plan:
    """What has to be done on a node that looks so.

    :raises BadInput: apt isn't what manages this node's packages, or a list of the user's own forbids the repository.
    """
    if seen["apt"] is None:
        raise BadInput("packages: this node has no apt")
    interrupted, unfinished = seen["apt"]["interrupted"], seen["apt"]["unfinished"]
    finish = Change("dpkg --configure -a", "interrupted\n", "finished\n", FinishDpkg())
    if not wanted.present:
        removals = tuple(_removals(wanted, seen))
        halves = [package for package in wanted.packages if package.name in unfinished]
        first = (finish,) if halves or (removals and (interrupted or unfinished)) else ()
        return Plan((*first, *removals, *_file_removals(wanted, seen)))
    own = {package.name for package in wanted.packages}
    refuse_conflicts(wanted.conflicts, own, seen["packages"], "apt-get purge")
    for repository in wanted.repositories:
        refuse_conflict(repository, seen["apt"]["sources"])
    changes: list[Change] = []
    for repository in wanted.repositories:
        changes += _repository_changes(repository, seen["apt"])
    for path, text in (
        (wanted.preferences_path, wanted.preferences()),
        (wanted.configuration_path, wanted.configuration()),
    ):
        changes += _file_changes(path, text, seen["apt"]["files"])
    packages = [change for package in wanted.packages for change in _package_changes(package, wanted.hold, seen)]
    if interrupted or (packages and unfinished):
        changes.append(finish)
    return Plan((*changes, *packages))


def refuse_conflict(repository: Repository, sources: t.Iterable[Json]) -> None:
    """apt reads no list at all while two name one repository with different keys.

    :raises BadInput: a list that isn't ours does; the sentence names its file.
    """
    for source in sources:
        same = source["url"].rstrip("/") == repository.url.rstrip("/") and source["suite"] in repository.suites
        if same and source["signed_by"] != repository.key_path:
            raise BadInput(
                f"{source['file']} names {source['url']} {source['suite']} with "
                + (f"Signed-By {source['signed_by']}" if source["signed_by"] else "no Signed-By")
                + f", which apt refuses beside repository {repository.name}: "
                "remove that entry, or leave the repository out and the packages to it"
            )


def _repository_changes(repository: Repository, apt: Json) -> list[Change]:
    changes = []
    have = apt["keys"].get(repository.key_path)
    text = without(apt["files"].get(repository.sources_path, ""), MADE_COMMENT)
    want = sha256_of(repository.key_text) if repository.key_text else repository.key_sha256
    other_origin = bool(text) and f"{KEY_COMMENT}{repository.key_origin}" not in text.splitlines()
    if have is None or (have != want if want else other_origin):
        before = "" if have is None else f"key with SHA-256 {have}\n"
        after = f"key {repository.key_origin}" + (f" with SHA-256 {want}\n" if want else "\n")
        changes.append(Change(repository.key_path, before, after, PutKey(repository)))
    if text != repository.sources():
        changes.append(Change(repository.sources_path, text, repository.sources(), PutSources(repository)))
    return changes


def switched_off(text: str) -> str:
    """A list that apt passes over: until its key is there, and once it is gone."""
    return text if text.endswith(SWITCHED_OFF) else text + SWITCHED_OFF


def _file_changes(path: str, text: str, files: t.Mapping[str, str]) -> list[Change]:
    have = files.get(path)
    if text == (have or "") and (text or have is None):
        return []
    return [Change(path, have or "", text, PutFile(path, text) if text else RemoveFile(path))]


def _package_changes(package: Package, hold: bool, seen: Json) -> list[Change]:
    have = seen["packages"].get(package.name)
    install = have is None or not package.satisfied_by(have["version"])
    held = have is not None and have["held"]
    if not install and held == hold:
        return []
    version = (package.version or "latest of pin") if install or have is None else have["version"]
    return [
        Change(
            f"package {package.name}",
            "" if have is None else described(have["version"], held),
            described(version, hold),
            SetPackage(package, install, held),
        )
    ]


def _removals(wanted: PackageSet, seen: Json) -> t.Iterator[Change]:
    for package in wanted.packages:
        have = seen["packages"].get(package.name)
        if have is not None and matches_any(package.name, wanted.keep):
            if have["held"] and wanted.hold:
                after = described(have["version"], False)
                yield Change(f"package {package.name}", described(have["version"], True), after, Release(package.name))
        elif have is not None:
            step = Purge(package.name, have["held"])
            yield Change(f"package {package.name}", described(have["version"], have["held"]), "", step)


def _file_removals(wanted: PackageSet, seen: Json) -> t.Iterator[Change]:
    files, keys = seen["apt"]["files"], seen["apt"]["keys"]
    for path in (wanted.preferences_path, wanted.configuration_path):
        if path in files:
            yield Change(path, files[path], "", RemoveFile(path))
    for repository in wanted.repositories:
        if repository.key_path in keys:
            before = f"key with SHA-256 {keys[repository.key_path]}\n"
            yield Change(repository.key_path, before, "", RemoveFile(repository.key_path))
    # Lists go last: they remember which folders were made for the keys.
    for path in (one.sources_path for one in wanted.repositories):
        if path in files:
            yield Change(path, without(files[path], MADE_COMMENT), "", RemoveSources(path, files[path]))
