# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How the servers' image gets to the machines, and for which platforms it is built."""

from __future__ import annotations

import typing as t


def image_delivery(delivery: str, reference: str, archive: str = "") -> str:
    from ansible_collections.kubegpu.share.plugins.module_utils._images.delivery import resolve

    return resolve(delivery, reference, archive)


def image_platforms(nodes: t.Sequence[t.Mapping[str, t.Any]], reference: str, identity: str) -> list[str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._images.delivery import missing_platforms

    return missing_platforms(nodes, reference, identity)


def image_values(reference: str) -> dict[str, str]:
    from ansible_collections.kubegpu.share.plugins.module_utils._images.names import repository_and_tag

    repository, tag = repository_and_tag(reference)
    return {"repository": repository, **({"tag": tag} if tag else {})}


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"image_delivery": image_delivery, "image_platforms": image_platforms, "image_values": image_values}
