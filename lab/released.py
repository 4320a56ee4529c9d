# SPDX-License-Identifier: GPL-3.0-or-later
"""Download released programs instead of building them, by the SHA-256 in released.yml, from their projects' own places.

Whether the internet is there is decided once for a process, by one HEAD request. Where it isn't, where a digest isn't
known, or where a download fails, the caller builds the programs. A file with another digest is an error.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import platform
import shutil
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from lab.paths import cache_root, made_once
from lab.settings import NO_DOWNLOADS, download_url, variable
from lab.shell import LabError, say, step

TABLE = Path(__file__).resolve().parent / "released.yml"
# By their names for the kernel.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Seconds: for the answer to the HEAD request with all that it needs, for a file's answer without the content, without a
# byte, and for one tool set's files.
ANSWER = 5.0
HEAD = 30.0
SILENCE = 15.0
ALL = 900.0
# Each try after the first continues a download that broke off.
TRIES = 4
LARGEST = 1 << 30
CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """A project's place of released files; the paths have {version}, {architecture} and, for a program each, {program}.

    :ivar published: the path of the project's own list of SHA-256.
    """

    name: str
    path: str
    published: str


SOURCES = {
    "k8s.io/kubernetes": Source(
        "kubernetes",
        "v{version}/bin/linux/{architecture}/{program}",
        "v{version}/bin/linux/{architecture}/{program}.sha256",
    ),
    "github.com/containerd/containerd/v2": Source(
        "containerd",
        "v{version}/containerd-{version}-linux-{architecture}.tar.gz",
        "v{version}/containerd-{version}-linux-{architecture}.tar.gz.sha256sum",
    ),
    "go.etcd.io/etcd/server/v3": Source(
        "etcd",
        "v{version}/etcd-v{version}-linux-{architecture}.tar.gz",
        "v{version}/SHA256SUMS",
    ),
}


@dataclass(frozen=True)
class File:
    """A released file: its name in the table, its path below the project's place, and that of its published digest."""

    name: str
    path: str
    published: str


class NotHere(Exception):
    """The released programs can't be had; the message says why."""


def files(source: Source, version: str, architecture: str, programs: tuple[str, ...]) -> list[File]:
    """Return the files that have these programs."""
    single = "{program}" in source.path
    found = []
    for program in programs if single else programs[:1]:
        values = {"version": version, "architecture": architecture, "program": program}
        path = source.path.format(**values)
        found.append(File(path.rpartition("/")[2], path, source.published.format(**values)))
    return found


@dataclass(frozen=True)
class Release:
    """The released programs of a tool set, for this machine.

    :ivar digests: the known SHA-256 of its files, by their names.
    """

    name: str
    source: Source
    version: str
    programs: tuple[str, ...]
    files: tuple[File, ...]
    digests: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """The cache folder, which may be missing."""
        parts = (self.programs, [self.digests.get(file.name, "") for file in self.files])
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return cache_root() / "bin" / f"{self.name}-{self.version}-released-{key}"

    def download(self) -> bool:
        """Fill the folder; return False, and print the reason, where the programs have to be built.

        :raises LabError: a file has another SHA-256 than the table, or lacks a program.
        """
        try:
            base = self._allowed()
            with made_once(self.folder) as fresh, step(f"downloading {self.name} {self.version} from {base}"):
                if fresh:
                    end = time.monotonic() + ALL
                    for file in self.files:
                        _place(f"{base}/{file.path}", file.name, self.digests[file.name], self.programs, fresh, end)
                    missing = [program for program in self.programs if not (fresh / program).exists()]
                    if missing:
                        raise LabError(f"{self.files[0].name} of {base} has no {', '.join(missing)}.")
        except NotHere as reason:
            say(f"{self.name} {self.version} isn't downloaded: {reason}")
            return False
        return True

    def _allowed(self) -> str:
        """Return the address to download from.

        :raises NotHere: it is switched off or unreachable, or a digest isn't known.
        """
        base = download_url(self.source.name, os.environ)
        if base == NO_DOWNLOADS:
            raise NotHere(f"{variable(f'{self.source.name}_url')} is {NO_DOWNLOADS}")
        unknown = [file.name for file in self.files if not self.digests.get(file.name)]
        if unknown:
            raise NotHere(f"lab/{TABLE.name} has no SHA-256 of {', '.join(unknown)}, which `make pins` asks for")
        urls = [download_url(source.name, os.environ) for source in SOURCES.values()]
        reason = _unreachable(next(url for url in urls if url != NO_DOWNLOADS))
        if reason:
            raise NotHere(reason)
        return base


def find(name: str, module: str, version: str, programs: tuple[str, ...]) -> Release | None:
    """Return the release that a tool set can be taken from; None where its project has none that is known here.

    :param name: of the tool set.
    """
    source = SOURCES.get(module)
    architecture = ARCHITECTURES.get(platform.machine(), "")
    if not source or not architecture:
        return None
    row = yaml.safe_load(TABLE.read_text(encoding="utf-8"))[source.name].get(version)
    if row is None:
        return None
    return Release(
        name, source, version, programs, tuple(files(source, version, architecture, programs)), row[architecture]
    )


# --------------------------------------------------------------------------- whether the internet is there


@cache
def _unreachable(url: str) -> str:
    """Return why nothing answers at a URL; empty where something does, whatever it answers."""
    try:
        with _within(ANSWER, urllib.request.Request(url, method="HEAD"), ANSWER):
            return ""
    except urllib.error.HTTPError:
        return ""
    except TimeoutError:
        return f"{url} doesn't answer within {ANSWER:.0f} s"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{url} can't be reached: {_words(error)}"


def _within(seconds: float, request: urllib.request.Request, silence: float) -> http.client.HTTPResponse:
    """Return the answer to a request once its head is there.

    :param silence: seconds without a byte, now and of its content.
    :raises TimeoutError: it isn't there in time. A timeout of sockets is for each byte, and for no name server.
    """
    found: list[http.client.HTTPResponse] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            found.append(urllib.request.urlopen(request, timeout=silence))
        except Exception as error:
            failed.append(error)

    # It ends with this process.
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    if not found:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return found[0]


def _words(error: Exception) -> str:
    """Return an error's text for a terminal: it may have what a server sent."""
    text = str(error) or type(error).__name__
    return "".join(one if one.isprintable() else "?" for one in text[:300])


# --------------------------------------------------------------------------- one file


def _place(url: str, name: str, digest: str, wanted: tuple[str, ...], folder: Path, end: float) -> None:
    """Download a file and put the programs of it into a folder."""
    part = folder / f".{name}"
    _download(url, part, end)
    with part.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != digest:
        raise LabError(
            f"{url} has SHA-256 {found}, but lab/released.yml has {digest}: it isn't used. Set another "
            f"address, or `{NO_DOWNLOADS}` to build from source (lab/README.md, Values)."
        )
    if name.endswith(".tar.gz"):
        _unpack(url, part, wanted, folder)
        part.unlink()
    else:
        part.rename(folder / name)
        (folder / name).chmod(0o755)


def _unpack(url: str, part: Path, wanted: tuple[str, ...], folder: Path) -> None:
    try:
        with tarfile.open(part, "r:gz") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                content = archive.extractfile(member) if member.isfile() and name in wanted else None
                if content:
                    with (folder / name).open("wb") as program:
                        shutil.copyfileobj(content, program, CHUNK)
                    (folder / name).chmod(0o755)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise LabError(f"{url} can't be unpacked: {error}.") from None


def _download(url: str, part: Path, end: float) -> None:
    """Download a file; a transfer that broke off is continued where it stopped.

    :raises NotHere: it can't be had completely.
    """
    reason = ""
    for _try in range(TRIES):
        try:
            if _transfer(url, part, end):
                return
            reason = "the transfer broke off"
        except urllib.error.HTTPError as error:
            raise NotHere(f"{url} answers {error.code}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            reason = _words(error)
    raise NotHere(f"{url}: {reason}")


def _transfer(url: str, part: Path, end: float) -> bool:
    """Append what is missing of a file; return whether it is complete."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    with _within(HEAD, request, SILENCE) as answer:
        # A server without ranges sends everything again.
        continued = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        have = have if continued else 0
        length = answer.headers.get("Content-Length", "")
        size = have + int(length) if length.isdecimal() else None
        with part.open("ab" if continued else "wb") as file:
            while chunk := answer.read1(CHUNK):
                file.write(chunk)
                have += len(chunk)
                if have > LARGEST:
                    raise NotHere(f"{url} has more than {LARGEST >> 20} MiB")
                if time.monotonic() > end:
                    raise NotHere(f"{url} takes too long: the files of a tool set may take {ALL:.0f} s")
    return size is None or have == size
