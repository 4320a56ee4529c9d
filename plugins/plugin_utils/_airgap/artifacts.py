# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What is fetched as one artifact: an image, a file, a chart, wheels, collections; and whether the archive has it."""

from __future__ import annotations

import abc
import functools
import hashlib
import json
import os
import time
import typing as t

from ...module_utils._core.paths import file_path
from ...module_utils._core.untrusted import line
from .archive import FOLDERS, Contents, Entry
from .needed import Item
from .programs import Watch
from .store import Failed, Store
from .web import LARGEST, Fetch

# Seconds in which a file that is read at once has to be there.
FILE_SECONDS = 900.0
REASONS: t.Mapping[str, str] = {
    "timeout": "it doesn't answer in time",
    "tls": "its certificate isn't one that this machine trusts",
    "no_tls": "it doesn't speak TLS",
    "unreachable": "it can't be reached from this machine",
    "too_large": f"it has more than {LARGEST >> 20} MiB",
}


class Held(t.Protocol):
    """What a former run has left: ``contents``, and the SHA-256 of each file by its path."""

    @property
    def contents(self) -> Contents: ...

    @property
    def sums(self) -> t.Mapping[str, str]: ...


class Artifact(abc.ABC):
    """What is requested and fetched at once: one image, one file, a set of wheels.

    :ivar name: for the user.
    :ivar items: those of the list that it brings.
    :ivar watch: is told how far it is while a program brings it.
    """

    name: str
    items: tuple[Item, ...]
    watch: Watch | None = None

    @property
    def size(self) -> int | None:
        """Bytes, as far as the list has them; None where it hasn't."""
        return None

    @abc.abstractmethod
    def request(self) -> t.Sequence[str]:
        """Return all that decides on what is fetched, as texts."""

    @abc.abstractmethod
    def fetch(self, store: Store, work: str) -> list[Entry]:
        """Fetch it into the archive's folder, and return what is there then.

        :param work: an empty folder.
        :raises Failed: it can't be fetched.
        """

    @functools.cached_property
    def request_sha256(self) -> str:
        """SHA-256 of the request: what it brought is kept while that is the same."""
        return hashlib.sha256(json.dumps([type(self).__name__, *self.request()]).encode()).hexdigest()

    def held(self, store: Store, state: Held) -> list[Entry]:
        """Return what a former run has fetched for the same request, if all of it is there; else nothing."""
        found = [entry for entry in state.contents.items if entry["request_sha256"] == self.request_sha256]
        whole = all(state.sums.get(entry["path"]) == entry["sha256"] for entry in found)
        return [self._renewed(entry) for entry in found] if whole else []

    def _renewed(self, entry: Entry) -> Entry:
        """Return an entry with what the list says now: hosts and variables may be others."""
        for item in self.items:
            if (item["id"], item["name"]) == (entry["id"], entry["name"]):
                return t.cast(Entry, {**entry, **item, "digest": item["digest"] or entry["digest"]})
        return entry


def entry(artifact: Artifact, item: Item, path: str, size: int, sha256: str, image: str = "") -> Entry:
    more = {"path": path, "bytes": size, "sha256": sha256, "image": image, "request_sha256": artifact.request_sha256}
    return t.cast(Entry, {**item, **more})


def download(fetch: Fetch, url: str, largest: int = LARGEST) -> bytes:
    """Return what an address has.

    :raises Failed: it hasn't, doesn't answer, or sends less than it announces.
    """
    answer = fetch(url, time.monotonic() + FILE_SECONDS, largest)
    shown = line(url, 300)
    if answer.failure:
        raise Failed(answer.failure, f"{shown}: {REASONS.get(answer.failure, answer.failure)}")
    if answer.status != 200:
        raise Failed("status", f"{shown} is answered with HTTP {answer.status}")
    lengths = [value for name, value in answer.headers.items() if name.lower() == "content-length"]
    encoded = any(name.lower() == "content-encoding" for name in answer.headers)
    if lengths and not encoded and lengths[0] != str(len(answer.content)):
        raise Failed("truncated", f"{shown} sent {len(answer.content)} of {line(lengths[0], 20)} bytes")
    return answer.content


def path_of(kind: str, name: str) -> str:
    """Return the path of a file of this kind.

    :raises Failed: a list, a server or a program gave it a name that isn't one.
    """
    try:
        return file_path(f"{FOLDERS[kind]}/{name}")
    except ValueError as error:
        raise Failed("name", f"{line(name, 200)} {error}") from error


def sorted_files(folder: str) -> list[str]:
    return sorted(row.name for row in os.scandir(folder) if row.is_file(follow_symlinks=False))
