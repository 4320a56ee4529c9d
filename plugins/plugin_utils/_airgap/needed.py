# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What an inventory needs of the list: where it is public, and where this inventory takes it from. Pure."""

from __future__ import annotations

import dataclasses
import re
import typing as t

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject
from ...module_utils._images.names import repository_and_tag
from ...module_utils._scheduler.dedicated import upstream
from .table import Row, Table

IMAGE, CHART, FILE, WHEEL, COLLECTION, OPERATOR = "image", "chart", "file", "wheel", "collection", "operator"
# In the order in which they are listed; packages are of the kind of their manager.
KINDS = (IMAGE, CHART, "apt", "rpm", FILE, WHEEL, COLLECTION, OPERATOR)
OPERATOR_SOFTWARE = "gpu_operator"
# The variable that has a registry, in which images have the paths that they have in their own.
REGISTRIES = ("gpu_operator_registry",)
# The image of the GPU Operator's driver: its tag ends with the node's distribution.
DRIVER_IMAGE = "gpu-operator-driver"
GPUSHARE, DEDICATED, OPENSHIFT = "gpushare", "dedicated", "openshift"
# OpenShift's own sources of operators.
CATALOGS = ("redhat-operators", "certified-operators")
# Names of images that no registry has.
LOCAL = "localhost/"
PINNED = "pinned"
_RELEASE = re.compile(r"v?([0-9]+\.[0-9]+\.[0-9]+)")
_WORD = re.compile(r"\{([a-z_]+)\}")
_USER = re.compile(r"://[^/\s]*@")
_INDEX_URL = re.compile(r"(?:^|\s)(?:--index-url|-i)[=\s]+(\S+)")


class Item(t.TypedDict):
    """One image, file, package or the like that is needed.

    :ivar kind: one of ``KINDS``.
    :ivar id: its section and row of the list.
    :ivar version: empty where the name says it, or any does; packages have a pattern, wheels a condition.
    :ivar digest: ``sha256:...`` of the file, or of the image's index; empty where a repository's key signs, or it isn't
        known.
    :ivar platforms: by architecture, digest and bytes of an image's manifest, as far as they are known; the digest of a
        file whose address has ``{architecture}``.
    :ivar architectures: those of the machines that need it; empty where that doesn't matter.
    :ivar source: where it is public: an address, a reference or a repository; empty for the distribution's own lists.
    :ivar key: of a package's repository.
    :ivar indexes: folders of the lists of an apt repository, below its address.
    :ivar place: where this inventory takes it from; empty where that is ``source``.
    :ivar variables: those that take another place.
    :ivar hosts: machines that need it; empty where the cluster or the controller does.
    """

    kind: str
    id: str
    name: str
    version: str
    digest: str
    platforms: dict[str, JsonObject]
    architectures: list[str]
    source: str
    key: str
    indexes: list[str]
    place: str
    variables: list[str]
    hosts: list[str]
    licence: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """A host of group gpu_nodes.

    :param distribution: ``gpu_node.distribution``.
    :param variables: a role's variable by its name, with the role's default.
    :param driver: what the filter ``driver_choice`` returns; None where role driver has nothing to install.
    :param by_roles: roles install its driver and toolkit, and not the GPU Operator or a provider.
    """

    host: str
    distribution: t.Mapping[str, t.Any]
    variables: t.Callable[[str], t.Any]
    driver: JsonObject | None = None
    by_roles: bool = True


@dataclasses.dataclass(frozen=True)
class Inventory:
    """What decides on the list.

    :param kubernetes: the cluster's version, such as ``v1.36.3``; empty where it isn't known.
    :param openshift: OpenShift's, such as ``4.20.3``; empty for another Kubernetes.
    :param backends: those that nodes have or are to have, of gpushare, hami and nvidia.
    :param scheduler: ``dedicated``, ``openshift`` for the Secondary Scheduler Operator, or another mode.
    :param delivery: how nodes get the servers' image: build, import or registry.
    :param software: who installs the driver of nodes beside the roles: ``gpu_operator``, or none of them.
    :param variables: of localhost.
    """

    kubernetes: str
    openshift: str
    backends: frozenset[str]
    scheduler: str
    delivery: str
    variables: t.Callable[[str], t.Any]
    machines: tuple[Machine, ...] = ()
    software: frozenset[str] = frozenset()


def needed(table: Table, inventory: Inventory) -> list[Item]:
    """Return what an inventory needs, in the order of ``KINDS``.

    :raises BadInput: a name needs the cluster's version, which isn't known, or upstream has none of it.
    """
    return _Needed(table, inventory).items()


def row_of(table: Table, first: str, distribution: t.Mapping[str, t.Any], last: str = "") -> tuple[str, Row] | None:
    """Return key and row of a distribution's packages: by its id, else by its family, as role driver finds them.

    :param first: the key's first part; ``last`` its last one, where it has three.
    """
    major = str(distribution.get("version")).partition(".")[0]
    for name in (distribution.get("id"), distribution.get("family")):
        key = "/".join((first, f"{name}_{major}", *([last] if last else [])))
        if key in table["packages"]:
            return key, table["packages"][key]
    return None


def repository_of(row: Row, distribution: t.Mapping[str, t.Any]) -> Row | None:
    """Return a distribution's repository of a row of packages; None where its own lists have them."""
    folders = row["folders"].get(str(distribution.get("id"))) or row["folders"].get("*") or [""]
    for folder in folders:
        for name, repository in row["repositories"].items():
            if (not folder or name.startswith(f"{folder}/")) and repository["arch"] == distribution.get("arch"):
                return t.cast(Row, repository)
    return None


class _Needed:
    """Collects the items; machines that need the same share one."""

    def __init__(self, table: Table, inventory: Inventory) -> None:
        self.table = table
        self.known = inventory
        self.found: dict[tuple[str, ...], Item] = {}

    def items(self) -> list[Item]:
        self._images()
        self._charts()
        for machine in self.known.machines:
            if machine.by_roles:
                self._driver(machine)
                self._toolkit(machine)
        self._others()
        found = sorted(self.found.values(), key=lambda item: (KINDS.index(item["kind"]), item["name"], item["source"]))
        return [{**item, "hosts": sorted(item["hosts"])} for item in found]

    @property
    def _operated(self) -> bool:
        return OPERATOR_SOFTWARE in self.known.software

    # ------------------------------------------------------------------ conditions and words

    def _holds(self, row: Row, variables: t.Callable[[str], t.Any], **more: t.Any) -> bool:
        """Return whether all conditions of a row hold."""
        facts: dict[str, t.Collection[t.Any]] = {
            "backend": self.known.backends,
            "scheduler": [self.known.scheduler],
            "kubernetes": [".".join(self.known.kubernetes.lstrip("v").split(".")[:2])],
            "built": [self.known.delivery == "build"],
            "openshift": [bool(self.known.openshift)],
            "software": self.known.software,
            "helm": [bool(self.known.backends & {"hami", "nvidia"}) or (self._operated and not self.known.openshift)],
            **{name: [value] for name, value in more.items()},
        }
        for name, values in row["when"].items():
            have = facts[name] if name in facts else [_plain(variables(name), values)]
            if not any(value in values for value in have):
                return False
        return True

    def _filled(self, text: str, variables: t.Callable[[str], t.Any]) -> str:
        """Return a text of the list with its words replaced."""

        def word(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in ("kubernetes", "upstream"):
                release = _RELEASE.match(self.known.kubernetes)
                if not release:
                    raise BadInput(f"the cluster's version isn't known, and {text} has it: set airgap_kubernetes")
                return upstream(release.group(1)) if name == "upstream" else release.group(1)
            if name == "openshift":
                return ".".join(self.known.openshift.split(".")[:2])
            return str(variables(name)) if name != "architecture" else match.group()

        return _WORD.sub(word, text)

    def _add(self, item: Item, host: str = "", architecture: str = "") -> None:
        key = (item["kind"], item["name"], item["version"], item["source"], item["place"])
        known = self.found.setdefault(key, item)
        for field, value in (("hosts", host), ("architectures", architecture)):
            values: list[str] = known[field]  # type: ignore[literal-required]
            if value and value not in values:
                values.append(value)

    def _set(self, name: str, variables: t.Callable[[str], t.Any] | None = None) -> t.Any:
        return (variables or self.known.variables)(name)

    # ------------------------------------------------------------------ the cluster

    def _images(self) -> None:
        architectures = sorted({str(machine.distribution.get("arch")) for machine in self.known.machines})
        for name, row in self.table["images"].items():
            if not self._holds(row, self.known.variables):
                continue
            if row["made_by"]:
                self._servers_image(name, row)
                continue
            if name == DRIVER_IMAGE:
                self._driver_images(name, row)
                continue
            place = self._image_place(row)
            if not row["reference"] and not place:
                continue
            source = self._filled(row["reference"], self.known.variables) or place
            # Named without a tag, it gets the same one.
            repository, tag = repository_and_tag(place)
            if place and not tag and row["reference"]:
                place = f"{repository}:{repository_and_tag(source)[1]}"
            place = "" if place in (source, f"{source}@{row['digest']}") else place
            found = _item(IMAGE, f"images/{name}", source, row, source=source, digest=row["digest"], place=place)
            self._add({**found, "platforms": dict(row["platforms"]), "architectures": architectures})

    def _driver_images(self, name: str, row: Row) -> None:
        """Add the image of the GPU Operator's driver for each distribution of machines whose facts are known."""
        if self._set("gpu_operator_driver") == "host":
            return
        repository, tag = repository_and_tag(row["reference"])
        version = str(self._set("gpu_operator_driver_version") or tag)
        for machine in self.known.machines:
            source = f"{repository}:{version}-{machine.distribution.get('id')}{machine.distribution.get('version')}"
            place = self._image_place({**row, "reference": source})
            item = _item(IMAGE, f"images/{name}", source, row, source=source, place=place)
            self._add(item, machine.host, str(machine.distribution.get("arch")))

    def _image_place(self, row: Row) -> str:
        """Return the image that a variable names; empty where it names none."""
        value = self._set(row["variables"][0])
        if row["variables"][0] in REGISTRIES:
            return f"{str(value).rstrip('/')}/{row['reference'].partition('/')[2]}" if value else ""
        if not row["path"]:
            return str(value or "")
        own = str(value or "")
        # A chart's values take precedence.
        value = self._set(row["variables"][-1])
        for part in row["path"].split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if not isinstance(value, dict) or not value.get("repository"):
            return own
        tag = value.get("tag") or repository_and_tag(row["reference"])[1]
        return f"{value['repository']}:{tag}"

    def _servers_image(self, name: str, row: Row) -> None:
        """Add the servers' image, unless the run builds it; an archive is a file on the controller."""
        image, archive = str(self._set("gpushare_image") or row["reference"]), self._set("gpushare_image_archive")
        if self.known.delivery == "build":
            return
        imported = self.known.delivery == "import"
        kind, place = (FILE, str(archive or "")) if imported else (IMAGE, image)
        self._add(_item(kind, f"images/{name}", image, row, source=row["made_by"], place=place))

    def _charts(self) -> None:
        for name, row in self.table["charts"].items():
            if not self._holds(row, self.known.variables):
                continue
            repository, reference = (str(self._set(variable) or "") for variable in row["variables"])
            stem = row["variables"][1].removesuffix("_ref")
            version = str(self._set(f"{stem}_version") or row["version"])
            sha256 = str(self._set(f"{stem}_sha256") or "")
            sha256 = row["sha256"] if sha256 == PINNED and version == row["version"] else sha256.replace(PINNED, "")
            place = reference if "/" in reference else repository
            place = "" if place.rstrip("/") == row["url"].rstrip("/") else place
            digest = f"sha256:{sha256}" if sha256 else ""
            self._add(_item(CHART, f"charts/{name}", name, row, version, source=row["url"], digest=digest, place=place))

    # ------------------------------------------------------------------ machines

    def _driver(self, machine: Machine) -> None:
        choice = machine.driver
        if not choice or choice["provided"] or choice["manager"] == "none":
            return
        source = str(self._set("driver_source", machine.variables))
        if source == "runfile":
            row = self.table["files"]["runfile"]
            digest = self._set("driver_runfile_sha256", machine.variables)
            place = str(self._set("driver_runfile", machine.variables))
            more = {"digest": f"sha256:{digest}" if digest else "", "place": place}
            name = f"NVIDIA-Linux-{self._set('driver_version', machine.variables)}"
            self._add(_item(FILE, "files/runfile", name, row, **more), machine.host)
        else:
            names = [*choice["packages"], *(name for name in choice["follows"] if name not in choice["packages"])]
            found = row_of(self.table, "driver", machine.distribution, "repository" if source == "packages" else source)
            self._packages(machine, found, names, "driver")
            for url in (word for row in choice["prerequisites"] for each in row["commands"] for word in each):
                self._enabling(machine, url)
        built = source == "runfile" or any("dkms" in name for name in choice["packages"])
        if built:
            headers = [name for row in choice["headers"] for name in row["packages"]]
            self._packages(machine, row_of(self.table, "headers", machine.distribution), headers)
            compilers = row_of(self.table, "compilers", machine.distribution)
            self._packages(machine, compilers, compilers[1]["names"] if compilers else [])

    def _enabling(self, machine: Machine, url: str) -> None:
        """Add a package that is downloaded by its address to enable a repository."""
        for name, row in self.table["files"].items():
            if row["url"] == url and "://" in url:
                self._add(_item(FILE, f"files/{name}", url.rpartition("/")[2], row, source=url), machine.host)

    def _toolkit(self, machine: Machine) -> None:
        family = {"debian": "apt", "redhat": "rpm", "suse": "rpm"}.get(str(machine.distribution.get("family")))
        row = self.table["packages"].get(f"toolkit/{family}")
        if row and self._holds(row, machine.variables):
            version = self._set("toolkit_version", machine.variables)
            names = [f"{name}={version}" for name in self._set("toolkit_packages", machine.variables)]
            self._packages(machine, (f"toolkit/{family}", row), names, "toolkit")

    def _packages(self, machine: Machine, found: tuple[str, Row] | None, names: list[str], prefix: str = "") -> None:
        """Add packages of one source, and the key of its repository.

        :param prefix: of the variables that name another place; empty for the distribution's own packages.
        """
        if not found:
            return
        key, row = found
        repository = repository_of(row, machine.distribution)
        values = {name: str(self._set(f"{prefix}_{name}", machine.variables) or "") for name in ("source", "repo_url")}
        if prefix and values["source"] == "packages":
            folder = {"driver": "driver_packages_dir", "toolkit": "toolkit_source_dir"}[prefix]
            place = str(self._set(folder, machine.variables) or "")
        else:
            place = values["repo_url"] if prefix and repository else ""
        source = repository["url"] if repository else ""
        place = "" if place.rstrip("/") == source.rstrip("/") else place
        architecture = str(machine.distribution.get("arch"))
        indexes = self._indexes(machine, prefix, architecture) if prefix and row["manager"] == "apt" else []
        for text in names:
            name, _equals, version = text.partition("=")
            item = _item(row["manager"], f"packages/{key}", name, row, version, source=source, place=place)
            item["key"] = repository["key"] if repository else ""
            item["indexes"] = indexes if repository else []
            self._add(item, machine.host, architecture)
        if prefix and repository and names and values["source"] != "packages":
            self._key(machine, prefix, repository, place)

    def _indexes(self, machine: Machine, prefix: str, architecture: str) -> list[str]:
        """Return where an apt repository has its lists: a suite that ends in a slash is a folder."""
        suites = self._set(f"{prefix}_repo_suites", machine.variables) or []
        components = self._set(f"{prefix}_repo_components", machine.variables) or []
        return [
            folder
            for suite in map(str, suites)
            for folder in (
                [suite.lstrip("./")]
                if suite.endswith("/")
                else [f"dists/{suite}/{component}/binary-{architecture}/" for component in components]
            )
        ]

    def _key(self, machine: Machine, prefix: str, repository: Row, place: str) -> None:
        key = f"key/{repository['key']}"
        row = self.table["files"][key]
        sha256 = str(self._set(f"{prefix}_repo_key_sha256", machine.variables) or "")
        sha256 = row["sha256"] if sha256 == PINNED else sha256
        # As the roles have it: the driver's key is beside its packages, the toolkit's at its own address.
        beside = f"{place.rstrip('/')}/{key.rpartition('/')[2]}" if place and prefix == "driver" else ""
        at = str(self._set(f"{prefix}_repo_key_url", machine.variables) or beside)
        folder = repository["url"] if prefix == "driver" else ""
        source = f"{folder}{key.rpartition('/')[2]}" if folder else row["url"]
        more = {"source": source, "place": "" if at == source else at, "digest": f"sha256:{sha256}" if sha256 else ""}
        self._add(_item(FILE, f"files/{key}", key.removeprefix("key/"), row, **more), machine.host)

    # ------------------------------------------------------------------ the controller

    def _others(self) -> None:
        row = self.table["files"]["program/helm"]
        if self._holds(row, self.known.variables):
            place = next((str(self._set(name)) for name in row["variables"] if self._set(name)), "")
            item = _item(FILE, "files/program/helm", "helm", row, source=row["url"], place=place)
            platforms = {name: {"digest": f"sha256:{sha256}"} for name, sha256 in row["digests"].items()}
            self._add({**item, "platforms": platforms})
        index = _INDEX_URL.search(str(self._set("image_build_pip_args") or ""))
        for name, row in self.table["wheels"].items():
            if self._holds(row, self.known.variables):
                place = index.group(1) if index and row["variables"] else ""
                source = f"https://pypi.org/simple/{row['name']}/"
                self._add(_item(WHEEL, f"wheels/{name}", row["name"], row, row["version"], source=source, place=place))
        for name, row in self.table["collections"].items():
            source = "https://galaxy.ansible.com/"
            self._add(_item(COLLECTION, f"collections/{name}", name, row, row["version"], source=source))
        for name, row in self.table["operators"].items():
            if self._holds(row, self.known.variables):
                source, place = self._filled(row["catalog"], self.known.variables), str(self._set(row["variables"][0]))
                channel = self._filled(row["channel"], self.known.variables)
                found = _item(OPERATOR, f"operators/{name}", name, row, channel, source=source)
                self._add({**found, "place": "" if place in CATALOGS else place})


def without_credentials(item: Item) -> Item:
    """Return an item whose place has no user and password: lists and archives are read by others."""
    return t.cast(Item, {**item, "place": _USER.sub("://", item["place"])})


def _item(kind: str, id: str, name: str, row: Row, version: str = "", **more: str) -> Item:
    return {
        "kind": kind,
        "id": id,
        "name": name,
        "version": version,
        "digest": more.get("digest", ""),
        "platforms": {},
        "architectures": [],
        "source": more.get("source", ""),
        "key": "",
        "indexes": [],
        "place": more.get("place", ""),
        "variables": list(row["variables"]),
        "hosts": [],
        "licence": row["licence"],
    }


def _plain(value: t.Any, values: t.Sequence[t.Any]) -> t.Any:
    """Return a variable's value as those that it is compared with: a flag may be given as text."""
    if any(isinstance(each, bool) for each in values) and isinstance(value, str):
        return value.strip().lower() in ("yes", "on", "true", "1", "y", "t")
    return value
