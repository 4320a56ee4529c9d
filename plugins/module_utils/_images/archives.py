# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The adapter to image archives, as ``docker save`` and ``buildah push docker-archive:`` write them.

Engines record in an archive when and in which container an image was built. ``normalize`` removes that, so that the
same sources give the same bytes. Layers of the base stay unchanged, so that nodes store them once.
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

from .._core.errors import ShareError
from .._core.types import JsonObject

CHUNK = 1 << 20
# Bytes of a manifest, an image's configuration or its bill of materials.
LARGEST_DOCUMENT = 16 << 20
GZIP = b"\x1f\x8b"
# These would override a member's own fields.
OVERRIDING_HEADERS = ("mtime", "atime", "ctime", "uname", "gname")
# Fields about the build container and the engine.
VOLATILE = ("container", "container_config", "docker_version", "id", "parent")


def normalize(source: str, target: str, reference: str, epoch: int, mark: str) -> None:
    """Rewrite an archive of one image reproducibly.

    :param reference: the image's name in the new archive.
    :param epoch: the timestamp of everything, in seconds since 1970.
    :param mark: text in the first history entry after the base's layers.
    :raises ShareError: it isn't an archive of one image.
    """
    folder = os.path.dirname(os.path.abspath(target))
    with _open(source) as archive, tempfile.TemporaryDirectory(dir=folder) as work:
        config, layers = _image(archive)
        count = _own_layers(config, mark)
        files = []
        for number, name in enumerate(layers):
            path = os.path.join(work, str(number))
            own = number >= len(layers) - count
            files.append((_layer(_file(archive, name), path, epoch if own else None), path))
        write(target, _config(config, [digest for digest, _path in files], epoch, mark), files, reference)


def file_in(source: str, path: str) -> str | None:
    """Read a text file of the image in an archive; None if it does not exist.

    :param path: without a leading slash.
    :raises ShareError: it isn't an archive of one image.
    """
    with _open(source) as archive:
        _about, layers = _image(archive)
        for name in reversed(layers):
            with tarfile.open(fileobj=_file(archive, name)) as layer:
                for member in layer:
                    if member.isfile() and member.name.lstrip("./") == path:
                        if member.size > LARGEST_DOCUMENT:
                            raise ValueError(f"{path} has {member.size} bytes")
                        return t.cast(t.IO[bytes], layer.extractfile(member)).read().decode()
    return None


@contextlib.contextmanager
def _open(source: str) -> t.Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(source) as archive:
            yield archive
    except (OSError, EOFError, tarfile.TarError, ValueError, KeyError, TypeError, zlib.error, RecursionError) as error:
        raise ShareError(f"{source} isn't an image archive: {error}") from error


def digest_of(path: str) -> str | None:
    """Return a file's SHA-256; None if it does not exist."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(CHUNK), b""):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()


def _image(archive: tarfile.TarFile) -> tuple[JsonObject, list[str]]:
    images = _json(archive, "manifest.json")
    if len(images) != 1:
        raise ValueError(f"it contains {len(images)} images")
    return _json(archive, images[0]["Config"]), list(images[0]["Layers"])


def _json(archive: tarfile.TarFile, name: str) -> t.Any:
    text = _file(archive, name).read(LARGEST_DOCUMENT + 1)
    if len(text) > LARGEST_DOCUMENT:
        raise ValueError(f"{name} has more than {LARGEST_DOCUMENT >> 20} MiB")
    return json.loads(text)


def _file(archive: tarfile.TarFile, name: str) -> t.IO[bytes]:
    member = archive.getmember(name)
    # Layers with the same content are links to one file.
    file = archive.extractfile(member)
    if file is None:
        raise ValueError(f"{name} isn't a file")
    return file


def _own_layers(config: JsonObject, mark: str) -> int:
    """Return the number of layers on top of the base."""
    history = config.get("history") or []
    begins = next((number for number, row in enumerate(history) if mark in row.get("created_by", "")), None)
    if begins is None:
        raise ValueError("its history doesn't show where the base ends")
    return sum(not row.get("empty_layer") for row in history[begins:])


def _layer(source: t.IO[bytes], path: str, epoch: int | None) -> str:
    """Copy a layer uncompressed, with one timestamp unless ``epoch`` is None; returns its SHA-256."""
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
                member.pax_headers = {
                    key: value for key, value in member.pax_headers.items() if key not in OVERRIDING_HEADERS
                }
                new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return str(digest_of(path))


def time_of(epoch: int) -> str:
    return datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def _config(config: JsonObject, layers: list[str], epoch: int, mark: str) -> bytes:
    now = time_of(epoch)
    new = {key: value for key, value in config.items() if key not in VOLATILE}
    new["created"] = now
    new["rootfs"] = {"type": "layers", "diff_ids": [f"sha256:{layer}" for layer in layers]}
    new["history"] = [dict(row) for row in config["history"]]
    # Random values of the build container.
    new["config"] = {
        key: value for key, value in (config.get("config") or {}).items() if key not in ("Hostname", "Image")
    }
    begins = next(number for number, row in enumerate(new["history"]) if mark in row.get("created_by", ""))
    for row in new["history"][begins:]:
        row["created"] = now
        # podman names the image of the step before, which is another one in each build.
        row.pop("comment", None)
    return json.dumps(new, sort_keys=True, separators=(",", ":")).encode()


def write(target: str, config: bytes, layers: list[tuple[str, str]], reference: str) -> None:
    """Write an archive of one image.

    :param layers: each SHA-256 with the path of the layer, an uncompressed tar file.
    """
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": [f"{digest}.tar" for digest, _path in layers]}]
    with tarfile.open(target, "w", format=tarfile.USTAR_FORMAT) as archive:
        for text, inside in ((json.dumps(manifest).encode(), "manifest.json"), (config, name)):
            archive.addfile(member_of(inside, len(text)), io.BytesIO(text))
        written = set()
        for digest, path in layers:
            if digest not in written:
                written.add(digest)
                with open(path, "rb") as file:
                    archive.addfile(member_of(f"{digest}.tar", os.path.getsize(path)), file)


def member_of(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mtime, member.mode = size, 0, 0o644
    return member
