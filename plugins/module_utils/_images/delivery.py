# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Decide how the nodes get the servers' image, and for which platforms it has to be built. Pure."""

from __future__ import annotations

import typing as t

AUTO, BUILD, IMPORT, REGISTRY = "auto", "build", "import", "registry"


# Those by which an image gets into the node's store without being pulled.
IMPORTED = (BUILD, IMPORT)


PLATFORMS = ("linux/amd64", "linux/arm64")


# Names of images that no registry has.
LOCAL = "localhost/"


def resolve(delivery: str, reference: str, archive: str = "") -> str:
    """Return the delivery that ``auto`` stands for; any other value unchanged.

    :param reference: the image's name.
    :param archive: path of its archive; empty if the user has named none.
    """
    if delivery != AUTO:
        return delivery
    if archive:
        return IMPORT
    return BUILD if reference.startswith(LOCAL) else REGISTRY


def missing_platforms(nodes: t.Sequence[t.Mapping[str, t.Any]], reference: str, identity: str) -> list[str]:
    """Return the sorted platforms of the nodes that lack an image.

    :param nodes: ``gpu_node`` of each; empty where it is unknown.
    :param identity: the label of the image on a node that has it.
    """
    return sorted(
        {
            platform
            for node in nodes
            if node and (node.get("images") or {}).get(reference) != identity
            # There is no image for another one, which preflight reports.
            if (platform := f"linux/{node['distribution']['arch']}") in PLATFORMS
        }
    )
