# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Resolve package sets with dnf or zypper, as for a machine on which nothing is installed, and find their files."""

from __future__ import annotations

import posixpath
import re
import typing as t
from abc import ABC, abstractmethod

from .._core.errors import ShareError
from .._host.system import System
from .._packages.apply import LONG, QUIET, Commands
from .._packages.options import ARMOUR, Fetch, Package, Repository
from .._packages.paths import MANAGERS, MARK, Manager
from .._packages.rpm_backends import reason
from .._packages.rpm_locks import by_version, matches
from . import rpm_lists
from .keys import armoured
from .rpm_lists import Rpm, Section
from .store import Certificates, Store
from .types import DISTRIBUTION
from .wanted import Outcome, Part, Resolved, Wanted, keys_of, repositories_of
from .wanted import Package as Taken

REPOMD = "repodata/repomd.xml"
# Signature and key of repomd.xml.
BESIDE = ("repodata/repomd.xml.key", "repodata/repomd.xml.asc")
_RELEASEVER = re.compile(r"^system-release\(releasever\) = (\S+)", re.MULTILINE)


class Source(t.NamedTuple):
    """A repository of the machine or of the sets, as its package manager has it.

    :param base: its address as configured; empty where a list of mirrors names it.
    :param key: its public keys, armoured.
    """

    id: str
    base: str
    role: str
    key: str
    signed: tuple[str, ...]
    certificates: Certificates


class Listed(t.NamedTuple):
    """A package, and the repository that has it."""

    source: str
    rpm: Rpm


class RpmResolver(ABC):
    """What is the same with dnf and zypper.

    :param release: ``gpu_node.distribution.version``.
    """

    work: t.ClassVar[str]

    def __init__(self, store: Store, fetch: Fetch, manager: Manager, release: str) -> None:
        self.store = store
        self.system: System = store.system
        self.manager = manager
        self.commands = Commands(store.system, reason)
        self.fetch = fetch
        self.release = release
        self.top = store.at(self.work)
        self.variables = self._variables()

    # ------------------------------------------------------------------ of the package manager

    @abstractmethod
    def options(self) -> list[str]:
        """Return program and options with which it uses its own repositories, caches and empty database."""

    @abstractmethod
    def refresh(self) -> None: ...

    @abstractmethod
    def plan(self, wanted: Wanted, specs: t.Sequence[str], listed: t.Sequence[Listed]) -> list[Listed]:
        """Return all that would be installed.

        :raises ShareError: it can't be resolved.
        """

    @abstractmethod
    def metadata(self, id: str) -> str:
        """Return the folder with the repository's ``repodata``, as it was downloaded and verified; empty without."""

    @abstractmethod
    def spec(self, name: str, version: str) -> str: ...

    def base_of(self, source: Source, rpm: Rpm) -> str:
        """Return the address that a package of a repository is below, with a slash at its end."""
        return f"{source.base.rstrip('/')}/"

    # ------------------------------------------------------------------ the course

    def resolve(self, sets: t.Sequence[Wanted], download: bool) -> Outcome:
        """Return the repositories and files that the sets need.

        :raises ShareError: a set can't be resolved, or a repository is signed by none of its keys.
        """
        named = repositories_of(sets)
        keys = keys_of(named, self.fetch)
        sources = {source.id: source for source in self._prepare(sets, named, keys)}
        self.refresh()
        listed = [Listed(id, rpm) for id in sources for rpm in self._listed(id)]
        for repository in named:
            if not any(row.source == f"{MARK}{repository.name}" for row in listed):
                raise ShareError(f"repository {repository.name}: {self.manager.name} has no list of {repository.url}")
        taken: dict[tuple[str, str], Listed] = {}
        left_out: list[str] = []
        for wanted in sets:
            for row in self._set(wanted, listed, left_out):
                taken[row.source, row.rpm.path] = row
        return Outcome(list(self._repositories(sources, list(taken.values()), download)), sorted(set(left_out)))

    def _set(self, wanted: Wanted, listed: t.Sequence[Listed], left_out: list[str]) -> list[Listed]:
        specs = [self._spec(package, wanted, listed) for package in wanted.spec.packages]
        if any(row.rpm.name == self.manager.lock_plugin for row in listed):
            # The nodes need it to hold the driver's version.
            specs.append(self.manager.lock_plugin)
        found = self.plan(wanted, specs, listed)
        beside = self._beside([row.rpm for row in found], {row.rpm.name for row in listed})
        if beside:
            try:
                found = self.plan(wanted, [*specs, *beside], listed)
            except ShareError:
                left_out += beside
        return found

    def _spec(self, package: Package, wanted: Wanted, listed: t.Sequence[Listed]) -> str:
        """Return a package as its manager names it, in the newest version that fits a pattern."""
        if not package.version:
            return package.name
        versions = {row.rpm.version for row in listed if row.rpm.name == package.name}
        fitting = [version for version in versions if matches(package.version, version)]
        if not fitting:
            other = f"; there are {', '.join(sorted(versions)[-3:])}" if versions else ""
            raise ShareError(
                f"set {wanted.spec.name}: {self.manager.name} can't resolve {package}: no repository has it{other}",
                code="unresolved",
            )
        return self.spec(package.name, max(fitting, key=by_version))

    def _beside(self, taken: t.Sequence[Rpm], listed: t.Container[str]) -> list[str]:
        """Return listed packages that this machine has, and that are made from the same sources as what is taken.

        Where a node has them, they have to change along: glibc and glibc-langpack-en are of one version.
        """
        done = self.commands.must(["rpm", "-qa", "--qf", "%{NAME}\\t%{SOURCERPM}\\n"])
        sources, names = {rpm.source for rpm in taken}, {rpm.name for rpm in taken}
        rows = [line.split("\t") for line in done.out.splitlines()]
        return sorted(
            {
                row[0]
                for row in rows
                # Kernels are installed beside each other.
                if len(row) == 2
                and rpm_lists.source_name(row[1]) in sources
                and row[0] not in names
                and row[0] in listed
                and not row[0].startswith("kernel")
            }
        )

    def _listed(self, id: str) -> t.Iterator[Rpm]:
        folder = self.metadata(id)
        if not folder:
            return
        rows = rpm_lists.data(self._repomd(folder, id), id)
        forms = [row for row in rows if row.type == "primary"]
        path = f"{folder}/{forms[0].path}"
        if not self.system.exists(path):
            zchunk = next((row for row in rows if row.type == "primary_zck"), None)
            path = f"{folder}/{zchunk.path}" if zchunk else path
        with self.store.unpacked(path) as stream:
            yield from rpm_lists.rpms(stream, id)

    def _repomd(self, folder: str, id: str) -> str:
        content = self.store.read(f"{folder}/{REPOMD}")
        if content is None:
            raise ShareError(f"{id}: {self.manager.name} has no repomd.xml of it")
        return content.decode("utf-8", "replace")

    # ------------------------------------------------------------------ repositories

    def _prepare(
        self, sets: t.Sequence[Wanted], named: t.Sequence[Repository], keys: t.Mapping[str, str]
    ) -> list[Source]:
        """Write the repositories, the machine's and the sets', into a folder of their own."""
        folder = self.store.empty(f"{self.work}/repos")
        self.store.empty(f"{self.work}/root")
        root = f"{self.top}/root"
        self.commands.must(["rpm", "--root", root, "--initdb"])
        found = []
        ours = [repository.url.rstrip("/") for repository in named]
        machine = MANAGERS[self.manager.name].repositories
        for name in self.system.names(machine):
            text = self.system.read(f"{machine}/{name}") if name.endswith(".repo") and MARK not in name else None
            # An empty root has no variables of its own, so they are replaced here.
            rows = [row for row in rpm_lists.sections(self._filled(text or "")) if row.id != "main"]
            kept = [row for row in rows if rpm_lists.on(row.fields.get("enabled"), True)]
            kept = [row for row in kept if row.fields.get("baseurl", "").rstrip("/") not in ours]
            found += [self._source(row) for row in kept]
            if kept:
                self.system.write(f"{folder}/{name}", "".join(self._section(row) for row in kept))
        for repository in named:
            path = f"{self.top}/keys/{repository.name}.asc"
            self.system.write(path, keys[repository.name])
            row = self._named(repository, path, any(wanted.spec.streams for wanted in sets))
            self.system.write(f"{folder}/{row.id}.repo", self._section(row))
            role = next(wanted.role(repository.name) for wanted in sets if repository in wanted.spec.repositories)
            found.append(Source(row.id, repository.url, role, keys[repository.name], repository.signed, Certificates()))
        return found

    @staticmethod
    def _section(row: Section) -> str:
        return "".join([f"[{row.id}]\n", *(f"{name}={value}\n" for name, value in row.fields.items())])

    def _named(self, repository: Repository, key: str, streams: bool) -> Section:
        packages, metadata = (int(part in repository.signed) for part in ("packages", "metadata"))
        fields = {
            "name": repository.name,
            "baseurl": repository.url,
            "enabled": "1",
            "gpgkey": f"file://{key}",
            "skip_if_unavailable": "0",
            **(
                {"autorefresh": "1", "type": "rpm-md", "gpgcheck": "1", "pkg_gpgcheck": str(packages)}
                if self.manager.name == "zypper"
                # Where no stream is known, versions decide.
                else {"gpgcheck": str(packages), "module_hotfixes": str(int(not streams))}
            ),
            "repo_gpgcheck": str(metadata),
        }
        return Section(f"{MARK}{repository.name}", fields)

    def _source(self, row: Section) -> Source:
        fields = row.fields
        base = self._filled(fields.get("baseurl", "").split()[0]) if fields.get("baseurl", "").split() else ""
        certificates = Certificates(*(fields.get(name, "") for name in ("sslclientcert", "sslclientkey", "sslcacert")))
        return Source(row.id, base, DISTRIBUTION, "", self._signed(fields), certificates)

    def _signed(self, fields: t.Mapping[str, str]) -> tuple[str, ...]:
        """Return what a repository of the machine signs, as its configuration says."""
        general, zypper = self._general(), self.manager.name == "zypper"
        check = rpm_lists.on(fields.get("gpgcheck"), rpm_lists.on(general.get("gpgcheck"), zypper))
        if not zypper:
            metadata = rpm_lists.on(fields.get("repo_gpgcheck"), rpm_lists.on(general.get("repo_gpgcheck"), False))
            return tuple(name for name, yes in (("packages", check), ("metadata", metadata)) if yes)
        metadata = rpm_lists.on(fields.get("repo_gpgcheck"), check)
        packages = rpm_lists.on(fields.get("pkg_gpgcheck"), check and not metadata)
        return tuple(name for name, yes in (("packages", packages), ("metadata", metadata)) if yes)

    def _general(self) -> t.Mapping[str, str]:
        path = "/etc/zypp/zypp.conf" if self.manager.name == "zypper" else "/etc/dnf/dnf.conf"
        rows = rpm_lists.sections(self.system.read(path) or "")
        return next((row.fields for row in rows if row.id == "main"), {})

    def _keys(self, id: str) -> str:
        """Return the keys of a repository of the machine: those that it names, or all of rpm's database."""
        machine = MANAGERS[self.manager.name].repositories
        for name in self.system.names(machine):
            for row in rpm_lists.sections(self.system.read(f"{machine}/{name}") or ""):
                words = re.split(r"[\s,]+", self._filled(row.fields.get("gpgkey", ""))) if row.id == id else []
                files = [self._key(word, id) for word in words if word]
                if files:
                    return armoured(files, id)
        done = self.system.run(["rpm", "-q", "gpg-pubkey", "--qf", "%{DESCRIPTION}\\n"])
        if done.rc != 0 or ARMOUR[0] not in done.out:
            raise ShareError(f"repository {id}: it names no key (gpgkey), and rpm's database has none")
        return armoured([done.out.encode()], id)

    def _key(self, address: str, id: str) -> bytes:
        if address.startswith(("file:", "/")):
            found = self.store.read(re.sub(r"^file:(//)?", "", address))
            if found is None:
                raise ShareError(f"repository {id}: its key {address} isn't there")
            return found
        return self.fetch(address)

    def _filled(self, text: str) -> str:
        return rpm_lists.filled(text, self.variables)

    def _variables(self) -> dict[str, str]:
        machine = self.system.run(["uname", "-m"]).out.strip()
        found = {"basearch": machine, "arch": machine, "releasever": self._releasever()}
        zypper = self.manager.name == "zypper"
        for folder in ("/etc/zypp/vars.d",) if zypper else ("/etc/yum/vars", "/etc/dnf/vars"):
            for name in self.system.names(folder):
                found[name.lower()] = (self.system.read(f"{folder}/{name}") or "").strip()
        major, _dot, minor = found["releasever"].partition(".")
        return {**found, "releasever_major": major, "releasever_minor": minor}

    def _releasever(self) -> str:
        if self.manager.name == "zypper":
            return self.release
        done = self.system.run(["rpm", "-q", "--provides", "--whatprovides", "system-release(releasever)"])
        match = _RELEASEVER.search(done.out) if done.rc == 0 else None
        return match.group(1) if match else self.release.partition(".")[0]

    def _repositories(
        self, sources: t.Mapping[str, Source], taken: t.Sequence[Listed], download: bool
    ) -> t.Iterator[Resolved]:
        for id in dict.fromkeys(row.source for row in taken):
            source, rpms = sources[id], [row.rpm for row in taken if row.source == id]
            if not source.signed:
                raise ShareError(
                    f"repository {id} is needed for {rpms[0].name}, and its configuration says that neither its "
                    "packages nor its metadata are signed: set gpgcheck=1 or repo_gpgcheck=1 with its gpgkey",
                    code="unsigned",
                )
            key = source.key or self._keys(id)
            base = self.base_of(source, rpms[0])
            resolved = Resolved(base, source.role, key, source.signed, certificates=source.certificates)
            for rpm in rpms:
                local, url = self.downloaded(id, rpm), base + rpm.path
                part = Part(rpm.path, local, url, rpm.algorithm, rpm.digest, size=rpm.size)
                resolved.packages.append(Taken(part, rpm.name, rpm.version, rpm.architecture))
            if download:
                resolved.metadata = list(self._metadata(id, base))
            yield resolved

    def downloaded(self, id: str, rpm: Rpm) -> str:
        """Return where the package manager has a package that it has downloaded; empty where we download it."""
        return ""

    def _metadata(self, id: str, base: str) -> t.Iterator[Part]:
        """Yield all that repomd.xml names, its signature and key, and itself at the end."""
        folder = self.metadata(id)
        for row in rpm_lists.data(self._repomd(folder, id), id):
            local = f"{folder}/{row.path}"
            there = self.system.exists(local)
            needed = bool(rpm_lists.NEEDED.fullmatch(row.type)) or there
            yield Part(row.path, local if there else "", base + row.path, row.algorithm, row.digest, needed, row.size)
        for path in BESIDE:
            local = f"{folder}/{path}"
            yield Part(path, local if self.system.exists(local) else "", base + path, needed=False)
        yield Part(REPOMD, local=f"{folder}/{REPOMD}")


class DnfResolver(RpmResolver):
    """dnf 4, with its plugin ``download``, and dnf 5."""

    work = "work/dnf"

    def options(self) -> list[str]:
        return [
            *QUIET,
            self.manager.name,
            "-y",
            "-q",
            f"--setopt=reposdir={self.top}/repos",
            f"--setopt=cachedir={self.top}/cache",
            "--setopt=varsdir=/etc/yum/vars,/etc/dnf/vars",
            "--setopt=install_weak_deps=False",
            "--setopt=zchunk=False",
            f"--installroot={self.top}/root",
            f"--releasever={self.variables['releasever']}",
        ]

    def spec(self, name: str, version: str) -> str:
        return f"{name}-{version}"

    def refresh(self) -> None:
        self.commands.must([*self.options(), "--refresh", "makecache"], LONG)

    def metadata(self, id: str) -> str:
        cache = f"{self.top}/cache"
        form = re.compile(rf"{re.escape(id)}-[0-9a-f]{{16}}")
        found = [f"{cache}/{name}" for name in self.system.names(cache) if form.fullmatch(name)]
        return next((folder for folder in found if self.system.exists(f"{folder}/{REPOMD}")), "")

    def plan(self, wanted: Wanted, specs: t.Sequence[str], listed: t.Sequence[Listed]) -> list[Listed]:
        modules = [str(stream) for stream in wanted.spec.streams]
        if modules:
            self.commands.must([*self.options(), "module", "reset", *(name.partition(":")[0] for name in modules)])
            self.commands.must([*self.options(), "module", "enable", *modules])
        argv = [*self.options(), "download", "--resolve", "--alldeps", "--url", *specs]
        done = self.commands.run(argv, LONG)
        addresses = rpm_lists.urls(done.out)
        if done.rc != 0 or not addresses:
            what = reason(done)
            if "No such command" in done.err + done.out:
                what = "install dnf-plugins-core, which has its command download"
            raise ShareError(
                f"set {wanted.spec.name}: dnf can't resolve {', '.join(specs)}: {what}",
                code="unresolved",
                stdout=done.out[-8000:],
                stderr=done.err[-8000:],
            )
        return [self._of(address, listed) for address in addresses]

    def _of(self, address: str, listed: t.Sequence[Listed]) -> Listed:
        """Return the package at an address."""
        fitting = [row for row in listed if address.endswith(f"/{row.rpm.path}") or address == row.rpm.path]
        below = [row for row in fitting if self._known(row.source) and address.startswith(self._known(row.source))]
        found = below or fitting
        if not found:
            raise ShareError(f"{address} is in no list that dnf has downloaded, so it isn't taken")
        best = max(found, key=lambda row: len(row.rpm.path))
        self._bases[best.source] = address[: -len(best.rpm.path)]
        return best

    def base_of(self, source: Source, rpm: Rpm) -> str:
        return self._bases[source.id]

    def _known(self, id: str) -> str:
        return self._configured.get(id, "")

    def _prepare(
        self, sets: t.Sequence[Wanted], named: t.Sequence[Repository], keys: t.Mapping[str, str]
    ) -> list[Source]:
        sources = super()._prepare(sets, named, keys)
        # Its folders are named after addresses, which may have changed.
        self.store.empty(f"{self.work}/cache")
        self._bases: dict[str, str] = {}
        self._configured = {source.id: f"{source.base.rstrip('/')}/" for source in sources if source.base}
        return sources


class ZypperResolver(RpmResolver):
    """zypper, whose cache has packages at the paths of their repository."""

    work = "work/zypper"

    def options(self) -> list[str]:
        return [
            *QUIET,
            "zypper",
            "--non-interactive",
            "--root",
            f"{self.top}/root",
            "--reposd-dir",
            f"{self.top}/repos",
            "--cache-dir",
            f"{self.top}/cache",
            "--releasever",
            self.variables["releasever"],
        ]

    def spec(self, name: str, version: str) -> str:
        return f"{name}={version}"

    def refresh(self) -> None:
        # What this machine trusts, and the keys that were announced; nothing is trusted because it comes first.
        trusted = self.system.run(["rpm", "-q", "gpg-pubkey", "--qf", "%{DESCRIPTION}\\n"])
        paths = [f"{self.top}/keys/{name}" for name in self.system.names(f"{self.top}/keys")]
        if trusted.rc == 0 and ARMOUR[0] in trusted.out:
            self.system.write(f"{self.top}/trusted.asc", trusted.out)
            paths.append(f"{self.top}/trusted.asc")
        for path in paths:
            self.commands.must(["rpm", "--root", f"{self.top}/root", "--import", path])
        self.commands.must([*self.options(), "refresh", "--force"], LONG)

    def metadata(self, id: str) -> str:
        folder = f"{self.top}/cache/raw/{id}"
        return folder if self.system.exists(f"{folder}/{REPOMD}") else ""

    def plan(self, wanted: Wanted, specs: t.Sequence[str], listed: t.Sequence[Listed]) -> list[Listed]:
        words = ["install", "--auto-agree-with-licenses", "--no-recommends"]
        fine = (0, 100, 101, 102, 103, 106, 107)
        dry = [*self.options(), "--xmlout", *words, "--dry-run", *specs]
        done = self.commands.run(dry, LONG)
        plan = rpm_lists.zypper_plan(done.out)
        if done.rc not in fine or not plan:
            raise ShareError(
                f"set {wanted.spec.name}: zypper can't resolve {', '.join(specs)}: {reason(done)}",
                code="unresolved",
                stdout=done.out[-8000:],
                stderr=done.err[-8000:],
            )
        self.commands.must([*self.options(), *words, "--download-only", *specs], 4 * LONG, fine=fine)
        by_key: dict[tuple[str, str, str], list[Listed]] = {}
        for row in listed:
            by_key.setdefault(row.rpm.key, []).append(row)
        return [self._found(key, by_key.get(key, [])) for key in plan]

    def _found(self, key: tuple[str, str, str], rows: t.Sequence[Listed]) -> Listed:
        for row in rows:
            if self.system.exists(self.downloaded(row.source, row.rpm)):
                return row
        raise ShareError(f"zypper names {'-'.join(key[:2])}.{key[2]}, and has downloaded no such package")

    def downloaded(self, id: str, rpm: Rpm) -> str:
        return posixpath.join(self.top, "cache/packages", id, rpm.path)


def rpm_resolver(store: Store, fetch: Fetch, manager: Manager, release: str) -> RpmResolver:
    """Return the resolver of a machine's package manager."""
    kind = ZypperResolver if manager.name == "zypper" else DnfResolver
    return kind(store, fetch, manager, release)


def verify(store: Store, commands: Commands, key: str, paths: t.Sequence[str]) -> None:
    """Have rpm itself verify the signature of packages, with no other key than their repository's.

    :param key: path of the armoured keys.
    :param paths: of the packages.
    :raises ShareError: one isn't signed by it.
    """
    base = ["rpmkeys", "--define", f"_dbpath {store.empty('work/rpm-keys')}"]
    commands.must([*base, "--import", key])
    argv = [*base, "--define", "_pkgverify_level signature", "--define", "_pkgverify_flags 0x0", "--checksig"]
    for start in range(0, len(paths), 200):
        done = commands.run([*argv, *paths[start : start + 200]], LONG)
        bad = [line.strip() for line in done.out.splitlines() if line.rstrip().endswith("NOT OK")]
        if done.rc != 0 or bad:
            what = bad[0] if bad else reason(done)
            raise ShareError(f"rpm refuses a package, whose repository signs its packages: {what}", code="signature")
