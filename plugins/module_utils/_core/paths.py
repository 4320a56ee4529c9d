# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths below a folder, as an archive, a repository or a machine names them, and folders' names of addresses. Pure."""

from __future__ import annotations

import hashlib
import re
import typing as t

# Characters of a path, and of a name that was made of an address.
LONGEST, LONGEST_NAME = 1000, 150
_VISIBLE = re.compile(r"[\w+~:@=%,^()!-][\w.+~:@=%,^()!-]*", re.ASCII)
_HIDDEN = re.compile(r"\.[\w.+~:@=%,^()!-]*[\w+~:@=%,^()!-][\w.+~:@=%,^()!-]*", re.ASCII)
_OTHER = re.compile(r"[^A-Za-z0-9.-]+")


def file_path(value: t.Any, hidden: bool = False) -> str:
    """Return a path below a folder.

    :param hidden: a part may begin with a dot; a web server would take some of these for its configuration.
    :raises ValueError: it is absolute, has a step up or an empty one, a hidden name, or characters that a URL or a
        list of digests can't have. The message continues a sentence that names it.
    """
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST:
        raise ValueError("isn't a path")
    for part in value.split("/"):
        if not _VISIBLE.fullmatch(part) and not (hidden and _HIDDEN.fullmatch(part)):
            raise ValueError("isn't a path below a folder, of letters, digits and .+~:@=%,^()!_- without a dot first")
    return value


def safe_name(address: str) -> str:
    """Return host and path of an address as one name of a folder: ``https://m.example.org/a/`` as m.example.org_a.

    :raises ValueError: nothing is left of it.
    """
    place = address.partition("://")[2] or address.partition(":")[2] or address
    name = _OTHER.sub("_", place).strip("_.-")
    if not name:
        raise ValueError("has neither a host nor a path")
    if len(name) <= LONGEST_NAME:
        return name
    # Two that begin alike stay two.
    return f"{name[: LONGEST_NAME - 9]}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def word_name(address: str) -> str:
    """Return host and path of an address as a name that a package manager's files may have.

    :raises ValueError: as ``safe_name``.
    """
    return re.sub(r"[^a-z0-9]+", "-", safe_name(address).lower()).strip("-")[:80]
