# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of partial package repositories, which a machine of the distribution has made, in the archive's folder."""

from __future__ import annotations

import contextlib
import json
import os
import typing as t

from ...module_utils._core.errors import BadInput, ShareError
from ...module_utils._core.paths import file_path
from ...module_utils._core.untrusted import line
from ...module_utils._host.file_limit import largest_file
from ...module_utils._mirrors.types import DESCRIPTION, MirroredRepository, repository
from .archive import PART
from .repositories import machine_of
from .store import SPARE, Failed, Store

# Fetches a file of the machine to a path of this one.
Transfer = t.Callable[[str, str], t.Any]


class Remote(t.NamedTuple):
    """A file of the machine.

    :param path: below its folder there, and below the archive's here.
    """

    path: str
    bytes: int
    sha256: str


class Repositories:
    """Partial repositories, as module ``airgap_packages`` of a machine returned them.

    A machine describes those of its own distribution, release and architecture, which no other one describes.

    :param others: what other machines of the run have returned.
    :raises ShareError: the machine returned something else.
    """

    def __init__(self, rows: t.Sequence[t.Any], others: t.Sequence[t.Any] = ()) -> None:
        self.descriptions: dict[str, str] = {}
        self.files: list[Remote] = []
        try:
            described = [repository(row, f"repository {number}") for number, row in enumerate(rows, 1)]
        except BadInput as error:
            raise ShareError(f"airgap_packages doesn't return repositories: {line(error, 300)}") from error
        machines = sorted({machine_of(row) for row in described})
        if len(machines) > 1:
            raise ShareError(
                f"airgap_packages returned repositories for {' and '.join(machines)}, and a host is one of them: "
                "nothing of it is taken",
                code="foreign_repository",
            )
        if set(machines) & set(map(_machine_of, others)):
            raise ShareError(
                f"two hosts of group airgap_package_hosts describe repositories for {machines[0]}, of which an archive "
                "has those of one host: leave one of them in the group, or find out why this host says so",
                code="foreign_repository",
            )
        for row in described:
            self._add(row)

    def _add(self, row: MirroredRepository) -> None:
        folder = row["path"]
        if folder in self.descriptions:
            raise ShareError(f"airgap_packages returned {folder} twice: nothing of it is taken")
        for file in (row["key"], *row["metadata"], *row["packages"]):
            self.files.append(Remote(file_path(f"{folder}/{file['path']}"), file["bytes"], file["sha256"]))
        self.descriptions[folder] = json.dumps(row, indent=1, sort_keys=True) + "\n"

    def missing(self, store: Store) -> list[Remote]:
        return [file for file in self.files if store.sha256(file.path) != file.sha256]

    def superfluous(self, store: Store) -> list[str]:
        """Return the paths in these repositories' folders that they haven't any more."""
        found, strange = store.files()
        kept = {file.path for file in self.files} | {f"{folder}/{DESCRIPTION}" for folder in self.descriptions}
        paths = (path for path in (*found, *strange) if path not in kept)
        return [path for path in paths if any(path.startswith(f"{folder}/") for folder in self.descriptions)]

    def described(self, store: Store) -> list[str]:
        """Return the folders whose description isn't the machine's."""
        paths = {folder: store.at(f"{folder}/{DESCRIPTION}") for folder in self.descriptions}
        return [folder for folder, path in paths.items() if _text(path) != self.descriptions[folder]]

    def fetch(self, store: Store, source: str, transfer: Transfer) -> None:
        """Fetch what is missing, and write the descriptions when all is there.

        :param source: the machine's folder.
        :raises ShareError: a file isn't the one that the machine described, or the disk is full.
        """
        try:
            missing = self.missing(store)
            _require_space(store, sum(file.bytes for file in missing))
            for file in missing:
                target = store.at(file.path)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                # No link of this name is followed.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{target}{PART}")
                _transferred(f"{source.rstrip('/')}/{file.path}", f"{target}{PART}", file, transfer)
                if store.sha256(f"{file.path}{PART}") != file.sha256:
                    store.remove(f"{file.path}{PART}")
                    full = f"the disk of {store.folder} is full" if store.is_full() else "it isn't what was described"
                    raise Failed("other_digest", f"{file.path}: {full}")
                store.take(f"{target}{PART}", file.path)
            for path in self.superfluous(store):
                store.remove(path)
            for folder in self.described(store):
                store.put(f"{folder}/{DESCRIPTION}", self.descriptions[folder].encode())
        except OSError as error:
            raise ShareError(f"{store.folder} can't be written: {error.strerror}; the next run goes on") from error
        except Failed as error:
            text = f"{error}; what is there stays, and the next run goes on"
            raise ShareError(text, code=error.code, **error.fields) from error


def _require_space(store: Store, size: int) -> None:
    """Refuse what the disk hasn't room for, before any of it is fetched.

    :param size: bytes.
    :raises Failed: there is too little.
    """
    os.makedirs(store.folder, exist_ok=True)
    free = store.free()
    if size + SPARE > free:
        raise Failed(
            "full",
            f"the disk of {store.folder} is full: {size + SPARE >> 20} MiB are needed, {free >> 20} are free",
            needed=size + SPARE,
            free=free,
        )


def _transferred(source: str, target: str, file: Remote, transfer: Transfer) -> None:
    """Fetch a file, and no more of it than the machine has described.

    :raises Failed: there is more, of which nothing stays.
    """
    failure: Exception | None = None
    try:
        # One byte more tells the right file from what never ends.
        with largest_file(file.bytes + 1):
            transfer(source, target)
    except Exception as error:  # However the connection reports it.
        failure = error
    if os.path.lexists(target) and os.lstat(target).st_size > file.bytes:
        os.unlink(target)
        text = f"{file.path}: its host sends more than the {file.bytes} bytes that it has described: look at that host"
        raise Failed("too_large", text, path=file.path, largest=file.bytes) from failure
    if failure:
        raise failure


def _machine_of(row: t.Any) -> str:
    """Return the machine that a description of another host is for; empty where it is none, as that host's run says."""
    try:
        return machine_of(repository(row, "a repository"))
    except BadInput:
        return ""


def _text(path: str) -> str:
    with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
        return file.read()
    return ""
