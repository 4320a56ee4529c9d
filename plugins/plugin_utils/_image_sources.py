# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""The sources of the servers' image as one file, the same bytes for the same sources."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

# The collection's own folder, installed or checked out.
COLLECTION = Path(__file__).resolve().parents[2]
FOLDER = "images/gpushare"
CONTRACT = "plugins/module_utils/_gpushare.py"
# What building, testing and looking leaves there. Wheels stay: an image can be built of them alone.
LEFT = ("__pycache__", ".egg-info", "_cache", "bdist.", "/build/lib")


def packed(target: str, collection: Path = COLLECTION) -> str:
    """Write the sources into an archive, links among them as links; returns their SHA-256.

    :raises BadInput: they aren't there.
    """
    if not (collection / FOLDER / "Containerfile").is_file():
        raise BadInput(f"image_build: the collection in {collection} came without {FOLDER}, which is what is built")
    paths = sorted(path for path in (collection / FOLDER).rglob("*") if path.is_symlink() or path.is_file())
    names = [path.relative_to(collection).as_posix() for path in [*paths, collection / CONTRACT]]
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in names:
            if any(left in name for left in LEFT):
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
    return hashlib.sha256(Path(target).read_bytes()).hexdigest()
