# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The files in which package managers keep what is locked: read, and our entries put in and taken out. Pure.

Each tool writes its file anew when a user adds or deletes a lock, and drops every comment. Ours are therefore told from
a user's own by a form that means the same, survives that, and isn't what the tool itself writes.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._rpm_version import Version

Json = t.Dict[str, t.Any]


@dataclasses.dataclass(frozen=True)
class Lock:
    """One entry.

    :param name: the package's name, or a pattern of names.
    :param version: ``[epoch:]version-release`` or a pattern of it; empty where any version is kept as it is.
    :param ours: written by us.
    :param exclude: it forbids these versions rather than all others.
    """

    name: str
    version: str
    ours: bool = False
    exclude: bool = False

    def of(self, name: str) -> bool:
        return not self.exclude and fnmatch.fnmatchcase(name, self.name)

    def keeps(self, name: str, version: str) -> bool:
        """Whether an installed package can't become another version."""
        if not self.of(name):
            return False
        have, want = Version.of(version), Version.of(self.version)
        return not self.version or all(fnmatch.fnmatchcase(one, other or "*") for one, other in zip(have, want))

    @property
    def exact(self) -> bool:
        """It keeps one version and no other."""
        return bool(self.version) and not re.search(r"[*?\[]", self.version)

    def json(self) -> Json:
        return dataclasses.asdict(self)


class LockFile(t.Protocol):
    """One tool's form of the file."""

    def parse(self, text: str) -> list[Lock]:
        """Every entry."""

    def render(self, text: str, drop: t.Callable[[str], bool], add: t.Mapping[str, str]) -> str:
        """The file without those of our entries whose name ``drop`` says yes to, and with new ones (name: version).

        Everything else in it stays as it is.

        :raises ShareError: what the tool reads there can't be told.
        """


def _joined(text: str, added: str) -> str:
    return text + ("\n" if text and not text.endswith("\n") else "") + added


class ListLocks:
    """versionlock.list of dnf 4 (``name-epoch:version-release.*``) and of yum (``epoch:name-version-release.*``)."""

    # The plugins write .* and take any pattern of architectures; .?* means the same.
    MARK = ".?*"

    def __init__(self, epoch_first: bool) -> None:
        self._epoch_first = epoch_first

    def parse(self, text: str) -> list[Lock]:
        lines = [line.strip() for line in text.splitlines()]
        return [self._entry(line) for line in lines if line and not line.startswith("#")]

    @classmethod
    def _entry(cls, line: str) -> Lock:
        exclude = line.startswith("!")
        ours = line.endswith(cls.MARK)
        text = re.sub(r"\.(\?\*|\*|noarch|x86_64|aarch64|i[3-6]86|src)$", "", line.lstrip("!"))
        first = re.match(r"(\d+):(.+)$", text)
        epoch, text = (first.group(1), first.group(2)) if first else ("", text)
        # A dash in the name is told from the one before the version by what follows it.
        start = r"(?P<name>.+?)-(?:(?P<epoch>[\d*?]+):)?(?P<version>[\d*?\[][^-:]*)"
        found = re.fullmatch(start + r"-(?P<release>[^-:]+)", text) or re.fullmatch(start, text)
        if not found:
            # A name alone leaves every version in.
            return Lock(text, "", ours, exclude=True)
        parts = {"release": "*", **found.groupdict()}
        epoch = parts["epoch"] or epoch or "*"
        return Lock(parts["name"], f"{epoch}:{parts['version']}-{parts['release']}", ours, exclude)

    def render(self, text: str, drop: t.Callable[[str], bool], add: t.Mapping[str, str]) -> str:
        kept = []
        for line in text.splitlines(keepends=True):
            word = line.strip()
            lock = self._entry(word) if word and not word.startswith("#") else None
            if lock is None or not lock.ours or not drop(lock.name):
                kept.append(line)
        return _joined("".join(kept), "".join(f"{self._line(name, add[name])}\n" for name in sorted(add)))

    def _line(self, name: str, version: str) -> str:
        have = Version.of(version)
        start = f"{have.epoch}:{name}-" if self._epoch_first else f"{name}-{have.epoch}:"
        return f"{start}{have.version}-{have.release}{self.MARK}"


class TomlLocks:
    """versionlock.toml of dnf 5, which keeps an entry's ``comment``."""

    MARK = "kubegpu.share"
    # dnf5 ignores a file without it.
    HEAD = 'version = "1.0"\n'
    _START = re.compile(r"^[ \t]*\[\[[ \t]*packages[ \t]*\]\]", re.MULTILINE)

    def parse(self, text: str) -> list[Lock]:
        return [self._entry(block) for block in self._blocks(text)[1:]]

    def _blocks(self, text: str) -> list[str]:
        """What stands before the first entry, and the entries."""
        starts = [found.start() for found in self._START.finditer(text)]
        edges = [0, *starts, len(text)]
        return [text[begin:end] for begin, end in zip(edges, edges[1:])]

    def _entry(self, block: str) -> Lock:
        fields = re.findall(r"""\b(name|comment|key|comparator|value)\s*=\s*(?:"([^"\n]*)"|'([^'\n]*)')""", block)
        values: dict[str, list[str]] = {}
        for field, one, other in fields:
            values.setdefault(field, []).append(one or other)
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
            raise ShareError("the locks in /etc/dnf/versionlock.toml aren't in the form that dnf5 itself writes")
        kept = []
        for block in blocks:
            lock = self._entry(block)
            if not lock.ours or not drop(lock.name):
                kept.append(block)
        if add and not re.search(r"^\s*version\s*=", text, re.MULTILINE):
            # dnf5 takes no notice of what stands in such a file, and would of all of it with the version.
            if blocks:
                raise ShareError("/etc/dnf/versionlock.toml has no version, and dnf5 takes no notice of its locks")
            head = self.HEAD + head
        body = head + "".join(kept)
        if add or len(kept) < len(blocks):
            # The blank line before an entry of ours is ours too.
            body = body.rstrip("\n") + "\n" if body.strip() else ""
        return body + "".join(self._block(name, add[name]) for name in sorted(add))

    def _block(self, name: str, version: str) -> str:
        return (
            f'\n[[packages]]\nname = "{name}"\ncomment = "{self.MARK}"\n\n[[packages.conditions]]\n'
            f'key = "evr"\ncomparator = "="\nvalue = "{Version.of(version).full}"\n'
        )


class ZyppLocks:
    """/etc/zypp/locks: stanzas that keep installed packages as they are, whatever their version."""

    # zypper's own locks say nothing of it, and so also forbid what isn't installed.
    MARK = ("install_status", "installed")

    def parse(self, text: str) -> list[Lock]:
        return [lock for _raw, lock in self._stanzas(text) if lock is not None]

    def _stanzas(self, text: str) -> t.Iterator[tuple[str, Lock | None]]:
        """Each stanza with the blank lines after it; None where it locks no package by its name."""
        for found in re.finditer(r"(?:[^\n]*\S[^\n]*(?:\n|$))+(?:[ \t]*\n)*|(?:[ \t]*\n)+", text):
            fields: dict[str, str] = {}
            for line in found.group().splitlines():
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
                    # It locks some versions of those that are offered, and nothing that is installed at another.
                    lock = Lock(lock.name, fields["version"].lstrip("=<>! "), ours, exclude=True)
            yield found.group(), lock

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
