# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Version locks of rpm's package managers, and versions as rpm compares them.

Each tool rewrites its file when a user adds or deletes a lock, and drops every comment. Ours therefore have a form that
means the same as a user's own, survives the rewrite, and isn't what the tool itself writes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import re
import typing as t

from .._core.errors import ShareError
from .types import LockState


class Version(t.NamedTuple):
    """The three parts; no epoch counts as 0."""

    epoch: str
    version: str
    release: str

    @classmethod
    def of(cls, text: str) -> Version:
        epoch, colon, rest = text.rpartition(":")
        version, _dash, release = rest.partition("-")
        return cls(epoch if colon and epoch else "0", version, release)

    def __str__(self) -> str:
        start = "" if self.epoch == "0" else f"{self.epoch}:"
        return f"{start}{self.version}-{self.release}" if self.release else f"{start}{self.version}"

    @property
    def full(self) -> str:
        """Return the text with its epoch, even where that is 0."""
        return f"{self.epoch}:{self.version}-{self.release}"


def matches(pattern: str, text: str) -> bool:
    """Return whether a version matches a pattern; an empty pattern matches every version.

    The epoch is compared only where the pattern has a ``:``, the release only where it has a ``-``.
    """
    if not pattern:
        return True
    have = Version.of(text)
    wanted_epoch, colon, rest = pattern.rpartition(":")
    if colon and not fnmatch.fnmatchcase(have.epoch, wanted_epoch or "0"):
        return False
    whole = f"{have.version}-{have.release}" if "-" in rest else have.version
    return fnmatch.fnmatchcase(whole, rest)


def compare(left: str, right: str) -> int:
    """Return -1, 0 or 1, as rpm orders two ``[epoch:]version-release``."""
    for mine, other in zip(Version.of(left), Version.of(right)):
        order = _compare(mine, other)
        if order:
            return order
    return 0


by_version = functools.cmp_to_key(compare)


def newest(versions: t.Iterable[str]) -> list[str]:
    """Return versions, the newest first."""
    return sorted(versions, key=by_version, reverse=True)


def _compare(left: str, right: str) -> int:
    """Compare one part as rpmvercmp of rpm 4.18 does: digits as numbers, ``~`` before the end, ``^`` after it."""
    if left == right:
        return 0
    runs, other_runs = _runs(left), _runs(right)
    for run, other in zip([*runs, ""], [*other_runs, ""]):
        if run == other:
            continue
        for mark, order in (("~", -1), ("^", 1)):
            if mark in (run, other):
                # A version that ends here is older than one with ^; one that continues with digits or letters is newer.
                if mark == "^" and run and other:
                    return -1 if run == mark else 1
                return order if run == mark else -order
        if not run or not other:
            return 1 if run else -1
        if run.isdigit() != other.isdigit():
            return 1 if run.isdigit() else -1
        if run.isdigit():
            if int(run) != int(other):
                return 1 if int(run) > int(other) else -1
        else:
            return 1 if run > other else -1
    return int(len(runs) > len(other_runs)) - int(len(runs) < len(other_runs))


def _runs(text: str) -> list[str]:
    return re.findall(r"[0-9]+|[A-Za-z]+|~|\^", text)


@dataclasses.dataclass(frozen=True)
class Lock:
    """One entry.

    :param name: the package's name, or a pattern of names.
    :param version: ``[epoch:]version-release`` or a pattern of it; empty keeps whatever version is installed.
    :param ours: written by this collection.
    :param exclude: it excludes these versions rather than all others.
    """

    name: str
    version: str
    ours: bool = False
    exclude: bool = False

    def of(self, name: str) -> bool:
        return not self.exclude and fnmatch.fnmatchcase(name, self.name)

    def keeps(self, name: str, version: str) -> bool:
        """Return whether the lock keeps an installed package at its version."""
        if not self.of(name):
            return False
        have, want = Version.of(version), Version.of(self.version)
        return not self.version or all(fnmatch.fnmatchcase(part, other or "*") for part, other in zip(have, want))

    @property
    def exact(self) -> bool:
        """Return whether it keeps one version and no other."""
        return bool(self.version) and not re.search(r"[*?\[]", self.version)

    def json(self) -> LockState:
        return {"name": self.name, "version": self.version, "ours": self.ours, "exclude": self.exclude}


class LockFile(t.Protocol):
    """One tool's form of the file."""

    def parse(self, text: str) -> list[Lock]:
        """Return every entry."""

    def render(self, text: str, drop: t.Callable[[str], bool], add: t.Mapping[str, str]) -> str:
        """Return the file without our entries that ``drop`` names, and with new ones. Everything else stays.

        :param drop: whether to remove our entry of a package.
        :param add: versions by package name.
        :raises ShareError: the file has a form that can't be edited.
        """


def _joined(text: str, added: str) -> str:
    return text + ("\n" if text and not text.endswith("\n") else "") + added


class ListLocks:
    """versionlock.list of dnf 4: ``name-epoch:version-release.*``."""

    # The plugin writes .* and accepts any pattern of architectures; .?* means the same.
    MARK = ".?*"

    def parse(self, text: str) -> list[Lock]:
        lines = [line.strip() for line in text.splitlines()]
        return [self._entry(line) for line in lines if line and not line.startswith("#")]

    @classmethod
    def _entry(cls, line: str) -> Lock:
        exclude = line.startswith("!")
        ours = line.endswith(cls.MARK)
        text = re.sub(r"\.(\?\*|\*|noarch|x86_64|aarch64|i[3-6]86|src)$", "", line.lstrip("!"))
        # What follows a dash shows whether it is part of the name or precedes the version.
        start = r"(?P<name>.+?)-(?:(?P<epoch>[\d*?]+):)?(?P<version>[\d*?\[][^-:]*)"
        match = re.fullmatch(start + r"-(?P<release>[^-:]+)", text) or re.fullmatch(start, text)
        if not match:
            # A name alone excludes no version.
            return Lock(text, "", ours, exclude=True)
        parts = {"release": "*", **match.groupdict()}
        epoch = parts["epoch"] or "*"
        return Lock(parts["name"], f"{epoch}:{parts['version']}-{parts['release']}", ours, exclude)

    def render(self, text: str, drop: t.Callable[[str], bool], add: t.Mapping[str, str]) -> str:
        kept = []
        for line in text.splitlines(keepends=True):
            word = line.strip()
            lock = self._entry(word) if word and not word.startswith("#") else None
            if lock is None or not lock.ours or not drop(lock.name):
                kept.append(line)
        added = "".join(f"{name}-{Version.of(add[name]).full}{self.MARK}\n" for name in sorted(add))
        return _joined("".join(kept), added)


class TomlLocks:
    """versionlock.toml of dnf 5; dnf 5 preserves an entry's ``comment``."""

    MARK = "kubegpu.share"
    # dnf5 ignores a file without it.
    HEAD = 'version = "1.0"\n'
    _START = re.compile(r"^[ \t]*\[\[[ \t]*packages[ \t]*\]\]", re.MULTILINE)

    def parse(self, text: str) -> list[Lock]:
        return [self._entry(block) for block in self._blocks(text)[1:]]

    def _blocks(self, text: str) -> list[str]:
        """Return the text before the first entry, and the entries."""
        starts = [match.start() for match in self._START.finditer(text)]
        edges = [0, *starts, len(text)]
        return [text[begin:end] for begin, end in zip(edges, edges[1:])]

    def _entry(self, block: str) -> Lock:
        fields = re.findall(r"""\b(name|comment|key|comparator|value)\s*=\s*(?:"([^"\n]*)"|'([^'\n]*)')""", block)
        values: dict[str, list[str]] = {}
        for field, double_quoted, single_quoted in fields:
            values.setdefault(field, []).append(double_quoted or single_quoted)
        conditions = list(zip(values.get("key", []), values.get("comparator", []), values.get("value", [])))
        version = ""
        exclude = False
        if len(conditions) == 1 and conditions[0][0] == "evr":
            _key, comparator, value = conditions[0]
            exclude = comparator in ("!=", "<>", "<", "<=", ">", ">=")
            version = value
        return Lock((values.get("name") or [""])[0], version, values.get("comment") == [self.MARK], exclude)

    def render(self, text: str, drop: t.Callable[[str], bool], add: t.Mapping[str, str]) -> str:
        head, *blocks = self._blocks(text)
        if re.search(r"^\s*packages\s*=", head, re.MULTILINE):
            raise ShareError(
                "/etc/dnf/versionlock.toml isn't in dnf5's own form: rewrite its locks with 'dnf versionlock add'"
            )
        kept = []
        for block in blocks:
            lock = self._entry(block)
            if not lock.ours or not drop(lock.name):
                kept.append(block)
        if add and not re.search(r"^\s*version\s*=", text, re.MULTILINE):
            # dnf5 ignores such a file; with a version it would apply all of its locks.
            if blocks:
                raise ShareError(
                    "/etc/dnf/versionlock.toml has no version, so that dnf5 ignores it: add one, or remove the file"
                )
            head = self.HEAD + head
        body = head + "".join(kept)
        if add or len(kept) < len(blocks):
            # The blank line before our entry is ours too.
            body = body.rstrip("\n") + "\n" if body.strip() else ""
        return body + "".join(self._block(name, add[name]) for name in sorted(add))

    def _block(self, name: str, version: str) -> str:
        return (
            f'\n[[packages]]\nname = "{name}"\ncomment = "{self.MARK}"\n\n[[packages.conditions]]\n'
            f'key = "evr"\ncomparator = "="\nvalue = "{Version.of(version).full}"\n'
        )


class ZyppLocks:
    """/etc/zypp/locks: stanzas that keep installed packages at whatever version they have."""

    # zypper's own locks lack it, and so also exclude packages that aren't installed.
    MARK = ("install_status", "installed")

    def parse(self, text: str) -> list[Lock]:
        return [lock for _raw, lock in self._stanzas(text) if lock is not None]

    def _stanzas(self, text: str) -> t.Iterator[tuple[str, Lock | None]]:
        """Yield each stanza with the blank lines after it, and its lock; None where it locks no package by name."""
        for match in re.finditer(r"(?:[^\n]*\S[^\n]*(?:\n|$))+(?:[ \t]*\n)*|(?:[ \t]*\n)+", text):
            fields: dict[str, str] = {}
            for line in match.group().splitlines():
                key, colon, value = line.partition(":")
                if colon and not line.startswith("#"):
                    fields[key.strip()] = value.strip()
            name = fields.get("solvable_name", "")
            lock = None
            if name and fields.get("type", "package") == "package":
                ours = fields.get(self.MARK[0]) == self.MARK[1] and fields.get("match_type") == "exact"
                glob = fields.get("match_type") in ("exact", "glob")
                lock = Lock(name if glob else f"*{name}*", "", ours)
                if "version" in fields:
                    # It excludes versions that repositories offer, and keeps nothing that is installed.
                    lock = Lock(lock.name, fields["version"].lstrip("=<>! "), ours, exclude=True)
            yield match.group(), lock

    def render(self, text: str, drop: t.Callable[[str], bool], add: t.Mapping[str, str]) -> str:
        kept = [raw for raw, lock in self._stanzas(text) if lock is None or not lock.ours or not drop(lock.name)]
        body = "".join(kept)
        if add and body.strip() and not body.endswith("\n\n"):
            body = _joined(body, "\n")
        stanzas = [
            f"type: package\nmatch_type: exact\ncase_sensitive: on\n{': '.join(self.MARK)}\nsolvable_name: {name}\n"
            for name in sorted(add)
        ]
        return body + "\n".join(stanzas)
