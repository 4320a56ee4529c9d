# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Templates of claims on GPU memory: their names, and what a name stands for.

Admission turns ``aliyun.com/gpu-mem`` of a pod into a claim by template, and can neither create the template nor tell
anybody else what is to be in it. So the name alone says it: ``gpu-mem-4``, ``gpu-mem-4-2`` for two containers of one
card, ``gpu-mem-8.cards-2``, ``gpu-mem-8-4.cards-2`` for two containers of the same two cards,
``gpu-mem-4.models-x2aa100x2a.without-k80``. The policy of role gpushare writes the same names in CEL; a test compares
the two.

The servers' image contains this very file. It imports only the standard library, and does no I/O.
"""

from __future__ import annotations

import dataclasses
import re

# The driver and its DeviceClass, and the domain of its attributes.
DRIVER = "gpu.kubegpu.share"
CAPACITY = "memory"
API_VERSION = "resource.k8s.io/v1"
# In the pod: the claim that admission adds. In the claim: one request for each container, gpu-0 and so on; where
# several containers have several cards, one for each card of each, gpu-0-0 and so on.
POD_CLAIM = "gpu-mem"
REQUEST = "gpu-"
PREFIX = "gpu-mem-"
MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGER = "kubegpu.share"
# Kubernetes' limits: a claim's requests, and the devices that it may get.
MOST_REQUESTS = MOST_CARDS = 32
# For several containers kube-scheduler tries the cards in every order before it knows that they don't fit.
MOST_CARDS_TOGETHER = 4
# A share of one card, in the cluster's unit: a TiB where that is MiB.
MOST_UNITS = 1 << 20
# Models in one list.
MOST_PATTERNS = 16
# An object's name.
NAME_LENGTH = 253

_OF_CARD = re.compile(f"({REQUEST}[0-9]+)-[0-9]+")
# What stands for itself in a name; x begins an escape, with two hexadecimal digits.
_PLAIN = re.compile(r"[a-wyz0-9]")
# What a pattern of models may hold besides: these, and wildcards.
PUNCTUATION = " *?-._/()+"
_NUMBER = "[1-9][0-9]{0,8}"
# As admission writes them.
_PATTERN = f"(?:[a-wyz0-9]|x(?:{'|'.join(f'{ord(char):02x}' for char in 'x' + PUNCTUATION)})){{1,128}}"
_PATTERNS = f"{_PATTERN}(?:-{_PATTERN}){{0,{MOST_PATTERNS - 1}}}"
_NAME = re.compile(
    rf"{PREFIX}({_NUMBER}(?:-{_NUMBER})*)(?:\.cards-({_NUMBER}))?(?:\.models-({_PATTERNS}))?(?:\.without-({_PATTERNS}))?"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a claim asks for.

    :param shares: the units of each container; all get the same cards.
    :param cards: over how many cards of one node each container's units are spread equally.
    :param models: patterns, in lower case, of which a card's model must match one; empty for any.
    :param excluded: patterns, in lower case, of which a card's model must match none.
    """

    shares: tuple[int, ...]
    cards: int = 1
    models: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether a claim can say it."""
        containers = len(self.shares)
        if not containers or any(share % self.cards or share // self.cards > MOST_UNITS for share in self.shares):
            return False
        if containers == 1:
            return self.cards <= MOST_CARDS
        return self.cards <= MOST_CARDS_TOGETHER and containers * self.cards <= MOST_REQUESTS


def name_of(shape: Shape) -> str:
    """Return the name of the template for a shape."""
    parts = [PREFIX + "-".join(map(str, shape.shares))]
    if shape.cards > 1:
        parts.append(f"cards-{shape.cards}")
    for section, patterns in (("models", shape.models), ("without", shape.excluded)):
        if patterns:
            parts.append(f"{section}-" + "-".join(map(_escaped, patterns)))
    return ".".join(parts)


def shape_of(name: str) -> Shape | None:
    """Return what a template's name stands for; None for a name that isn't one of these."""
    match = _NAME.fullmatch(name)
    if not match or len(name) > NAME_LENGTH:
        return None
    shares, cards, models, excluded = match.groups()
    shape = Shape(tuple(map(int, shares.split("-"))), int(cards or 1), _patterns(models), _patterns(excluded))
    # One name for one shape.
    return shape if shape.possible and name_of(shape) == name else None


def container_of(request: str) -> str:
    """Return what the requests of one container have in common: ``gpu-1`` of ``gpu-1-0``; else the request itself."""
    match = _OF_CARD.fullmatch(request)
    return match[1] if match else request


def _escaped(pattern: str) -> str:
    return "".join(char if _PLAIN.fullmatch(char) else f"x{ord(char):02x}" for char in pattern)


def _patterns(text: str | None) -> tuple[str, ...]:
    escape = re.compile("x([0-9a-f]{2})")
    return tuple(escape.sub(lambda match: chr(int(match[1], 16)), part) for part in text.split("-")) if text else ()
