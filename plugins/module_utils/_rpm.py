# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""RPM packages at exact versions from repositories of their own, held: what is wanted, and the plan. Pure.

A *set* (``name``) owns these things of a node and no other:

* ``/etc/yum.repos.d/kubegpu-<repository>.repo``, with zypper ``/etc/zypp/repos.d/kubegpu-<repository>.repo``
* ``/etc/pki/rpm-gpg/KUBEGPU-<repository>.asc``, and the key in rpm's database if it wasn't there before
* the locks of its packages, in a form that tells them from a user's own (``_rpm_locks``)

What has been seen of a node is plain JSON, as ``gpu_node_info`` returns it: ``rpm``, ``packages`` (``_rpm_observe``).
"""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._key_folders import (
    MADE_COMMENT,
    made,
    remembered,
    remembering,
    without,
)
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
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_locks import (
    ListLocks,
    Lock,
    LockFile,
    TomlLocks,
    ZyppLocks,
)
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import by_version, matches
from ansible_collections.kubegpu.share.plugins.module_utils._runner import Change, Plan

Json = t.Dict[str, t.Any]

MARK = "kubegpu-"
KEYS = "/etc/pki/rpm-gpg"
KEY_MARK = "KUBEGPU-"

WRITTEN_BY = "# Written by kubegpu.share; what is changed here by hand is written again."
KEY_COMMENT = "# Key: "
# Which keys rpm got from us: state, not wish, so that it is left out where texts are compared.
IMPORTED_COMMENT = "# Imported: "

# Of these rpm keeps several versions beside each other.
INSTALL_ONLY = ("kernel", "kernel-*", "kernel[0-9]*", "gpg-pubkey", "installonlypkg*")

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
            "signed": {
                "type": "list",
                "elements": "str",
                "choices": ["packages", "metadata"],
                "default": ["packages"],
            },
            "key_url": {"type": "str", "no_log": False},
            "key_text": {"type": "str", "no_log": False},
            "key_sha256": {"type": "str", "no_log": False},
        },
        "mutually_exclusive": [("key_url", "key_text")],
        "required_one_of": [("key_url", "key_text")],
    },
    "streams": {
        "type": "list",
        "elements": "dict",
        "default": [],
        "options": {
            "module": {"type": "str", "required": True},
            "stream": {"type": "str", "required": True},
            "switch": {"type": "bool", "default": False},
        },
    },
    "packages": {"type": "list", "elements": "str", "default": []},
    "hold": {"type": "bool", "default": True},
    "hold_also": {"type": "list", "elements": "str", "default": []},
    "conflicts": {"type": "list", "elements": "str", "default": []},
    "replaces": {"type": "list", "elements": "str", "default": []},
    "source_dir": {"type": "path"},
    "node_dir": {"type": "path"},
    "keep": {"type": "list", "elements": "str", "default": []},
    "erase_dependencies": {"type": "bool", "default": False},
    "observed": {"type": "dict"},
}


@dataclasses.dataclass(frozen=True)
class Manager:
    """What is fixed about a package manager: where it keeps things and what it knows."""

    name: str
    repositories: str
    locks: LockFile
    lock_path: str
    lock_plugin: str
    lock_plugin_file: str
    streams: bool
    # How a person would remove packages.
    remove: str


MANAGERS: dict[str, Manager] = {
    one.name: one
    for one in (
        Manager(
            name="dnf",
            repositories="/etc/yum.repos.d",
            locks=ListLocks(epoch_first=False),
            lock_path="/etc/dnf/plugins/versionlock.list",
            lock_plugin="python3-dnf-plugin-versionlock",
            lock_plugin_file="/etc/dnf/plugins/versionlock.conf",
            streams=True,
            remove="dnf remove",
        ),
        Manager(
            name="dnf5",
            repositories="/etc/yum.repos.d",
            locks=TomlLocks(),
            lock_path="/etc/dnf/versionlock.toml",
            lock_plugin="",
            lock_plugin_file="",
            streams=False,
            remove="dnf remove",
        ),
        Manager(
            name="yum",
            repositories="/etc/yum.repos.d",
            locks=ListLocks(epoch_first=True),
            lock_path="/etc/yum/pluginconf.d/versionlock.list",
            lock_plugin="yum-plugin-versionlock",
            lock_plugin_file="/etc/yum/pluginconf.d/versionlock.conf",
            streams=False,
            remove="yum remove",
        ),
        Manager(
            name="zypper",
            repositories="/etc/zypp/repos.d",
            locks=ZyppLocks(),
            lock_path="/etc/zypp/locks",
            lock_plugin="",
            lock_plugin_file="",
            streams=False,
            remove="zypper remove",
        ),
    )
}


@dataclasses.dataclass(frozen=True)
class Repository:
    """One repository and its key; exactly one of ``key_url`` and ``key_text`` is set."""

    name: str
    url: str
    signed: tuple[str, ...]
    key_url: str
    key_text: str
    key_sha256: str

    @property
    def id(self) -> str:
        return f"{MARK}{self.name}"

    @property
    def key_path(self) -> str:
        return f"{KEYS}/{KEY_MARK}{self.name}.asc"

    @property
    def key_origin(self) -> str:
        return self.key_url or "given as text"

    def path(self, manager: Manager) -> str:
        return f"{manager.repositories}/{self.id}.repo"

    def text(self, manager: Manager) -> str:
        """The repository's file; the key's origin stands in it, so that another origin is a change."""
        packages, metadata = ("packages" in self.signed), ("metadata" in self.signed)
        lines = [
            WRITTEN_BY,
            f"{KEY_COMMENT}{self.key_origin}",
            f"[{self.id}]",
            f"name={self.id}",
            f"baseurl={self.url}",
            "enabled=1",
        ]
        if manager.name == "zypper":
            # gpgcheck is zypper's general switch; the two others say which signature it insists on.
            lines += ["autorefresh=1", "type=rpm-md", "gpgcheck=1"]
            lines += [f"repo_gpgcheck={int(metadata)}", f"pkg_gpgcheck={int(packages)}"]
        else:
            lines += [f"gpgcheck={int(packages)}", f"repo_gpgcheck={int(metadata)}"]
            # Should the repository go away some day, the machine's other updates go on; our own runs insist on it.
            lines += ["skip_if_unavailable=1"]
        lines.append(f"gpgkey=file://{self.key_path}")
        return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Package:
    """A package and, where it is pinned, its version: a pattern (``_rpm_version.matches``)."""

    name: str
    version: str

    def satisfied_by(self, version: str) -> bool:
        return not self.version or matches(self.version, version)

    def __str__(self) -> str:
        return f"{self.name}={self.version}" if self.version else self.name


@dataclasses.dataclass(frozen=True)
class Stream:
    """A module's stream; ``switch``: another one may be left for it though packages of the set are installed."""

    module: str
    stream: str
    switch: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.stream}"


@dataclasses.dataclass(frozen=True)
class PackageSet:
    """What is wanted of a node."""

    name: str
    present: bool
    repositories: tuple[Repository, ...]
    streams: tuple[Stream, ...]
    packages: tuple[Package, ...]
    hold: bool
    hold_also: tuple[str, ...]
    conflicts: tuple[str, ...]
    replaces: tuple[str, ...]
    node_dir: str
    keep: tuple[str, ...]
    erase_dependencies: bool

    def governs(self, name: str) -> bool:
        """Whether our lock of a package of this name is this set's."""
        return any(name == one.name for one in self.packages) or matches_any(name, self.hold_also)


# --------------------------------------------------------------------------- steps of a plan


@dataclasses.dataclass(frozen=True)
class PutKey:
    repository: Repository


@dataclasses.dataclass(frozen=True)
class PutRepository:
    repository: Repository


@dataclasses.dataclass(frozen=True)
class RemoveFile:
    path: str
    # What rpm calls the keys that it got from us with this repository.
    imported: tuple[str, ...] = ()
    # The folders that were made for its key.
    made: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class FinishTransaction:
    """An earlier run was killed: packages are there twice, or yum kept a list of what is left to do."""


@dataclasses.dataclass(frozen=True)
class InstallLockPlugin:
    name: str


@dataclasses.dataclass(frozen=True)
class EnableStream:
    """``before``: the stream that is enabled now."""

    stream: Stream
    before: str


@dataclasses.dataclass(frozen=True)
class ResetStream:
    stream: Stream


@dataclasses.dataclass(frozen=True)
class SetPackage:
    """``install``: not there in a version that was asked for; otherwise only its lock is to be set right."""

    package: Package
    install: bool
    have: str


@dataclasses.dataclass(frozen=True)
class Remove:
    """``versions``: those that go of several; all when empty."""

    name: str
    versions: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Unlock:
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
    streams = tuple(_stream(one) for one in params["streams"])
    check_patterns(params, ("hold_also", "conflicts", "replaces", "keep"))
    return PackageSet(
        name=params["name"],
        present=params["state"] == "present",
        repositories=repositories,
        streams=streams,
        packages=packages,
        hold=params["hold"],
        hold_also=tuple(params["hold_also"]),
        conflicts=tuple(params["conflicts"]),
        replaces=tuple(params["replaces"]),
        node_dir=params["node_dir"] or "",
        keep=tuple(params["keep"]),
        erase_dependencies=params["erase_dependencies"],
    )


def _repository(option: Json) -> Repository:
    check_word("repositories: name", option["name"])
    where = f"repositories: {option['name']}:"
    check_addresses(option, r"https?|ftp|file|dir")
    if not option["signed"]:
        raise BadInput(f"{where} signed is empty: either the packages or the metadata must be")
    repository = Repository(
        name=option["name"],
        url=option["url"],
        signed=tuple(option["signed"]),
        **key_fields(option),
    )
    if repository.key_text:
        check_key(repository, repository.key_text)
    return repository


def _package(text: str) -> Package:
    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9_.+-]*)(?:=((?:\d+:)?[0-9A-Za-z][0-9A-Za-z._+~^-]*\*?))?", text)
    if not found:
        raise BadInput(f"packages: {text!r} is neither a package's name nor name=version")
    return Package(found.group(1), found.group(2) or "")


def _stream(option: Json) -> Stream:
    for field in ("module", "stream"):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+-]*", option[field]):
            raise BadInput(f"streams: {field} {option[field]!r} isn't one word")
    return Stream(option["module"], option["stream"], option["switch"])


def install_only(name: str) -> bool:
    return matches_any(name, INSTALL_ONLY)


# --------------------------------------------------------------------------- the plan


def plan(wanted: PackageSet, seen: Json) -> Plan:
    """What has to be done on a node that looks so.

    :raises BadInput: no package manager that works with RPM is there, or what the node has forbids the set.
    """
    rpm = seen["rpm"]
    if rpm is None:
        raise BadInput("packages: this node has no dnf, yum or zypper")
    manager = MANAGERS[rpm["manager"]]
    if wanted.streams and not manager.streams:
        raise BadInput(f"streams: this node's {manager.name} knows no streams of modules")
    if not wanted.present:
        return Plan(tuple(_removals(wanted, manager, seen)))
    own = {package.name for package in wanted.packages}
    refuse_conflicts(wanted.conflicts, own, seen["packages"], manager.remove)
    changes: list[Change] = []
    for repository in wanted.repositories:
        changes += _repository_changes(repository, manager, rpm)
    packages = [change for package in wanted.packages for change in _package_changes(package, wanted, seen)]
    packages += _also_changes(wanted, seen)
    plugin = _plugin_changes(wanted, manager, rpm)
    streams = [change for stream in wanted.streams for change in _stream_changes(stream, wanted, seen)]
    # Only yum keeps a list of what it left; others' packages may be there twice on purpose.
    twice = _twice(wanted, rpm)
    if rpm["interrupted"] and (twice or (packages and manager.name == "yum")):
        said = ", ".join(twice) or "left to do"
        changes.append(Change("unfinished transaction", f"{said}\n", "finished\n", FinishTransaction()))
    return Plan((*changes, *plugin, *streams, *packages))


def without_memory(text: str) -> str:
    """A repository's file without what it remembers of the keys that came with it."""
    return without(text, IMPORTED_COMMENT, MADE_COMMENT)


def imported(text: str) -> tuple[str, ...]:
    """Which keys rpm got from us, by a repository's file."""
    return remembered(text, IMPORTED_COMMENT)


def with_memory(text: str, keys: t.Iterable[str], folders: t.Iterable[str] = ()) -> str:
    """A repository's file that remembers the keys that rpm got from us, and the folders that were made for them."""
    return remembering(text, {IMPORTED_COMMENT: keys, MADE_COMMENT: folders})


def _repository_changes(repository: Repository, manager: Manager, rpm: Json) -> list[Change]:
    changes = []
    path = repository.path(manager)
    have = rpm["keys"].get(repository.key_path)
    text = without_memory(rpm["files"].get(path, ""))
    want = sha256_of(repository.key_text) if repository.key_text else repository.key_sha256
    other_origin = bool(text) and f"{KEY_COMMENT}{repository.key_origin}" not in text.splitlines()
    if have is None or (have != want if want else other_origin):
        before = "" if have is None else f"key with SHA-256 {have}\n"
        after = f"key {repository.key_origin}" + (f" with SHA-256 {want}\n" if want else "\n")
        changes.append(Change(repository.key_path, before, after, PutKey(repository)))
    wanted = repository.text(manager)
    if text != wanted:
        changes.append(Change(path, text, wanted, PutRepository(repository)))
    return changes


def _plugin_changes(wanted: PackageSet, manager: Manager, rpm: Json) -> list[Change]:
    if not manager.lock_plugin or not wanted.hold or not wanted.packages:
        return []
    if rpm["lock_plugin"] == "disabled":
        raise BadInput(f"hold: {manager.lock_plugin_file} has the plugin switched off (enabled = 0)")
    if rpm["lock_plugin"]:
        return []
    header = f"package {manager.lock_plugin}"
    return [Change(header, "", "whatever version there is\n", InstallLockPlugin(manager.lock_plugin))]


def _stream_changes(stream: Stream, wanted: PackageSet, seen: Json) -> list[Change]:
    have = seen["rpm"]["streams"].get(stream.module, "")
    if have == stream.stream:
        return []
    installed = [package.name for package in wanted.packages if package.name in seen["packages"]]
    if have and installed and not stream.switch:
        raise BadInput(
            f"streams: module {stream.module} is at {have} and {', '.join(installed)} of it installed; "
            f"remove them first, or set switch to go to {stream.stream}"
        )
    before = f"{have}\n" if have else ""
    return [Change(f"module {stream.module}", before, f"{stream.stream}\n", EnableStream(stream, have))]


def _twice(wanted: PackageSet, rpm: Json) -> list[str]:
    return [name for name in rpm["duplicates"] if wanted.governs(name)]


def versions_of(row: Json) -> list[str]:
    """Every installed version of a package, the newest first."""
    return list(row.get("versions") or [row["version"]])


def _locks(seen: Json) -> list[Lock]:
    return [Lock(**row) for row in seen["rpm"]["locks"]]


def _package_changes(package: Package, wanted: PackageSet, seen: Json) -> list[Change]:
    row = seen["packages"].get(package.name)
    versions = versions_of(row) if row else []
    fitting = [version for version in versions if package.satisfied_by(version)]
    locks = _locks(seen)
    if not fitting:
        refuse_foreign_lock(package, locks)
    have = (fitting or versions or [""])[0]
    held = bool(have) and any(lock.keeps(package.name, have) for lock in locks)
    stale = _stale(package.name, have, locks)
    keep = wanted.hold
    right = (held and not stale) if keep else not any(lock.ours and lock.of(package.name) for lock in locks)
    if fitting and right:
        return []
    version = have if fitting else (package.version or "latest")
    return [
        Change(
            f"package {package.name}",
            described(have, held) if have else "",
            described(version, keep),
            SetPackage(package, not fitting, have),
        )
    ]


def _stale(name: str, version: str, locks: t.Iterable[Lock]) -> bool:
    """A lock of ours for another version than the installed one."""
    return any(lock.ours and lock.name == name and not lock.keeps(name, version) for lock in locks)


def refuse_foreign_lock(package: Package, locks: t.Iterable[Lock]) -> None:
    """A user's own lock isn't ours to lift.

    :raises BadInput: one keeps the package from the version that is asked for.
    """
    for lock in locks:
        if lock.ours or not lock.of(package.name):
            continue
        if not lock.version or (lock.exact and not package.satisfied_by(lock.version)):
            at = f" at {lock.version}" if lock.version else ""
            raise BadInput(
                f"packages: {package} is asked for, and a lock that isn't ours keeps {lock.name}{at}; "
                "delete that lock first"
            )


def _also_changes(wanted: PackageSet, seen: Json) -> list[Change]:
    """Locks of what came with the packages: one that is free makes every upgrade fail on the locked ones."""
    own = {package.name for package in wanted.packages}
    locks = _locks(seen)
    changes = []
    for name in sorted(seen["packages"]):
        if name in own or install_only(name) or not matches_any(name, wanted.hold_also):
            continue
        version = seen["packages"][name]["version"]
        held = any(lock.keeps(name, version) for lock in locks)
        mine = any(lock.ours and lock.name == name for lock in locks)
        right = (held and not _stale(name, version, locks)) if wanted.hold else not mine
        if not right:
            step = SetPackage(Package(name, ""), False, version)
            changes.append(Change(f"package {name}", described(version, held), described(version, wanted.hold), step))
    return changes


def lock_changes(wanted: PackageSet, seen: Json) -> dict[str, str]:
    """Which locks have to be written, by name: all that the set's installed packages need and a user's own aren't."""
    if not wanted.hold:
        return {}
    own = {package.name: package for package in wanted.packages}
    foreign = [lock for lock in _locks(seen) if not lock.ours]
    found = {}
    for name, row in seen["packages"].items():
        package = own.get(name)
        if package is None and (install_only(name) or not matches_any(name, wanted.hold_also)):
            continue
        fitting = [one for one in versions_of(row) if package is None or package.satisfied_by(one)]
        if fitting and not any(lock.keeps(name, fitting[0]) for lock in foreign):
            found[name] = fitting[0]
    return found


# --------------------------------------------------------------------------- absent


def _removals(wanted: PackageSet, manager: Manager, seen: Json) -> t.Iterator[Change]:
    rpm = seen["rpm"]
    kept = False
    # Also one of ours whose package is gone: it serves nobody.
    locks = [
        lock
        for lock in _locks(seen)
        if lock.ours and (wanted.governs(lock.name) or (wanted.packages and lock.name not in seen["packages"]))
    ]
    if rpm["interrupted"] and _twice(wanted, rpm):
        said = ", ".join(_twice(wanted, rpm))
        yield Change("unfinished transaction", f"{said}\n", "finished\n", FinishTransaction())
    for package in wanted.packages:
        row = seen["packages"].get(package.name)
        if row is None:
            continue
        if matches_any(package.name, wanted.keep):
            kept = True
            continue
        versions = versions_of(row)
        # Of kernel packages only those versions go that were asked for.
        going = [one for one in versions if package.satisfied_by(one)] if install_only(package.name) else versions
        if going:
            step = Remove(package.name, tuple(going) if len(going) < len(versions) else ())
            held = any(lock.keeps(package.name, row["version"]) for lock in locks)
            yield Change(f"package {package.name}", described(", ".join(going), held), "", step)
    for lock in locks:
        yield Change(f"lock of {lock.name}", f"{lock.version or 'as it is'}\n", "", Unlock(lock.name))
    for stream in wanted.streams:
        if not kept and rpm["streams"].get(stream.module) == stream.stream:
            yield Change(f"module {stream.module}", f"{stream.stream}\n", "", ResetStream(stream))
    for repository in wanted.repositories:
        if repository.key_path in rpm["keys"]:
            before = f"key with SHA-256 {rpm['keys'][repository.key_path]}\n"
            yield Change(repository.key_path, before, "", RemoveFile(repository.key_path))
    # Repositories' files go last: they remember what came with the keys.
    for repository in wanted.repositories:
        path = repository.path(manager)
        if path in rpm["files"]:
            text = rpm["files"][path]
            yield Change(path, without_memory(text), "", RemoveFile(path, imported(text), made(text)))


def newest(versions: t.Iterable[str]) -> list[str]:
    """Versions, the newest first."""
    return sorted(versions, key=by_version, reverse=True)
