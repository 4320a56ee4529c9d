# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a mirror is made from: package sets of machines, and what a distribution's own program resolved them to."""

from __future__ import annotations

import dataclasses
import typing as t

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from .._core.errors import BadInput
from .._core.types import JsonObject
from .._packages.options import ARGUMENTS as PACKAGE_ARGUMENTS
from .._packages.options import Fetch, PackageSet, Repository, key_of, package_set
from .store import Certificates
from .types import DISTRIBUTION, DRIVER, MANAGERS, TOOLKIT

_OPTIONS = ("repositories", "pins", "streams", "packages")
ARGUMENTS: JsonObject = {
    "folder": {"type": "path", "default": "/var/cache/kubegpu-airgap"},
    "sets": {"type": "list", "elements": "dict", "required": True},
}
# Of an entry of sets.
_SET: JsonObject = {
    "name": {"type": "str", "required": True},
    "hosts": {"type": "list", "elements": "str", "default": []},
    "manager": {"type": "str", "choices": list(MANAGERS), "required": True},
    "id": {"type": "str", "required": True},
    "version": {"type": "str", "required": True},
    "architectures": {"type": "list", "elements": "str", "required": True},
    "roles": {"type": "dict", "default": {}},
    **{name: PACKAGE_ARGUMENTS[name] for name in _OPTIONS},
}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The packages that some machines install together.

    :param spec: as ``pinned_packages`` has it.
    :param roles: by a repository's name the role whose packages it has; the distribution's where it isn't there.
    """

    spec: PackageSet
    roles: t.Mapping[str, str]

    @property
    def specs(self) -> list[str]:
        return [str(package) for package in self.spec.packages]

    def role(self, repository: str) -> str:
        return self.roles.get(repository, DISTRIBUTION)


def wanted_sets(params: JsonObject, host: t.Mapping[str, t.Any], manager: str) -> list[Wanted]:
    """Return the sets of machines of this machine's distribution, release and architecture.

    :param host: ``distribution`` of this machine.
    :param manager: ``apt`` or ``rpm``.
    :raises BadInput: an option is invalid, or there is none for this machine; the message names what there is.
    """
    sets = [_valid(option) for option in params["sets"]]
    fitting = [option for option in sets if _fits(option, host, manager)]
    if not fitting:
        wanted = sorted({_described(option) for option in sets})
        raise BadInput(
            f"this host of group airgap_package_hosts has {host['id']} {host['version']} {host['arch']}, and the GPU "
            f"nodes have {', '.join(wanted) or 'no packages'}: packages are resolved where distribution, release and "
            "architecture are the same, on a machine or in a container",
            code="other_distribution",
        )
    return [_wanted(option) for option in fitting]


def _valid(option: JsonObject) -> JsonObject:
    """Return an entry with its defaults.

    :raises BadInput: it has other fields or types.
    """
    found = ArgumentSpecValidator(_SET).validate(option)
    if found.error_messages:
        raise BadInput(f"sets: {found.error_messages[0]}")
    return t.cast(JsonObject, found.validated_parameters)


def _fits(option: JsonObject, host: t.Mapping[str, t.Any], manager: str) -> bool:
    if option["manager"] != manager or host["arch"] not in option["architectures"]:
        return False
    # The whole release: a minor one of Enterprise Linux has kernels of its own, and newer libraries.
    return (option["id"], option["version"]) == (host["id"], host["version"])


def _described(option: JsonObject) -> str:
    return f"{option['id']} {option['version']} {'/'.join(option['architectures'])}"


def _wanted(option: JsonObject) -> Wanted:
    defaults = {name: row.get("default") for name, row in PACKAGE_ARGUMENTS.items()}
    spec = package_set({**defaults, "name": option["name"], **{name: option[name] for name in _OPTIONS}})
    if not spec.packages:
        raise BadInput(f"sets: {option['name']}: packages is empty")
    for name, role in option["roles"].items():
        if role not in (DRIVER, TOOLKIT):
            raise BadInput(f"sets: {option['name']}: roles: {name} is of {role!r}, not {DRIVER} or {TOOLKIT}")
    return Wanted(spec, dict(option["roles"]))


def repositories_of(sets: t.Iterable[Wanted]) -> list[Repository]:
    """Return the repositories of all sets, each once.

    :raises BadInput: two sets have another repository under one name.
    """
    found: dict[str, Repository] = {}
    for wanted in sets:
        for repository in wanted.spec.repositories:
            if found.setdefault(repository.name, repository) != repository:
                raise BadInput(f"sets: repository {repository.name} isn't the same in all of them")
    return list(found.values())


def keys_of(repositories: t.Iterable[Repository], fetch: Fetch) -> dict[str, str]:
    """Return the keys of repositories by name, each held to its digest or fingerprint.

    :raises ShareError: a key can't be had, or isn't the one that was announced.
    """
    return {repository.name: key_of(repository, fetch) for repository in repositories}


class Part(t.NamedTuple):
    """A file of a mirror: one of the machine (``local``), or what is to be downloaded (``url``).

    :param path: below the repository's address.
    :param digest: of ``algorithm``, from signed metadata; empty for that metadata itself.
    :param needed: a server without it isn't a repository.
    :param size: bytes, as signed metadata says; 0 where it doesn't.
    """

    path: str
    local: str = ""
    url: str = ""
    algorithm: str = "sha256"
    digest: str = ""
    needed: bool = True
    size: int = 0


class Package(t.NamedTuple):
    part: Part
    name: str
    version: str
    architecture: str


@dataclasses.dataclass
class Resolved:
    """One repository, and what of it is needed.

    :param key: its public keys, armoured.
    :param id: of apt, dnf or zypper for messages.
    """

    address: str
    role: str
    key: str
    signed: tuple[str, ...]
    suites: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    packages: list[Package] = dataclasses.field(default_factory=list)
    # In the order in which they are put: what names others comes last.
    metadata: list[Part] = dataclasses.field(default_factory=list)
    certificates: Certificates = dataclasses.field(default_factory=Certificates)


class Outcome(t.NamedTuple):
    """:param left_out: packages of this machine that may have to change along, and can't be resolved with the rest."""

    repositories: list[Resolved]
    left_out: list[str]
