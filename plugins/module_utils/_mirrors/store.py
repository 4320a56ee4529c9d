# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The folder of mirrors on the machine that makes them: files come into it whole, with their digest, or not at all."""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import hashlib
import http.client
import io
import lzma
import os
import shutil
import typing as t

from .._core.errors import ShareError
from .._host.system import System
from .types import MirroredFile

# What is being written ends with it.
PART = ".part"
CHUNK = 1 << 20
# Seconds without an answer.
TIMEOUT = 60.0
# Bytes of a file of which no metadata says its size, and that is metadata itself: Fedora's largest list has 100 MiB.
LARGEST = 1 << 30


class Certificates(t.NamedTuple):
    """What a repository's server asks of its clients, by paths; empty where it asks nothing."""

    client: str = ""
    key: str = ""
    authority: str = ""


class Absent(ShareError):
    """A server doesn't have a file."""


Fetch = t.Callable[[str, Certificates], t.IO[bytes]]


def fetch(url: str, certificates: Certificates) -> t.IO[bytes]:
    """Open a file of a repository; proxies are those of the environment.

    :raises Absent: there is none.
    :raises ShareError: it can't be had.
    """
    from urllib.error import HTTPError

    from ansible.module_utils.urls import open_url

    try:
        answer = open_url(
            url,
            timeout=TIMEOUT,
            client_cert=certificates.client or None,
            client_key=certificates.key or None,
            ca_path=certificates.authority or None,
        )
    except HTTPError as error:
        kind = Absent if error.code in (404, 410) else ShareError
        raise kind(f"{url} answers {error.code}") from error
    except Exception as error:
        raise ShareError(f"{url} can't be downloaded: {error}") from error
    return t.cast("t.IO[bytes]", answer)


def too_large(origin: str, largest: int, listed: bool) -> ShareError:
    """Return the error of a file that is longer than it may be; it wasn't read to its end.

    :param largest: bytes that it may have, which the repository's metadata says where ``listed`` is true.
    """
    if listed:
        limit = f"the {largest} bytes that its repository's metadata names"
        hint = "run again, and where it is so again, name another mirror: this one sends another file"
    else:
        limit = f"{largest >> 20} MiB, and nothing says which size it has"
        hint = "find out what is there, or name another mirror"
    return ShareError(
        f"{origin} has more than {limit}; the download was stopped there, and nothing of it is taken: {hint}",
        code="too_large",
        origin=origin,
        largest=largest,
    )


def _sent(stream: t.IO[bytes], origin: str, size: int) -> t.Iterator[bytes]:
    """Yield what a server sends, as long as it isn't more than it may be.

    :param size: bytes that metadata names; 0 where it names none.
    :raises ShareError: it is more, or less than the server itself has announced, or the connection fails.
    """
    largest = size or LARGEST
    left = largest
    # What a server announces, which http.client counts down.
    if (getattr(stream, "length", None) or 0) > largest:
        raise too_large(origin, largest, bool(size))
    while True:
        try:
            chunk = stream.read(CHUNK)
        except (OSError, http.client.HTTPException) as error:
            raise ShareError(f"{origin} can't be downloaded: the connection failed: {error}", code="cut_off") from error
        if not chunk:
            break
        left -= len(chunk)
        if left < 0:
            raise too_large(origin, largest, bool(size))
        yield chunk
    missing = getattr(stream, "length", None) or 0
    if missing:
        raise ShareError(f"{origin} ended {missing} bytes before the length that its server announced", code="cut_off")


def _plain(path: str) -> t.IO[bytes]:
    return open(path, "rb")


class Store:
    """Files below a folder.

    :param folder: absolute, from the machine's root.
    :param sysroot: the machine's root.
    """

    def __init__(self, folder: str, system: System, sysroot: str = "/", open_file: Fetch = fetch) -> None:
        self.folder = folder.rstrip("/")
        self.system = system
        self._root = sysroot
        self._open = open_file

    def real(self, path: str) -> str:
        """Return a path of the machine as this process opens it."""
        return os.path.join(self._root, path.lstrip("/"))

    def at(self, path: str) -> str:
        """Return a path below the folder, from the machine's root."""
        return f"{self.folder}/{path}"

    def read(self, path: str) -> bytes | None:
        """Return the content of a file of the machine; None where there is none.

        :raises ShareError: it can't be read.
        """
        try:
            with open(self.real(path), "rb") as file:
                return file.read(LARGEST)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ShareError(f"{path} can't be read: {error.strerror}") from error

    def text(self, path: str) -> str:
        """Return the text of a file of the machine.

        :raises ShareError: it can't be read.
        """
        content = self.read(path)
        if content is None:
            raise ShareError(f"{path} isn't there")
        return content.decode("utf-8", "replace")

    @contextlib.contextmanager
    def unpacked(self, path: str) -> t.Iterator[t.IO[bytes]]:
        """Open a compressed file of the machine by its ending.

        :raises ShareError: it can't be read, or is compressed in another way.
        """
        real = self.real(path)
        openers: dict[str, t.Callable[[str], t.Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
        ending = os.path.splitext(path)[1]
        try:
            if ending in (".zst", ".zck"):
                program = {".zst": ["zstd", "-dcq"], ".zck": ["unzck", "--stdout"]}[ending]
                # Text: lists of packages are UTF-8.
                done = self.system.run([*program, path], timeout=600)
                if done.rc != 0:
                    raise ShareError(f"{path} can't be read: {program[0]}: {done.err.strip()[:200] or done.rc}")
                yield io.BytesIO(done.out.encode("utf-8", "surrogateescape"))
                return
            with openers.get(ending, _plain)(real) as file:
                yield file
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
            raise ShareError(f"{path} isn't complete, or no compressed file: {error}") from error
        except OSError as error:
            raise ShareError(f"{path} can't be read: {error.strerror or error}") from error

    def has(self, path: str, algorithm: str, digest: str) -> bool:
        """Return whether a file below the folder has that digest."""
        return bool(digest) and self._digest(self.real(self.at(path)), algorithm) == digest

    def file(self, path: str) -> MirroredFile:
        """Return path, bytes and SHA-256 of a file below the folder; its path stays as given.

        :raises ShareError: there is none.
        """
        real = self.real(self.at(path))
        digest = self._digest(real, "sha256")
        if digest is None:
            raise ShareError(f"{self.at(path)} can't be read")
        return {"path": path, "bytes": os.path.getsize(real), "sha256": digest}

    @staticmethod
    def _digest(real: str, algorithm: str) -> str | None:
        try:
            state = hashlib.new(algorithm)
        except ValueError as error:
            raise ShareError(f"digest {algorithm} isn't known here") from error
        try:
            with open(real, "rb") as file:
                for chunk in iter(lambda: file.read(CHUNK), b""):
                    state.update(chunk)
        except OSError:
            return None
        return state.hexdigest()

    def put(self, path: str, content: bytes) -> bool:
        """Write a file below the folder; return whether that changed it."""
        if self.has(path, "sha256", hashlib.sha256(content).hexdigest()):
            return False
        return self._take(path, "sha256", hashlib.sha256(content).hexdigest(), lambda: io.BytesIO(content), "it")

    def copy(self, path: str, source: str, algorithm: str = "sha256", digest: str = "") -> bool:
        """Take a file of the machine into the folder: as another name of it where the file system can.

        :param source: from the machine's root.
        :param digest: what the repository says; without it, any.
        :returns: whether that changed anything.
        :raises ShareError: it has another digest, or can't be read; the folder is as before.
        """
        found = self._digest(self.real(source), algorithm)
        if found is None or (digest and found != digest):
            what = "can't be read" if found is None else f"isn't what the repository's metadata names ({digest})"
            raise ShareError(f"{source} {what}; run again, which downloads it anew")
        if self.has(path, algorithm, found):
            return False
        temporary = self._temporary(path)
        try:
            os.link(self.real(source), temporary)
        except OSError:
            return self._take(path, algorithm, found, lambda: open(self.real(source), "rb"), source)
        os.replace(temporary, self.real(self.at(path)))
        return True

    def download(
        self, path: str, url: str, certificates: Certificates, algorithm: str, digest: str, size: int = 0
    ) -> bool:
        """Download a file into the folder, unless it is there; return whether that changed anything.

        :param size: bytes that the metadata names; 0 where it names none.
        :raises Absent: the server doesn't have it.
        :raises ShareError: it can't be had, or isn't what the metadata names; the folder is as before.
        """
        if self.has(path, algorithm, digest):
            return False
        return self._take(path, algorithm, digest, lambda: self._open(url, certificates), url, size)

    def _take(
        self,
        path: str,
        algorithm: str,
        digest: str,
        source: t.Callable[[], t.IO[bytes]],
        origin: str,
        size: int | None = None,
    ) -> bool:
        """Write a file.

        :param size: bytes at most; 0 where no metadata says them, None of what is on this machine already.
        """
        temporary = self._temporary(path)
        state = hashlib.new(algorithm)
        try:
            with source() as stream, open(temporary, "wb") as file:
                for chunk in iter(lambda: stream.read(CHUNK), b"") if size is None else _sent(stream, origin, size):
                    state.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            if digest and state.hexdigest() != digest:
                raise ShareError(
                    f"{origin} isn't what its repository's metadata names: {algorithm} {state.hexdigest()} instead of "
                    f"{digest}; it was changed, or isn't complete, so it isn't taken",
                    code="other_content",
                )
            os.replace(temporary, self.real(self.at(path)))
        except OSError as error:
            raise self._failure(path, origin, error) from error
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        return True

    def _temporary(self, path: str) -> str:
        real = self.real(self.at(path)) + PART
        try:
            os.makedirs(os.path.dirname(real), exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(real)
        except OSError as error:
            raise self._failure(path, "it", error) from error
        return real

    def _failure(self, path: str, origin: str, error: OSError) -> ShareError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ShareError(
                f"the disk of {self.folder} is full: {path} isn't there; make room and run again, what is there is "
                "complete and stays",
                code="disk_full",
            )
        return ShareError(f"{origin} can't be written to {self.at(path)}: {error.strerror or error}")

    def drop(self, path: str) -> int:
        """Remove what a program has left of a file of the machine; return its bytes, 0 where there is none."""
        try:
            size = os.lstat(self.real(path)).st_size
            os.unlink(self.real(path))
        except OSError:
            return 0
        return size

    def prune(self, folder: str, keep: t.Container[str]) -> list[str]:
        """Remove the files below a folder of this one that aren't kept; return their paths below it."""
        top = self.real(self.at(folder))
        gone = []
        for place, folders, files in os.walk(top, topdown=False):
            for name in files:
                path = os.path.relpath(os.path.join(place, name), top)
                if path not in keep:
                    os.unlink(os.path.join(place, name))
                    gone.append(path)
            for name in folders:
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(place, name))
        return sorted(gone)

    def folders(self, folder: str) -> list[str]:
        """Return the folders in a folder below this one."""
        try:
            with os.scandir(self.real(self.at(folder))) as rows:
                return sorted(row.name for row in rows if row.is_dir(follow_symlinks=False))
        except FileNotFoundError:
            return []

    def empty(self, folder: str) -> str:
        """Make a folder below this one new; return its path from the machine's root."""
        shutil.rmtree(self.real(self.at(folder)), ignore_errors=True)
        return self.make(folder)

    def make(self, folder: str) -> str:
        """Make a folder below this one, unless it is there; return its path from the machine's root."""
        try:
            os.makedirs(self.real(self.at(folder)), exist_ok=True)
        except OSError as error:
            raise self._failure(folder, "a folder", error) from error
        return self.at(folder)
