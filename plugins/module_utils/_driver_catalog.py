# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""What a node's distribution calls the driver's packages, repositories and headers. Pure.

The catalogue is role driver's ``vars/<id or family>_<major>.yml``: plain data, whose words in braces are filled in.
"""

from __future__ import annotations

import fnmatch
import re
import typing as t

Json = t.Mapping[str, t.Any]

FLAVOURS = ("open", "proprietary")
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


class Catalog:
    """The catalogue as one node, one version and one source of packages read it.

    :param options: role driver's variables without their prefix.
    """

    def __init__(self, gpu_node: Json, data: Json, options: Json) -> None:
        self._data = data
        self._options = options
        self._seen = gpu_node
        self._distribution: Json = gpu_node.get("distribution") or {}
        self._kernel: Json = gpu_node.get("kernel") or {}
        self._installed: t.Mapping[str, Json] = gpu_node.get("packages") or {}
        self._arch = str(self._distribution.get("arch"))
        self._source_name = str(options.get("source") or "repository")
        self._version = str(options.get("version") or "")
        numbers = re.match(r"[0-9]+", self._version)
        self.branch = int(numbers.group()) if numbers else 0
        self.known = bool(data)
        self.name = str(data.get("name") or "")
        self.manager = str(data.get("manager") or "none")
        self.architectures: Json = data.get("architectures") or {}
        # A folder of packages has those of NVIDIA's repository; a .run file needs what they need.
        self.source = self.source_of(
            "repository" if self._source_name in ("packages", "runfile") else self._source_name
        )
        self.rows: t.Sequence[Json] = [] if self._source_name == "runfile" else self.source.get("rows") or []
        # The names of this branch: rows stand from the newest to the oldest.
        self.row: Json = next((row for row in self.rows if self.branch >= row["since"]), {})

    def source_of(self, name: str) -> Json:
        """A source of packages; empty where this distribution has none."""
        one: Json = (self._data.get("sources") or {}).get(name) or {}
        only = one.get("only")
        return one if only is None or self._distribution.get("id") in only else {}

    def words(self, name: str) -> list[str]:
        """A list of the catalogue as it stands."""
        return list(self._data.get(name) or [])

    @property
    def persistence_override(self) -> str:
        return str((self._data.get("persistence") or {}).get("override") or "")

    # ------------------------------------------------------------------ names of packages

    def packages(self, flavour: str) -> list[str]:
        """The driver's packages, each ``name`` or ``name=version``."""
        if self._options.get("packages"):
            pattern = self._filled(self.source.get("version", "{version}-*"))
            return [f"{name}={pattern}" for name in self._options["packages"]]
        names = [self._filled(name) for name in (*self._of_row("driver"), *self._of_row(flavour))]
        for name in (self.row.get("per_kernel") or {}).get(flavour) or ():
            names += [self._filled(name, kernel) for kernel in self.kernels()]
        return names

    def fabric(self, nvlink5: bool) -> list[str]:
        """The fabric manager's packages; fifth generation NVLink needs more beside them."""
        return [self._filled(name) for name in (*self._of_row("fabric"), *(self._of_row("nvlink5") if nvlink5 else ()))]

    def _of_row(self, key: str) -> t.Sequence[str]:
        return self.row.get(key) or ()

    def replaceable(self) -> list[str]:
        """Patterns of all names that this source has for any branch and flavour: the next takes their place."""
        return list(dict.fromkeys(self._pattern(name, "[0-9]*") for row in self.rows for name in _every_name(row)))

    def replaced(self, wanted: t.Sequence[str], flavour: str) -> list[str]:
        """What an earlier choice installed and held under a name that this one has no more: it must go first."""
        if self._options.get("packages"):
            return []
        per_kernel = (self.row.get("per_kernel") or {}).get(flavour) or ()
        stays = [name.partition("=")[0] for name in wanted]
        stays += [self._pattern(name, str(self.branch)) for name in per_kernel]
        patterns = self.replaceable()
        return sorted(
            name
            for name, row in self._installed.items()
            if row.get("held") and _matches(name, patterns) and not _matches(name, stays)
        )

    def ever_installed(self) -> list[str]:
        """Names of all that may have been put on this node, whatever its cards were."""
        names: list[str] = []
        for row in self.rows:
            for name in (*_every_name(row), *(row.get("nvlink5") or ())):
                pattern = self._pattern(name, str(self.branch))
                if "*" in pattern:
                    names += sorted(one for one in self._installed if fnmatch.fnmatchcase(one, pattern))
                else:
                    names.append(pattern)
        return list(dict.fromkeys([*names, *(self._options.get("packages") or ())]))

    def _pattern(self, name: str, branch: str) -> str:
        """A name of the catalogue for any kernel, and for a branch or a pattern of one."""
        return self._filled(name.partition("=")[0].replace("{branch}", branch).replace("{kernel}", "*"))

    def _filled(self, text: str, kernel: str = "") -> str:
        """A text of the catalogue with its words in braces filled in."""
        words = {
            "version": self._version,
            "branch": str(self.branch),
            "arch": str(self.architectures.get(self._arch, self._arch)),
            "machine": MACHINES.get(self._arch, self._arch),
            "folder": str(self._of_distribution(self._data.get("folder") or {}) or ""),
            "kernel": kernel,
            "kernel_version": _kernel_version(kernel),
        }
        return re.sub(r"\{([a-z_]+)\}", lambda found: words[found.group(1)], text)

    def _of_distribution(self, values: Json) -> t.Any:
        return values.get(str(self._distribution.get("id")), values.get("*"))

    # ------------------------------------------------------------------ kernels and their headers

    def kernels(self) -> list[str]:
        """The running kernel and the newest of those installed; none in a container, which has no kernel of its own."""
        installed = [str(one) for one in self._kernel.get("installed") or []]
        if not installed:
            return []
        return list(dict.fromkeys([str(self._kernel.get("release")), max(installed, key=_natural)]))

    def missing_headers(self) -> list[dict[str, t.Any]]:
        """Per kernel that lacks them, the packages of its headers."""
        kernels = self.kernels()
        modules: Json = self._kernel.get("modules") or {}
        sets = []
        for kernel in kernels:
            running = {"headers": self._kernel.get("headers") if kernel == kernels[0] else None}
            if modules.get(kernel, running).get("headers") is not False:
                continue
            row = self._headers_row(kernel)
            names = (kernel == kernels[-1] and row.get("newest")) or row.get("each") or ()
            sets.append({"kernel": kernel, "packages": [self._filled(name, kernel) for name in names]})
        return sets

    def header_names(self) -> list[str]:
        """Names of all packages of headers that this node's kernels may have."""
        names = []
        for kernel in map(str, self._kernel.get("installed") or []):
            row = self._headers_row(kernel)
            names += [self._filled(one, kernel) for one in (*(row.get("each") or ()), *(row.get("newest") or ()))]
        return list(dict.fromkeys(name.partition("=")[0] for name in names))

    def _headers_row(self, kernel: str) -> Json:
        rows: t.Sequence[Json] = self._data.get("headers") or []
        return next((row for row in rows if fnmatch.fnmatchcase(kernel, row["kernel"])), {})

    # ------------------------------------------------------------------ where the packages come from

    def url(self) -> str:
        if self._source_name in ("packages", "runfile") or not self.source.get("url"):
            return ""
        return str(self._options.get("repo_url") or self._filled(self.source["url"])).rstrip("/") + "/"

    def repositories(self) -> list[dict[str, t.Any]]:
        url = self.url()
        if not url:
            return []
        repository: dict[str, t.Any] = {
            "name": "cuda",
            "url": url,
            "key_url": str(self._options.get("repo_key_url") or url + self.source["key"]),
            "key_sha256": str(self._options.get("repo_key_sha256") or ""),
        }
        if self.manager == "apt":
            repository.update(
                suites=list(self._options.get("repo_suites") or ["/"]),
                components=list(self._options.get("repo_components") or []),
                architectures=[self._arch],
            )
        return [repository]

    def streams(self, flavour: str) -> list[dict[str, t.Any]]:
        """Streams of modules; whether another one may be left for them is judged before."""
        rows = self.source.get("streams") or () if self._source_name == "repository" else ()
        return [{"module": row["module"], "stream": self._filled(row[flavour]), "switch": True} for row in rows]

    def pins(self) -> list[dict[str, t.Any]]:
        rows = self.source.get("pins") or () if self._source_name != "runfile" else ()
        return [{**row, "pin": self._filled(row["pin"])} for row in rows]

    def missing_prerequisites(self) -> list[dict[str, t.Any]]:
        """What must be enabled on the machine first, with the commands that do."""
        repositories = (self._seen.get("rpm") or {}).get("repositories") or []
        enabled = [str(one.get("id")) for one in repositories if one.get("enabled")]
        missing = []
        for row in self.source.get("prerequisites") or ():
            met = any(_matches(id, row["repositories"]) for id in enabled)
            if not met and not any(name in self._installed for name in row["packages"]):
                commands = self._of_distribution(row["commands"])
                filled = [[self._filled(word) for word in command] for command in commands]
                missing.append({"id": row["id"], "what": row["what"], "commands": filled})
        return missing


def _every_name(row: Json) -> list[str]:
    """All names of a row but those that others may need too."""
    per_kernel: Json = row.get("per_kernel") or {}
    lists = [row.get(key) or () for key in ("driver", *FLAVOURS, "fabric")]
    return [name for names in (*lists, *per_kernel.values()) for name in names]


def _matches(name: str, patterns: t.Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts version numbers as numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"[0-9]+|[^0-9]+", text)]


def _kernel_version(release: str) -> str:
    """A kernel's release as its packages' version: without the architecture, or SUSE's flavour, at its end."""
    return re.sub(r"[.](x86_64|aarch64|noarch)$|-(default|azure|64kb|rt|preempt|longterm)$", "", release)
