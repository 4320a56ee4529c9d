# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A folder of files that are known by their SHA-256, which come in parts, and all are put in place at the end.

A record in the folder says which files are ours: nothing else in it is changed or removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
import typing as t

from .._core.errors import BadInput
from .._core.paths import file_path
from .._core.types import JsonObject

# In the folder: which files are ours, and those that have come and aren't in place yet.
RECORD, INCOMING = ".kubegpu-airgap.json", ".incoming"
# Bytes that stay free.
SPARE = 64 << 20
CHUNK = 1 << 20
# Lists of a repository come after what they name, and what signs them at the end.
_LAST = ("InRelease", "Release", "Release.gpg", "repomd.xml", "repomd.xml.asc", "repomd.xml.key", "index.yaml")
_LISTS = ("dists", "repodata", "simple")


class Tree:
    """The folder.

    :param path: absolute.
    :param wanted: SHA-256 by path below it.
    :raises BadInput: a path leads elsewhere.
    """

    def __init__(self, path: str, wanted: t.Mapping[str, str]) -> None:
        if not os.path.isabs(path) or os.path.normpath(path) == "/":
            raise BadInput(f"airgap_files_folder: {path} isn't an absolute path of a folder")
        self.path = os.path.normpath(path)
        for name in wanted:
            if not _is_below(name):
                raise BadInput(f"airgap_files: {name} isn't a path below the folder")
        self.wanted = wanted

    def _at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def record(self) -> dict[str, str]:
        """Return SHA-256 by path of the files that are ours.

        :raises BadInput: there is a folder that isn't.
        """
        try:
            with open(self._at(RECORD), encoding="utf-8") as file:
                found = json.load(file)["files"]
            known = {str(name): str(sha256) for name, sha256 in found.items()}
            # Its files are removed by it, with the rights of who runs this.
            if not all(map(_is_below, known)):
                raise ValueError("it names what isn't in the folder")
            return known
        except FileNotFoundError:
            there = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
            if [name for name in there if name != INCOMING] or os.path.lexists(self.path) > os.path.isdir(self.path):
                raise BadInput(
                    f"airgap_files_folder: {self.path} is there and isn't a folder that this playbook has filled: name "
                    "another one"
                ) from None
            return {}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise BadInput(f"airgap_files_folder: {self._at(RECORD)} can't be read: {error}") from error

    def observe(self) -> JsonObject:
        """Return which files are missing or have another content, which have come, and what of ours isn't wanted."""
        known = self.record()
        missing = sorted(name for name, sha256 in self.wanted.items() if _sha256(self._at(name)) != sha256)
        lacking = {self.wanted[name] for name in missing}
        have = [name for name in lacking if _sha256(self._at(f"{INCOMING}/{name}")) == name]
        return {
            "missing": missing,
            "have": sorted(have),
            "stale": sorted(set(known) - set(self.wanted)),
            "free": shutil.disk_usage(_existing(self.path)).free,
        }

    def take(self, source: str) -> None:
        """Move files that have come, whose names are their SHA-256, into the folder.

        :raises BadInput: one isn't what its name says, or there is no room.
        """
        incoming = self._at(INCOMING)
        with _room(self.path, "; what is served hasn't changed"):
            os.makedirs(incoming, mode=0o700, exist_ok=True)
            for name in sorted(set(os.listdir(source)) & set(self.wanted.values())):
                path = os.path.join(source, name)
                if _sha256(path) != name:
                    raise BadInput(f"airgap_files: a file came with another content than {name}; run it again")
                part = os.path.join(incoming, f"{name}.part")
                shutil.copyfile(path, part)
                os.chmod(part, 0o644)
                os.replace(part, os.path.join(incoming, name))

    def place(self) -> None:
        """Put all wanted files in their places, and remove those of ours that aren't wanted.

        :raises BadInput: some haven't come.
        """
        state = self.observe()
        lacking = [name for name in state["missing"] if self.wanted[name] not in state["have"]]
        if lacking:
            raise BadInput(f"airgap_files: {len(lacking)} files haven't come, such as {lacking[0]}; run it again")
        known = self.record()
        with _room(self.path):
            # From here on all of them are ours, whenever this ends.
            self._write({**known, **self.wanted})
            for name in sorted(state["missing"], key=_rank):
                self._put(name)
            for name in state["stale"]:
                self._remove(name)
            self._write(self.wanted)
            shutil.rmtree(self._at(INCOMING), ignore_errors=True)

    def _put(self, name: str) -> None:
        target = self._at(name)
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.lstat(target).st_mode):
                raise BadInput(f"airgap_files_folder: {target} is a folder, where a file is to be")
        # The same content may have several names.
        part = f"{target}.part"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        os.link(self._at(f"{INCOMING}/{self.wanted[name]}"), part)
        os.replace(part, target)

    def _write(self, files: t.Mapping[str, str]) -> None:
        os.makedirs(self.path, mode=0o755, exist_ok=True)
        part = self._at(f"{RECORD}.part")
        with open(part, "w", encoding="utf-8") as file:
            json.dump({"files": dict(sorted(files.items()))}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(part, 0o644)
        os.replace(part, self._at(RECORD))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(name))
        folder = os.path.dirname(self._at(name))
        while folder != self.path:
            try:
                os.rmdir(folder)
            except OSError:
                break
            folder = os.path.dirname(folder)

    def remove(self) -> bool:
        """Remove what is ours, and the folder where nothing else is in it; returns whether there was something."""
        if not os.path.lexists(self._at(RECORD)) and not os.path.isdir(self._at(INCOMING)):
            return False
        for name in self.record():
            self._remove(name)
        shutil.rmtree(self._at(INCOMING), ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._at(RECORD))
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
        return True


def _is_below(name: str) -> bool:
    try:
        return bool(file_path(name))
    except ValueError:
        return False


def _rank(name: str) -> tuple[int, str]:
    parts = name.split("/")
    return (2 if parts[-1] in _LAST else 1 if set(parts) & set(_LISTS) else 0, name)


def _sha256(path: str) -> str:
    """Return a file's SHA-256; empty where there is none, or what is there is no file. Follows no link."""
    digest = hashlib.sha256()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                return ""
            for chunk in iter(lambda: file.read(CHUNK), b""):
                digest.update(chunk)
    except OSError:
        return ""
    return digest.hexdigest()


def _existing(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


@contextlib.contextmanager
def _room(path: str, more: str = "") -> t.Iterator[None]:
    """Say what happened where a file can't be written.

    :param more: of a disk that is full.
    """
    try:
        yield
    except OSError as error:
        # A copy that finds no room names the file that it reads.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise BadInput(
                f"airgap_files_folder: the disk of {path} is full: make room there, and run it again, which goes "
                f"on{more}",
                code="full",
            ) from error
        raise BadInput(f"airgap_files_folder: {error.filename or path}: {error.strerror}") from error


ARGUMENTS: JsonObject = {
    "path": {"type": "str", "required": True},
    "wanted": {"type": "dict", "default": {}},
    "state": {"type": "str", "choices": ["observed", "taken", "present", "absent"], "default": "observed"},
    "source": {"type": "path"},
}


def ensure(params: JsonObject, check: bool) -> JsonObject:
    """Bring the folder to a state.

    :raises BadInput: it isn't ours, or there is no room.
    """
    tree = Tree(params["path"], params["wanted"])
    if params["state"] == "observed":
        return {"changed": False, **tree.observe()}
    if params["state"] == "absent":
        known = bool(tree.record()) if check else tree.remove()
        return {"changed": known}
    if not check:
        tree.take(params["source"]) if params["state"] == "taken" else tree.place()
    return {"changed": True}
