# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Read what the API has of claims: two lists besides those of nodes and pods."""

from __future__ import annotations

import typing as t

from .._contracts import claim_templates
from .._contracts import claims as dra
from .._contracts.gpushare import ContractError
from .._kube.errors import KubeError
from .._kube.stream import Wanted, listed
from .claims import Read

if t.TYPE_CHECKING:
    from .._kube.api import Kube
    from .._kube.stream import Streams


def read(kube: Kube | Streams) -> Read:
    """List the slices and the claims of the cluster, with one request each."""
    unreadable: list[str] = []

    def keep(parse: t.Callable[[t.Any], t.Any]) -> t.Callable[[t.Any], list[t.Any]]:
        def kept(raw: t.Any) -> list[t.Any]:
            try:
                return [parse(raw)]
            except ContractError as error:
                unreadable.append(str(error))
                return []

        return kept

    version = claim_templates.API_VERSION
    wanted = (
        Wanted("ResourceSlice", keep(dra.slice_of), api_version=version),
        Wanted("ResourceClaim", keep(dra.claim_of), api_version=version),
    )
    try:
        slices, claims = listed(kube, *wanted)
    except KubeError as error:
        if error.status == 404:
            # The API server doesn't serve this version: no share can be a claim.
            return Read()
        if error.status == 403:
            return Read(problem=str(error))
        raise
    return Read(tuple(slices), tuple(claims), "", tuple(unreadable))
