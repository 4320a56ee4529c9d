# SPDX-License-Identifier: GPL-3.0-or-later
"""The ResourceClaimTemplate that a name of the contract stands for. No I/O."""

from __future__ import annotations

import json
import typing as t

from gpushare.shared._contracts.claim_templates import (
    API_VERSION,
    CAPACITY,
    DRIVER,
    MANAGED_BY,
    MANAGER,
    REQUEST,
    Shape,
    shape_of,
)
from gpushare.shared._core.types import JsonObject

SUFFIXES = {"GiB": "Gi", "MiB": "Mi"}


def template_of(namespace: str, name: str, unit: str) -> JsonObject | None:
    """Return the ResourceClaimTemplate of a name; None for a name that stands for none.

    :param unit: ``GiB`` or ``MiB``, of the whole cluster.
    """
    shape = shape_of(name)
    if shape is None:
        return None
    selectors = [{"cel": {"expression": text}} for text in _selectors(shape)]
    together = len(shape.shares) > 1 and shape.cards > 1
    # A card's requests follow one another: whether they fit is known before the next card is chosen.
    named = (
        [
            (f"{REQUEST}{number}-{card}", share, number == 0)
            for card in range(shape.cards)
            for number, share in enumerate(shape.shares)
        ]
        if together
        else [(f"{REQUEST}{number}", share, number == 0) for number, share in enumerate(shape.shares)]
    )
    requests = [
        {
            "name": request,
            "exactly": {
                "deviceClassName": DRIVER,
                "allocationMode": "ExactCount",
                "count": 1 if together else shape.cards,
                # The other containers' requests get the same cards as the first one's, so they needn't say it again.
                **({"selectors": selectors} if selectors and of_first else {}),
                "capacity": {"requests": {CAPACITY: f"{share // shape.cards}{SUFFIXES[unit]}"}},
            },
        }
        for request, share, of_first in named
    ]
    constraints = {"constraints": rules} if (rules := list(_constraints(shape))) else {}
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": namespace, "labels": {MANAGED_BY: MANAGER}},
        "spec": {"spec": {"devices": {"requests": requests, **constraints}}},
    }


def _constraints(shape: Shape) -> t.Iterator[JsonObject]:
    """Return that the containers have the same cards, and that these are different ones."""
    same, different = "matchAttribute", "distinctAttribute"
    uuid, containers, cards = f"{DRIVER}/uuid", range(len(shape.shares)), range(shape.cards)
    if len(containers) > 1 and len(cards) > 1:
        for card in cards:
            yield {"requests": [f"{REQUEST}{number}-{card}" for number in containers], same: uuid}
        yield {"requests": [f"{REQUEST}0-{card}" for card in cards], different: uuid}
    elif len(containers) > 1:
        yield {same: uuid}
    elif len(cards) > 1:
        yield {different: uuid}


def _selectors(shape: Shape) -> t.Iterator[str]:
    """Return conditions in CEL for a card's model; a card without one never meets them."""
    # A function or an optional field in between would hide the text's length, and the API server find it too complex.
    model = f'device.attributes["{DRIVER}"].model'
    if shape.models:
        yield f"has({model}) && {model}.matches({_expression(shape.models)})"
    if shape.excluded:
        yield f'has({model}) && {model} != "" && !{model}.matches({_expression(shape.excluded)})'


def _expression(patterns: t.Iterable[str]) -> str:
    """Return a regular expression that matches what one of the patterns does, as text in CEL."""
    # A class of one character instead of a backslash, which would be doubled in CEL and once more in JSON.
    meant = {"*": ".*", "?": ".", **{character: f"[{character}]" for character in ".()+"}}
    texts = ("".join(meant.get(character, character) for character in pattern) for pattern in patterns)
    return json.dumps(f"(?i)^({'|'.join(texts)})$")
