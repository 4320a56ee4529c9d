# SPDX-License-Identifier: GPL-3.0-or-later
"""What servers keep of a pod, which may have 30,000 containers and annotations of 256 KiB."""

from __future__ import annotations

import typing as t

from gpushare.shared._contracts import gpushare as contract
from gpushare.shared._core.types import JsonObject

# An annotation's length; those that the servers write are shorter.
ANNOTATION_LENGTH = 600
LENGTHS = {
    contract.POD_ALLOCATION: 8192,
    contract.POD_MODELS: contract.PATTERNS_LENGTH,
    contract.POD_EXCLUDE_MODELS: contract.PATTERNS_LENGTH,
}
# In the place of a container that isn't kept.
_NO_CONTAINER: JsonObject = {}


def kept_containers(
    containers: t.Iterable[JsonObject], is_kept: t.Callable[[JsonObject], bool] = lambda container: False
) -> list[JsonObject]:
    """Return the containers of a pod that ask for units, at their places; an empty object stands for each other one.

    Of too many for a pod with a share there are still too many.

    :param is_kept: of a container without units, whether it is returned as well.
    """
    kept, numbers = list[JsonObject](), {True: 0, False: 0}
    for container in containers:
        asks = contract.container_units(container) > 0
        if (asks or is_kept(container)) and numbers[asks] <= contract.MOST_SHARES:
            numbers[asks] += 1
            kept.append(container)
        elif len(kept) <= contract.MOST_CONTAINERS:
            kept.append(_NO_CONTAINER)
    return kept


def kept_annotations(annotations: t.Mapping[str, t.Any], names: t.Iterable[str]) -> dict[str, str]:
    """Return those of a pod's annotations that are kept; of a longer one the beginning, which isn't valid, either."""
    there = {name: LENGTHS.get(name, ANNOTATION_LENGTH) for name in names if name in annotations}
    return {name: str(annotations[name])[: length + 1] for name, length in there.items()}
