# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Names of images, and what a container runtime's listing says of them. Pure."""

from __future__ import annotations

import re
import typing as t

# On an image in the node's store: SHA-256 of the archive that it was imported from.
ARCHIVE_LABEL = "kubegpu.share/archive"
# Kubelet's image garbage collection spares such images; there is no registry to fetch ours from again.
PINNED_LABEL = "io.cri-containerd.pinned"


def full_reference(reference: str) -> str:
    """A reference as container runtimes store it: with registry, and with a tag or digest.

    ``gpushare:1.0`` is docker.io/library/gpushare:1.0.
    """
    first, slash, rest = reference.partition("/")
    if not slash:
        name = f"docker.io/library/{reference}"
    elif "." in first or ":" in first or first == "localhost":
        name = f"docker.io/library/{rest}" if first == "docker.io" and "/" not in rest else reference
    else:
        name = f"docker.io/{reference}"
    return name if "@" in name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def archives(listing: str, references: t.Sequence[str]) -> dict[str, str]:
    """From ``ctr images ls``: those of the references that are there, each with its archive's SHA-256 or nothing.

    :param references: as the user wrote them; they are the keys of the answer.
    """
    labels: dict[str, str] = {}
    for line in listing.splitlines()[1:]:
        columns = line.split()
        if columns:
            found = re.search(rf"(?:^|[\s,]){re.escape(ARCHIVE_LABEL)}=([0-9a-f]{{64}})(?:$|[\s,])", line)
            labels[columns[0]] = found.group(1) if found else ""
    return {one: labels[full_reference(one)] for one in references if full_reference(one) in labels}
