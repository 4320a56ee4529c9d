# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""A door: image archives (as ``docker save`` and ``buildah push docker-archive:`` write them) read and written anew.

An engine notes in an archive when and in which container an image was built. ``normalised`` takes that out, so that
the same sources give the same bytes; layers of the base stay as they are, so that a node has them once.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import hashlib
import io
import json
import os
import tarfile
import tempfile
import typing as t
import zlib

from ansible_collections.kubegpu.share.plugins.module_utils._errors import ShareError

Json = t.Dict[str, t.Any]

CHUNK = 1 << 20
GZIP = b"\x1f\x8b"
# Of the container in which an image was put together, and of the engine.
FLEETING = ("container", "container_config", "docker_version", "id", "parent")


def normalised(source: str, target: str, reference: str, epoch: int, ours: str) -> None:
    """Write an archive of one image anew.

    :param reference: the name that the image has in the new one.
    :param epoch: the one time that is told, in seconds since 1970.
    :param ours: how the first line of ours in the image's history is known; layers before it are the base's.
    :raises ShareError: it is no archive of one image.
    """
    try:
        with tarfile.open(source) as archive:
            config, layers = _image(archive)
            count = _ours(config, ours)
            folder = os.path.dirname(os.path.abspath(target))
            with tempfile.TemporaryDirectory(dir=folder) as work:
                files = []
                for number, name in enumerate(layers):
                    path = os.path.join(work, str(number))
                    own = number >= len(layers) - count
                    files.append((_layer(_file(archive, name), path, epoch if own else None), path))
                _write(target, _config(config, [digest for digest, _path in files], epoch, ours), files, reference)
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ShareError(f"{source} can't be read as an image's archive: {error}") from error


def file_in(source: str, path: str) -> str | None:
    """A text file of the one image in an archive; None where it has none.

    :param path: without a slash before it.
    :raises ShareError: it is no archive of one image.
    """
    try:
        with tarfile.open(source) as archive:
            _about, layers = _image(archive)
            for name in reversed(layers):
                with tarfile.open(fileobj=_file(archive, name)) as layer:
                    for member in layer:
                        if member.isfile() and member.name.lstrip("./") == path:
                            return t.cast(t.IO[bytes], layer.extractfile(member)).read().decode()
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise ShareError(f"{source} can't be read as an image's archive: {error}") from error
    return None


def digest_of(path: str) -> str | None:
    """A file's SHA-256; None where there is none."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(CHUNK), b""):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def _image(archive: tarfile.TarFile) -> tuple[Json, list[str]]:
    images = json.load(_file(archive, "manifest.json"))
    if len(images) != 1:
        raise ValueError(f"it holds {len(images)} images")
    return json.load(_file(archive, images[0]["Config"])), list(images[0]["Layers"])


def _file(archive: tarfile.TarFile, name: str) -> t.IO[bytes]:
    member = archive.getmember(name)
    # Layers of the same content are links to one file.
    found = archive.extractfile(member)
    if found is None:
        raise ValueError(f"{name} is no file")
    return found


def _ours(config: Json, mark: str) -> int:
    """How many of the last layers are ours."""
    history = config.get("history") or []
    begins = next((number for number, one in enumerate(history) if mark in one.get("created_by", "")), None)
    if begins is None:
        raise ValueError("its history doesn't say where the base ends")
    return sum(not one.get("empty_layer") for one in history[begins:])


def _layer(source: t.IO[bytes], path: str, epoch: int | None) -> str:
    """Copy a layer, with one time on everything in it; returns its SHA-256."""
    if epoch is None:
        packed = source.read(2) == GZIP
        source.seek(0)
        with open(path, "wb") as target, gzip.open(source) if packed else contextlib.nullcontext(source) as plain:
            for chunk in iter(lambda: plain.read(CHUNK), b""):
                target.write(chunk)
    else:
        with tarfile.open(fileobj=source) as old, tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as new:
            for member in old:
                member.mtime = epoch
                member.uname = member.gname = ""
                kept = {
                    key: value for key, value in member.pax_headers.items() if key not in ("mtime", "atime", "ctime")
                }
                member.pax_headers = {key: value for key, value in kept.items() if key not in ("uname", "gname")}
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return str(digest_of(path))


def _config(config: Json, layers: list[str], epoch: int, mark: str) -> bytes:
    now = datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    new = {key: value for key, value in config.items() if key not in FLEETING}
    new["created"] = now
    new["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{one}" for one in layers]}
    new["history"] = [dict(one) for one in config["history"]]
    # The runtime's, which a build's container is given by chance.
    new["config"] = {
        key: value for key, value in (config.get("config") or {}).items() if key not in ("Hostname", "Image")
    }
    begins = next(number for number, one in enumerate(new["history"]) if mark in one.get("created_by", ""))
    for one in new["history"][begins:]:
        one["created"] = now
    return json.dumps(new, sort_keys=True, separators=(",", ":")).encode()


def _write(target: str, config: bytes, layers: list[tuple[str, str]], reference: str) -> None:
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}.tar" for digest, _path in layers]}]
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
        for text, inside in ((json.dumps(manifest).encode(), "manifest.json"), (config, name)):
            archive.addfile(_member(inside, len(text)), io.BytesIO(text))
        written = set()
        for digest, path in layers:
            if digest not in written:
                written.add(digest)
                with open(path, "rb") as file:
                    archive.addfile(_member(f"{digest}.tar", os.path.getsize(path)), file)


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size, 0, 0o644
    return member
