# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Resolve package sets with apt, as for a machine on which nothing is installed, and find the repositories' files."""

from __future__ import annotations

import posixpath
import re
import typing as t
from urllib.parse import unquote

from .._core.errors import ShareError
from .._host.file_limit import largest_file
from .._packages.apply import LONG, Commands
from .._packages.apt import preferences
from .._packages.apt_apply import reason
from .._packages.installed import parse_deb822, parse_list
from .._packages.options import Fetch, Repository
from .._packages.paths import APT_SOURCES, MARK
from . import apt_lists
from .apt_lists import Index, Stanza
from .keys import armoured
from .store import Store, too_large
from .types import DISTRIBUTION
from .wanted import Outcome, Package, Part, Resolved, Wanted, keys_of, repositories_of

WORK = "work/apt"
TRUSTED = ("/etc/apt/trusted.gpg.d", "/usr/share/keyrings")
_FIRST = re.compile(r"^(?:W: GPG error|E): (.+)$", re.MULTILINE)


class Apt:
    """Resolves with the machine's own sources and those of the sets, in lists of its own: the machine's stay."""

    def __init__(self, store: Store, fetch: Fetch, architecture: str) -> None:
        self.store = store
        self.architecture = architecture
        self.commands = Commands(store.system, reason)
        self.fetch = fetch
        self.top = store.at(WORK)
        self._pins = f"{self.top}/preferences"
        self._failed = ""

    def _options(self, *more: str) -> list[str]:
        values = {
            "Dir::State": f"{self.top}/state",
            # Empty: what machines have already differs, so everything that packages need is taken.
            "Dir::State::status": f"{self.top}/status",
            "Dir::Cache": f"{self.top}/cache",
            "Dir::Etc::sourcelist": f"{self.top}/none",
            "Dir::Etc::sourceparts": f"{self.top}/sources",
            "Dir::Etc::preferences": self._pins,
            "Dir::Etc::preferencesparts": f"{self.top}/empty",
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            # As on the nodes, and so that the lists can be read here.
            "Acquire::GzipIndexes": "false",
            "Acquire::Languages": "none",
            "APT::Keep-Downloaded-Packages": "true",
        }
        words = [f"{name}={value}" for name, value in values.items()]
        return [part for word in (*words, *more) for part in ("-o", word)]

    def resolve(self, sets: t.Sequence[Wanted], download: bool) -> Outcome:
        """Return the repositories and files that the sets need.

        :param download: download the packages, too.
        :raises ShareError: apt can't resolve a set, or trusts a list of a set's repository not.
        """
        named = repositories_of(sets)
        keys = keys_of(named, self.fetch)
        self._prepare(named, keys)
        update = ["apt-get", "-q", "-y", *self._options(), "update"]
        # One that isn't reached may be another's; what is needed is asked for below.
        done = self.commands.run(update, LONG)
        self._failed = "" if done.rc == 0 else reason(done)
        indexes = apt_lists.indexes(self.commands.must(self._targets()).out, self.architecture)
        self._must_have(named, indexes, done.out + done.err)
        taken: dict[str, Stanza] = {}
        where: dict[str, Index] = {}
        left_out: list[str] = []
        for wanted in sets:
            found = self._set(wanted, indexes, download, left_out)
            for address, (index, stanza) in found.items():
                taken[address], where[address] = stanza, index
        repositories = self._repositories(sets, keys, indexes, taken, where)
        if download:
            for resolved, lists in repositories:
                resolved.metadata = [*self._lists(lists), *self._signed(lists)]
        return Outcome([resolved for resolved, _lists in repositories], sorted(set(left_out)))

    def _targets(self) -> list[str]:
        return ["apt-get", *self._options(), "indextargets", "--format", apt_lists.INDEX_FORM]

    def _prepare(self, named: t.Sequence[Repository], keys: t.Mapping[str, str]) -> None:
        for folder in ("state/lists/partial", "cache/archives/partial", "empty", "unused/partial"):
            self.store.make(f"{WORK}/{folder}")
        sources = self.store.empty(f"{WORK}/sources")
        system = self.store.system
        for path in ("none", "status"):
            system.write(f"{self.top}/{path}", "")
        ours = [repository.url.rstrip("/") for repository in named]
        for path, text in self._machine():
            # apt refuses one repository with two keys.
            if not any(url in text for url in ours):
                system.write(f"{sources}/{posixpath.basename(path)}", text)
        for repository in named:
            key = f"{self.top}/keys/{repository.name}.asc"
            system.write(key, keys[repository.name])
            lines = ["Types: deb", f"URIs: {repository.url}", f"Suites: {' '.join(repository.suites)}"]
            if repository.components:
                lines.append(f"Components: {' '.join(repository.components)}")
            if repository.architectures:
                lines.append(f"Architectures: {' '.join(repository.architectures)}")
            text = "\n".join([*lines, f"Signed-By: {key}", ""])
            system.write(f"{sources}/{MARK}{repository.name}.sources", text)

    def _machine(self) -> t.Iterator[tuple[str, str]]:
        """Yield path and text of the machine's own lists of repositories."""
        folder = [f"{APT_SOURCES}/{name}" for name in self.store.system.names(APT_SOURCES)]
        for path in ["/etc/apt/sources.list", *folder]:
            text = self.store.system.read(path)
            if text and path.endswith((".list", ".sources")) and MARK not in posixpath.basename(path):
                yield path, text

    def _must_have(self, named: t.Sequence[Repository], indexes: t.Sequence[Index], said: str) -> None:
        for repository in named:
            rows = [row for row in indexes if row.repository.rstrip("/") == repository.url.rstrip("/")]
            if not rows or any(self._release(row) == "" for row in rows):
                first = _FIRST.search(said)
                raise ShareError(
                    f"repository {repository.name}: apt-get update has no list of {repository.url} that its key "
                    f"verifies: {first.group(1) if first else 'it names none'}"
                )

    def _release(self, index: Index) -> str:
        """Return the name of the signed file that apt verified: InRelease or Release; empty where it has none."""
        for name in ("InRelease", "Release"):
            if self.store.system.exists(f"{index.start}{name}"):
                return name
        return ""

    # ------------------------------------------------------------------ packages

    def _set(
        self, wanted: Wanted, indexes: t.Sequence[Index], download: bool, left_out: list[str]
    ) -> dict[str, tuple[Index, Stanza]]:
        """Return the packages of one set by address."""
        self.store.system.write(self._pins, preferences(wanted.spec))
        specs = wanted.specs
        found = self._find(self._planned(specs, f"set {wanted.spec.name}"), indexes)
        beside = self._beside([stanza for _index, stanza in found.values()], indexes)
        if beside:
            try:
                found = self._find(self._planned([*specs, *beside], ""), indexes)
                specs = [*specs, *beside]
            except ShareError:
                left_out += beside
        if download:
            argv = ["apt-get", "-q", "-y", *self._options(), "--no-install-recommends", "--download-only"]
            self.commands.must([*argv, "install", *specs], 4 * LONG)
        return found

    def _planned(self, specs: t.Sequence[str], what: str) -> list[str]:
        """Return the addresses of all package files that apt would download."""
        more = self._options(f"Dir::Cache::archives={self.top}/unused")
        argv = ["apt-get", "-q", "-y", *more, "--no-install-recommends", "--print-uris", "install", *specs]
        done = self.commands.run(argv, LONG)
        if done.rc != 0:
            before = f" (and apt-get update: {self._failed})" if self._failed else ""
            raise ShareError(
                f"{what}: apt can't resolve {', '.join(specs)}: {reason(done)}{before}",
                code="unresolved",
                stdout=done.out[-8000:],
                stderr=done.err[-8000:],
            )
        found = apt_lists.uris(done.out)
        if not found:
            raise ShareError(f"{what}: apt names no package file for {', '.join(specs)}", code="unresolved")
        return found

    def _find(self, addresses: t.Sequence[str], indexes: t.Sequence[Index]) -> dict[str, tuple[Index, Stanza]]:
        """Return list and stanza of each package file.

        :raises ShareError: no list that apt verified names it with a digest.
        """
        open_ones = {unquote(address).replace("/./", "/"): address for address in addresses}
        found: dict[str, tuple[Index, Stanza]] = {}
        for index in indexes:
            base = unquote(index.repository)
            paths = {plain[len(base) :] for plain in open_ones if plain.startswith(base)}
            if not paths or not self.store.system.exists(index.file):
                continue
            for stanza in apt_lists.stanzas(self.store.text(index.file), paths):
                address = open_ones.get(base + stanza.path, "")
                if stanza.sha256 and address:
                    found.setdefault(address, (index, stanza))
        missing = [address for address in addresses if address not in found]
        if missing:
            raise ShareError(f"{missing[0]} is in no list that apt has verified, so it isn't taken")
        return found

    def _beside(self, taken: t.Sequence[Stanza], indexes: t.Sequence[Index]) -> list[str]:
        """Return listed packages that this machine has, and that are made from the same sources as what is taken.

        Where a node has them, they have to change along: libc6 and libc-bin are of one version.
        """
        done = self.commands.must(["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Package}\t${source:Package}\n"])
        sources, names = {stanza.source for stanza in taken}, {stanza.name for stanza in taken}
        rows = [line.split("\t") for line in done.out.splitlines() if line.startswith("ii")]
        found = {row[1] for row in rows if len(row) == 3 and row[2] in sources and row[1] not in names}
        listed = [self.store.text(index.file) for index in indexes if found and self.store.system.exists(index.file)]
        return sorted(name for name in found if any(f"Package: {name}\n" in text for text in listed))

    # ------------------------------------------------------------------ repositories

    def _repositories(
        self,
        sets: t.Sequence[Wanted],
        keys: t.Mapping[str, str],
        indexes: t.Sequence[Index],
        taken: t.Mapping[str, Stanza],
        where: t.Mapping[str, Index],
    ) -> list[tuple[Resolved, list[Index]]]:
        by_key: dict[tuple[str, str], list[str]] = {}
        origin: dict[tuple[str, str], tuple[str, str]] = {}
        trusted = {index: self._trusted(sets, keys, index) for index in set(where.values())}
        for address, index in where.items():
            role, key = trusted[index]
            by_key.setdefault((index.repository, key), []).append(address)
            origin[index.repository, key] = (role, key)
        found = []
        for (base, key), addresses in sorted(by_key.items()):
            used = {where[address] for address in addresses}
            lists = [row for row in indexes if any(self._same(row, one) for one in used)]
            resolved = Resolved(base, origin[base, key][0], key, ("metadata",))
            resolved.suites = tuple(dict.fromkeys(row.suite for row in lists))
            resolved.components = tuple(dict.fromkeys(row.component for row in lists if row.component))
            resolved.packages = [self._package(taken[address]) for address in sorted(addresses)]
            found.append((resolved, lists))
        return found

    @staticmethod
    def _same(row: Index, used: Index) -> bool:
        """Return whether a client that uses one list asks for another one: those of all architectures, for example."""
        return (row.repository, row.suite, row.component) == (used.repository, used.suite, used.component)

    def _trusted(self, sets: t.Sequence[Wanted], keys: t.Mapping[str, str], index: Index) -> tuple[str, str]:
        """Return the role of a list's repository, and the keys that verify it."""
        for wanted in sets:
            for repository in wanted.spec.repositories:
                if repository.url.rstrip("/") == index.repository.rstrip("/"):
                    return wanted.role(repository.name), keys[repository.name]
        for path, text in self._machine():
            parse = parse_list if path.endswith(".list") else parse_deb822
            for source in parse(path, text):
                if source["url"].rstrip("/") == index.repository.rstrip("/") and source["suite"] == index.suite:
                    return DISTRIBUTION, self._keys(source["signed_by"], f"{index.repository} {index.suite}")
        raise ShareError(f"{index.repository} {index.suite} is in no list of this machine")

    def _keys(self, signed_by: str, where: str) -> str:
        """Return the keys of a source: those that it names, or all that apt trusts without."""
        if "-----BEGIN" in signed_by:
            text = "\n".join("" if line.strip() == "." else line.strip() for line in signed_by.splitlines())
            return armoured([text.encode()], where)
        paths = [word for word in re.split(r"[\s,]+", signed_by) if word.startswith("/")]
        if not paths:
            names = self.store.system.names(TRUSTED[0])
            paths = ["/etc/apt/trusted.gpg", *(f"{TRUSTED[0]}/{name}" for name in names)]
        files = [self.store.read(path) for path in paths if path.endswith((".gpg", ".asc"))]
        return armoured([file for file in files if file], where)

    def _package(self, stanza: Stanza) -> Package:
        version = stanza.version.replace(":", "%3a")
        local = f"{self.top}/cache/archives/{stanza.name}_{version}_{stanza.architecture}.deb"
        part = Part(stanza.path, local=local, digest=stanza.sha256)
        return Package(part, stanza.name, stanza.version, stanza.architecture)

    def _text(self, index: Index) -> str:
        return (self.store.read(f"{index.start}{self._release(index)}") or b"").decode("utf-8", "replace")

    def _lists(self, indexes: t.Sequence[Index]) -> t.Iterator[Part]:
        """Yield the lists of packages, downloaded by apt in the forms that the server has.

        :raises ShareError: Release names none of a list, or the server has none.
        """
        for index in indexes:
            text = self._text(index)
            named = apt_lists.sums(text)
            forms = [form for form in apt_lists.FORMS if index.key + form in named]
            got = 0
            why = "Release names none by its SHA-256"
            for form in forms:
                key, (digest, size) = index.key + form, named[index.key + form]
                address, local = f"{index.repository}{index.folder}{key}", f"{self.top}/cache/lists/{digest}"
                done = self._download(address, local, digest, size)
                if done:
                    why = done
                    continue
                got += 1
                part = Part(f"{index.folder}{key}", local=local, digest=digest)
                yield part
                if apt_lists.by_hash(text):
                    folder = posixpath.dirname(part.path)
                    yield part._replace(path=posixpath.join(folder, apt_lists.BY_HASH, digest))
                if got == apt_lists.ENOUGH:
                    break
            if not got:
                raise ShareError(f"{index.repository} {index.suite}: the list {index.key} can't be had: {why}")

    def _download(self, address: str, local: str, digest: str, size: int) -> str:
        """Download a file with apt's own program, proxies and logins; return why that failed.

        :raises ShareError: it is longer than Release says.
        """
        self.store.make(f"{WORK}/cache/lists")
        argv = ["/usr/lib/apt/apt-helper", *self._options(), "download-file", address, local, f"SHA256:{digest}"]
        # Unlike apt-get it has no size to compare with, and takes what comes.
        with largest_file(size + 1):
            done = self.commands.run(argv, LONG)
        if done.rc == 0:
            return ""
        if self.store.drop(local) > size:
            raise too_large(address, size, True)
        return reason(done)

    def _signed(self, indexes: t.Sequence[Index]) -> t.Iterator[Part]:
        for index in {row.start: row for row in indexes}.values():
            name = self._release(index)
            # What names the others comes last.
            for each in ["InRelease"] if name == "InRelease" else ["Release.gpg", "Release"]:
                yield Part(f"{index.folder}{each}", local=f"{index.start}{each}")
