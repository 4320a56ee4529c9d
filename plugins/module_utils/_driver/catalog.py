# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Role driver's variables, and the names of packages, repositories and headers in a node's distribution. Pure.

The catalogue is role driver's ``vars/<id or family>_<major>.yml``: data whose placeholders in braces are replaced here.
What the repositories hold stands in the collection's ``meta/repositories.yml``.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from .._core.types import JsonObject
from .._host.kernels import booted
from .._host.types import Package
from .._packages.names import followed
from .types import Headers, NodeFacts, Prerequisite, StreamOption


@dataclasses.dataclass(frozen=True)
class DriverOptions:
    """Role driver's variables without their prefix, and the host's name.

    :ivar tables: the collection's tables by section: ``keys`` (digests), ``nvidia`` and ``distribution`` (what package
        repositories hold).
    """

    host: str = ""
    state: str = "present"
    source: str = "repository"
    version: str = ""
    flavour: str = "auto"
    packages: tuple[str, ...] = ()
    hold: bool = True
    install_headers: str = "auto"
    prerequisites: str = "report"
    fabric_manager: str = "auto"
    repo_url: str = ""
    repo_key_url: str = ""
    repo_key_sha256: str = ""
    repo_suites: tuple[str, ...] = ("/",)
    repo_components: tuple[str, ...] = ()
    packages_dir: str = ""
    runfile: str = ""
    runfile_sha256: str = ""
    maintenance: str = "never"
    in_maintenance: bool = False
    ignore: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    tables: t.Mapping[str, t.Mapping[str, JsonObject]] = dataclasses.field(default_factory=dict)

    @property
    def of_runfile(self) -> bool:
        return self.source == "runfile"


def driver_options(values: JsonObject) -> DriverOptions:
    """Return the options; an empty or missing value means its default."""
    given: JsonObject = {}
    for field in dataclasses.fields(DriverOptions):
        value = values.get(field.name)
        if field.name == "tables":
            given[field.name] = value or {}
        elif isinstance(field.default, bool):
            given[field.name] = field.default if value is None else bool(value)
        elif isinstance(field.default, tuple):
            given[field.name] = tuple(str(item) for item in value or field.default)
        else:
            given[field.name] = str(value or field.default)
    return DriverOptions(**given)


FLAVOURS = ("open", "proprietary")
# The value of driver_repo_key_sha256 that stands for the collection's own digest of the key.
PINNED = "pinned"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# The section of the table that says what a source of packages holds.
SECTIONS = {"repository": "nvidia", "distribution": "distribution"}
# "uname -r" of Ubuntu and SUSE ends in the kernel's flavour, such as generic, nvidia-64k, default or azure.
KERNEL_FLAVOUR = re.compile(r"[0-9.]+-[0-9.]+-([0-9]*[a-z].*)")


class Catalog:
    """The catalogue's names for one node, one version and one source of packages.

    :ivar data: the catalogue; empty where the distribution has none.
    """

    def __init__(self, gpu_node: NodeFacts, data: JsonObject, options: DriverOptions) -> None:
        self.data = data = data if _is_of(data, gpu_node.get("distribution") or {}) else {}
        self._options = options
        self._seen = gpu_node
        self._distribution: t.Mapping[str, t.Any] = gpu_node.get("distribution") or {}
        self._kernel: t.Mapping[str, t.Any] = gpu_node.get("kernel") or {}
        self._installed: t.Mapping[str, Package] = gpu_node.get("packages") or {}
        self._arch = str(self._distribution.get("arch"))
        self._version = options.version
        numbers = re.match(r"[0-9]+", self._version)
        self.branch = int(numbers.group()) if numbers else 0
        self.known = bool(data)
        self.name = str(data.get("name") or "")
        self.manager = str(data.get("manager") or "none")
        # A directory of packages contains those of NVIDIA's repository; a .run file needs the same build tools.
        self.source_name = "repository" if options.source in ("packages", "runfile") else options.source
        self.source = self.source_of(self.source_name)
        self.rows: t.Sequence[JsonObject] = [] if options.of_runfile else self.source.get("rows") or []
        # The names of this branch: the rows are sorted from the newest to the oldest.
        self.row: JsonObject = next((row for row in self.rows if self.branch >= row["since"]), {})

    def source_of(self, name: str) -> JsonObject:
        """Return a source of packages; empty where this distribution has none."""
        source: JsonObject = (self.data.get("sources") or {}).get(name) or {}
        only = source.get("only")
        return source if only is None or self._distribution.get("id") in only else {}

    def holds(self, source: str) -> dict[str, JsonObject]:
        """Return what the table says of a source's repository for this distribution, by dpkg's architectures.

        An architecture that has no packages isn't there. A distribution may have several folders: the first counts.
        """
        entry = self.source_of(source)
        table = self._options.tables.get(SECTIONS.get(source, "")) or {}
        folders = entry.get("folder") or self._of_distribution(self.data.get("folder") or {}) or ()
        by_arch: dict[str, JsonObject] = {}
        for folder in [folders] if isinstance(folders, str) else folders:
            for name, row in table.items() if entry else ():
                if name.startswith(f"{folder}/"):
                    by_arch.setdefault(row["arch"], {**row, "name": name, "folder": folder})
        return by_arch

    @property
    def bounds(self) -> JsonObject:
        """What the table says of the chosen source on this architecture; empty where it says nothing.

        A mirror, a directory of packages and a .run file have what the user put there.
        """
        if self._options.source not in SECTIONS or self._options.repo_url:
            return {}
        return self.holds(self.source_name).get(self._arch) or {}

    @property
    def _repository(self) -> JsonObject:
        """The repository's row; of a mirror for an architecture without one, that of another architecture."""
        rows = self.holds(self.source_name)
        return rows.get(self._arch) or next(iter(rows.values()), {})

    def entries(self, name: str) -> list[str]:
        """Return a list of the catalogue as it is."""
        return list(self.data.get(name) or [])

    @property
    def persistence_override(self) -> str:
        return str((self.data.get("persistence") or {}).get("override") or "")

    # ------------------------------------------------------------------ names of packages

    def packages(self, flavour: str) -> list[str]:
        """Return the driver's packages, each ``name`` or ``name=version``."""
        if self._options.packages:
            pattern = self._filled(self.source.get("version", "{version}-*"))
            return [f"{name}={pattern}" for name in self._options.packages]
        names = [self._filled(name) for name in (*self._of_row("driver"), *self._of_row(flavour))]
        for name in (self.row.get("per_kernel") or {}).get(flavour) or ():
            names += [self._filled(name, kernel) for kernel in self.kernels()]
        return list(dict.fromkeys(names))

    def compiled_for(self, flavour: str) -> list[str]:
        """Return the kernels for which this choice takes compiled modules, each from a package of its own."""
        return self.kernels() if (self.row.get("per_kernel") or {}).get(flavour) and not self._options.packages else []

    def fabric(self, nvlink5: bool) -> list[str]:
        """Return the fabric manager's packages.

        :param nvlink5: with those that NVLink 5 needs.
        """
        return [self._filled(name) for name in (*self._of_row("fabric"), *(self._of_row("nvlink5") if nvlink5 else ()))]

    def _of_row(self, key: str) -> t.Sequence[str]:
        return self.row.get(key) or ()

    def replaceable(self) -> list[str]:
        """Return patterns of all names of this source for any branch and flavour: another choice replaces them."""
        return list(dict.fromkeys(self._pattern(name, "[0-9]*") for row in self.rows for name in _every_name(row)))

    def replaced(self, wanted: t.Sequence[str], flavour: str) -> list[str]:
        """Return what an earlier choice installed and held under another name: it has to be removed first."""
        if self._options.packages:
            return []
        per_kernel = (self.row.get("per_kernel") or {}).get(flavour) or ()
        stays = [name.partition("=")[0] for name in wanted]
        stays += [self._pattern(name, str(self.branch)) for name in per_kernel]
        patterns = self.replaceable()
        # Those of another branch aren't held; they came with packages that are.
        ours = any(row.get("held") and _matches(name, patterns) for name, row in self._installed.items())
        endings = tuple(f"-{ending}" for ending, _headers in followed(self._installed).values() if ending)
        metapackages = [name for name in self._installed if ours and endings and name.endswith(endings)]
        return sorted(
            name
            for name, row in self._installed.items()
            if (row.get("held") or name in metapackages) and _matches(name, patterns) and not _matches(name, stays)
        )

    def ever_installed(self) -> list[str]:
        """Return the names of all packages that any choice may have installed on this node."""
        names: list[str] = []
        for row in self.rows:
            for name in (*_every_name(row), *(row.get("nvlink5") or ())):
                pattern = self._pattern(name, str(self.branch))
                if "*" in pattern:
                    names += sorted(
                        installed for installed in self._installed if fnmatch.fnmatchcase(installed, pattern)
                    )
                else:
                    names.append(pattern)
        return list(dict.fromkeys([*names, *self._options.packages]))

    def _pattern(self, name: str, branch: str) -> str:
        """Return a name of the catalogue for any kernel, and for a branch or a pattern of branches."""
        name = name.partition("=")[0].replace("{branch}", branch)
        return self._filled(name.replace("{kernel}", "*").replace("{flavour}", "*"))

    def _filled(self, text: str, kernel: str = "") -> str:
        """Return a text of the catalogue with its placeholders in braces replaced."""
        values = {
            "version": self._version,
            "branch": str(self.branch),
            "machine": MACHINES.get(self._arch, self._arch),
            "kernel": kernel,
            "kernel_version": _kernel_version(kernel),
            "minor": ".".join(kernel.split(".")[:2]),
            "flavour": kernel_flavour(kernel),
        }
        return re.sub(r"\{([a-z_]+)\}", lambda match: values[match.group(1)], text)

    def _of_distribution(self, values: JsonObject) -> t.Any:
        return values.get(str(self._distribution.get("id")), values.get("*"))

    # ------------------------------------------------------------------ kernels and their headers

    def kernels(self) -> list[str]:
        """Return the running and the newest installed kernel; none in a container, which has no kernel of its own."""
        return booted(self._kernel)

    def missing_headers(self) -> list[Headers]:
        """Return the packages of kernel headers for each kernel that lacks them."""
        kernels = self.kernels()
        modules: t.Mapping[str, t.Any] = self._kernel.get("modules") or {}
        sets: list[Headers] = []
        for kernel in kernels:
            running = {"headers": self._kernel.get("headers") if kernel == kernels[0] else None}
            if modules.get(kernel, running).get("headers") is not False:
                continue
            row = self._headers_row(kernel)
            names = (kernel == kernels[-1] and row.get("newest")) or row.get("each") or ()
            sets.append({"kernel": kernel, "packages": [self._filled(name, kernel) for name in names]})
        return sets

    def following(self) -> list[Headers]:
        """Return the metapackages of headers that are missing beside a kernel's: they bring those of its next release.

        Without them the next kernel has no headers, so no module is built for it. A held kernel has no next one.
        """
        if self.manager != "apt" or not self.kernels():
            return []
        return [
            {"kernel": name, "packages": [headers]}
            for name, (_flavour, headers) in sorted(followed(self._installed).items())
            if headers not in self._installed and not self._installed[name].get("held")
        ]

    def followers(self, flavour: str) -> dict[str, str]:
        """Return the metapackages of compiled modules, each with that of its kernel; a held kernel has none."""
        names = (self.row.get("per_kernel") or {}).get(flavour) or ()
        kernels = {}
        for name in names if not self._options.packages else ():
            for kernel, (ending, _headers) in sorted(followed(self._installed).items()):
                if "{kernel}" in name and ending and not self._installed[kernel].get("held"):
                    kernels[self._filled(name, ending)] = kernel
        return kernels

    def header_names(self) -> list[str]:
        """Return the names of all packages of headers for this node's kernels."""
        names = []
        for kernel in map(str, self._kernel.get("installed") or []):
            row = self._headers_row(kernel)
            names += [self._filled(name, kernel) for name in (*(row.get("each") or ()), *(row.get("newest") or ()))]
        names += [headers for _flavour, headers in followed(self._installed).values()] if self.manager == "apt" else []
        return list(dict.fromkeys(name.partition("=")[0] for name in names))

    def _headers_row(self, kernel: str) -> JsonObject:
        rows: t.Sequence[JsonObject] = self.data.get("headers") or []
        return next((row for row in rows if fnmatch.fnmatchcase(kernel, row["kernel"])), {})

    # ------------------------------------------------------------------ where the packages come from

    def url(self) -> str:
        """Return the repository's URL; empty for a source without one."""
        known = str(self._repository.get("url") or "")
        if self._options.source not in SECTIONS or not (known or self._options.source == "repository"):
            return ""
        address = self._options.repo_url or known
        return f"{address.rstrip('/')}/" if address else ""

    def key_pin(self) -> dict[str, str]:
        """Return what the repository's key is held to, ``key_sha256`` and ``key_fingerprint``; both may be empty.

        A mirror has the same key, or one of its own, whose SHA-256 the user gives.
        """
        if self._options.repo_key_sha256 != PINNED:
            return {"key_sha256": self._options.repo_key_sha256, "key_fingerprint": ""}
        row = self._repository
        pin = (self._options.tables.get("keys") or {}).get(f"{row.get('folder')}/{row.get('key')}") or {}
        return {"key_sha256": str(pin.get("sha256") or ""), "key_fingerprint": str(pin.get("fingerprint") or "")}

    def repositories(self) -> list[JsonObject]:
        """Return the entries of the option ``repositories`` of ``pinned_packages``."""
        url = self.url()
        if not url:
            return []
        repository: JsonObject = {
            "name": "cuda",
            "url": url,
            "key_url": self._options.repo_key_url or url + str(self._repository.get("key")),
            **self.key_pin(),
        }
        if self.manager == "apt":
            repository.update(
                suites=list(self._options.repo_suites),
                components=list(self._options.repo_components),
                architectures=[self._arch],
            )
        return [repository]

    def streams(self, flavour: str) -> list[StreamOption]:
        """Return the module streams; whether they may replace others has been validated before."""
        rows = self.source.get("streams") or () if self._options.source == "repository" else ()
        return [{"module": row["module"], "stream": self._filled(row[flavour]), "switch": True} for row in rows]

    def pins(self) -> list[JsonObject]:
        """Return the entries of the option ``pins`` of ``pinned_packages``."""
        rows = self.source.get("pins") or () if not self._options.of_runfile else ()
        return [{**row, "pin": self._filled(row["pin"])} for row in rows]

    def missing_prerequisites(self) -> list[Prerequisite]:
        """Return the repositories that have to be enabled first, with the commands."""
        rpm: t.Mapping[str, t.Any] = self._seen.get("rpm") or {}
        enabled = [
            str(repository.get("id")) for repository in rpm.get("repositories") or [] if repository.get("enabled")
        ]
        missing: list[Prerequisite] = []
        for row in self.source.get("prerequisites") or ():
            met = any(_matches(id, row["repositories"]) for id in enabled)
            if not met and not any(name in self._installed for name in row["packages"]):
                commands = self._of_distribution(row["commands"])
                filled = [[self._filled(word) for word in command] for command in commands]
                missing.append({"id": row["id"], "what": row["what"], "commands": filled})
        return missing


def _every_name(row: JsonObject) -> list[str]:
    """Return all names of a row, except those that other software may need too."""
    per_kernel: JsonObject = row.get("per_kernel") or {}
    lists = [row.get(key) or () for key in ("driver", *FLAVOURS, "fabric")]
    return [name for names in (*lists, *per_kernel.values()) for name in names]


def _matches(name: str, patterns: t.Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_of(data: JsonObject, distribution: t.Mapping[str, t.Any]) -> bool:
    """Return whether a catalogue, which is found by the major version, is of this release (24.10 isn't 24.04)."""
    return not data.get("version") or data["version"] == distribution.get("version")


def kernel_flavour(release: str) -> str:
    """Return the flavour in which the name of Ubuntu's and SUSE's kernels ends; empty where there is none."""
    match = KERNEL_FLAVOUR.fullmatch(release)
    return match.group(1) if match else ""


def _kernel_version(release: str) -> str:
    """Return a kernel's release as its packages' version: without the architecture and variant, or SUSE's flavour."""
    if kernel_flavour(release):
        return release[: -len(kernel_flavour(release)) - 1]
    return re.sub(r"[.](x86_64(_v[0-9])?|aarch64|noarch)([+.].*)?$", "", release)
