# SPDX-License-Identifier: GPL-3.0-or-later
"""Images that have files and no program, as OLM's bundles and catalogs, written without an engine."""

from __future__ import annotations

import io
import json
import os
import tarfile
import tempfile
import typing as t
from pathlib import PurePosixPath

from ansible_collections.kubegpu.share.plugins.module_utils._images import archives


def write(
    target: str,
    reference: str,
    platform: str,
    files: t.Mapping[str, bytes],
    labels: t.Mapping[str, str],
    epoch: int,
) -> None:
    """Write the archive of an image that has files alone, and no program; the same files give the same bytes.

    :param reference: the image's name in the archive.
    :param platform: as ``linux/amd64``.
    :param files: by their paths in the image, without a leading slash.
    :param epoch: the timestamp of everything, in seconds since 1970.
    """
    folders = {parent.as_posix() for name in files for parent in PurePosixPath(name).parents} - {"."}
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(target))) as work:
        path = os.path.join(work, "layer")
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as layer:
            for name in sorted(folders):
                folder = archives.member_of(name, 0)
                folder.type, folder.mode, folder.mtime = tarfile.DIRTYPE, 0o755, epoch
                layer.addfile(folder)
            for name, content in sorted(files.items()):
                member = archives.member_of(name, len(content))
                member.mtime = epoch
                layer.addfile(member, io.BytesIO(content))
        digest = str(archives.digest_of(path))
        operating_system, _slash, architecture = platform.partition("/")
        config = {
            "architecture": architecture,
            "os": operating_system,
            "created": archives.time_of(epoch),
            "config": {"Labels": dict(labels)},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": archives.time_of(epoch), "created_by": "kubegpu.share"}],
        }
        text = json.dumps(config, sort_keys=True, separators=(",", ":")).encode()
        archives.write(target, text, [(digest, path)], reference)
