# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Pack the sources of the servers' image into one archive; the same sources give the same bytes."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import typing as t
from pathlib import Path

from .._core.errors import BadInput

# The collection's folder, installed or checked out.
COLLECTION = Path(__file__).resolve().parents[3]
FOLDER = "images/gpushare"
# Files of the collection that the image takes as well, below gpushare/shared; also named in the Containerfile.
SHARED = (
    "plugins/module_utils/_contracts/card_exclusion.py",
    "plugins/module_utils/_contracts/cgroup.py",
    "plugins/module_utils/_contracts/claim_templates.py",
    "plugins/module_utils/_contracts/gpushare.py",
    "plugins/module_utils/_contracts/pod_resources.py",
    "plugins/module_utils/_contracts/protobuf.py",
    "plugins/module_utils/_core/errors.py",
    "plugins/module_utils/_core/types.py",
    "plugins/module_utils/_core/untrusted.py",
    "plugins/module_utils/_kubelet/checkpoint.py",
    "plugins/module_utils/_kubelet/devices.py",
    "plugins/module_utils/_kubelet/source.py",
    "plugins/module_utils/_kubelet/types.py",
    "plugins/module_utils/_nvml/binding.py",
    "plugins/module_utils/_nvml/device.py",
    "plugins/module_utils/_nvml/facts.py",
    "plugins/module_utils/_nvml/host.py",
    "plugins/module_utils/_nvml/processes.py",
    "plugins/module_utils/_nvml/types.py",
    "plugins/module_utils/_nvml/worker.py",
)
# Files that builds and tests leave behind. Wheels are packed: an image can be built from them without a package index.
EXCLUDED = ("__pycache__", ".egg-info", "_cache", "bdist.", "/build/lib")


def pack(target: str, collection: Path = COLLECTION) -> str:
    """Write the sources, with symbolic links kept, to an archive.

    :param target: path of the archive.
    :param collection: the collection's folder.
    :returns: SHA-256 of the archive, in hexadecimal.
    :raises BadInput: the collection was installed without the sources.
    """
    with open(target, "wb") as file:
        return _write(file, collection)


def digest(collection: Path = COLLECTION) -> str:
    """Return the SHA-256 of the archive that ``pack`` would write, in hexadecimal.

    :raises BadInput: the collection was installed without the sources.
    """
    return _write(None, collection)


class _Sink:
    """Compute the digest of what is written, and pass it on."""

    def __init__(self, file: t.IO[bytes] | None) -> None:
        self.sha256 = hashlib.sha256()
        self._file = file

    def write(self, chunk: bytes) -> int:
        self.sha256.update(chunk)
        return self._file.write(chunk) if self._file else len(chunk)


def _write(file: t.IO[bytes] | None, collection: Path) -> str:
    if not (collection / FOLDER / "Containerfile").is_file():
        raise BadInput(f"image_build: the collection in {collection} has no {FOLDER}, the sources of the image")
    paths = sorted(path for path in (collection / FOLDER).rglob("*") if path.is_symlink() or path.is_file())
    names = [path.relative_to(collection).as_posix() for path in [*paths, *(collection / shared for shared in SHARED)]]
    sink = _Sink(file)
    with tarfile.open(mode="w|", fileobj=t.cast(t.IO[bytes], sink), format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            if any(part in name for part in EXCLUDED):
                continue
            path = collection / name
            member = tarfile.TarInfo(name)
            if path.is_symlink():
                member.type, member.linkname = tarfile.SYMTYPE, os.readlink(path)
                archive.addfile(member)
                continue
            content = path.read_bytes()
            member.size, member.mode = len(content), 0o755 if os.access(path, os.X_OK) else 0o644
            archive.addfile(member, io.BytesIO(content))
    return sink.sha256.hexdigest()
