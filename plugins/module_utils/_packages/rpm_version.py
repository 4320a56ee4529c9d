# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Versions as rpm compares them: ``[epoch:]version-release``."""

from __future__ import annotations

import fnmatch
import functools
import re
import typing as t


class Version(t.NamedTuple):
    """The three parts; no epoch counts as 0."""

    epoch: str
    version: str
    release: str

    @classmethod
    def of(cls, text: str) -> Version:
        epoch, colon, rest = text.rpartition(":")
        version, _dash, release = rest.partition("-")
        return cls(epoch if colon and epoch else "0", version, release)

    def __str__(self) -> str:
        start = "" if self.epoch == "0" else f"{self.epoch}:"
        return f"{start}{self.version}-{self.release}" if self.release else f"{start}{self.version}"

    @property
    def full(self) -> str:
        """Return the text with its epoch, even where that is 0."""
        return f"{self.epoch}:{self.version}-{self.release}"


def matches(pattern: str, text: str) -> bool:
    """Return whether a version matches a pattern; an empty pattern matches every version.

    The epoch is compared only where the pattern has a ``:``, the release only where it has a ``-``.
    """
    if not pattern:
        return True
    have = Version.of(text)
    wanted_epoch, colon, rest = pattern.rpartition(":")
    if colon and not fnmatch.fnmatchcase(have.epoch, wanted_epoch or "0"):
        return False
    whole = f"{have.version}-{have.release}" if "-" in rest else have.version
    return fnmatch.fnmatchcase(whole, rest)


def compare(left: str, right: str) -> int:
    """Return -1, 0 or 1, as rpm orders two ``[epoch:]version-release``."""
    one, two = Version.of(left), Version.of(right)
    for mine, other in zip(one, two):
        order = _compare(mine, other)
        if order:
            return order
    return 0


by_version = functools.cmp_to_key(compare)


def newest(versions: t.Iterable[str]) -> list[str]:
    """Return versions, the newest first."""
    return sorted(versions, key=by_version, reverse=True)


def _compare(left: str, right: str) -> int:
    """Compare one part as rpmvercmp of rpm 4.18 does: digits as numbers, ``~`` before the end, ``^`` after it."""
    if left == right:
        return 0
    ones, others = _runs(left), _runs(right)
    for one, other in zip([*ones, ""], [*others, ""]):
        if one == other:
            continue
        for mark, order in (("~", -1), ("^", 1)):
            if mark in (one, other):
                # A version that ends here is older than one with ^; one that continues with digits or letters is newer.
                if mark == "^" and one and other:
                    return -1 if one == mark else 1
                return order if one == mark else -order
        if not one or not other:
            return 1 if one else -1
        if one.isdigit() != other.isdigit():
            return 1 if one.isdigit() else -1
        if one.isdigit():
            if int(one) != int(other):
                return 1 if int(one) > int(other) else -1
        else:
            return 1 if one > other else -1
    return (len(ones) > len(others)) - (len(ones) < len(others))


def _runs(text: str) -> list[str]:
    return re.findall(r"[0-9]+|[A-Za-z]+|~|\^", text)
