# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# This file is PRIVATE to the collection. It can have breaking changes at any time.

"""Options that apt_packages and rpm_packages share, judged before anything is done with them. Pure."""

from __future__ import annotations

import re
import typing as t

from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput

Json = t.Dict[str, t.Any]


class Named(t.Protocol):
    @property
    def name(self) -> str: ...


def check_word(option: str, value: str) -> None:
    """Refuse what can't be part of a file's name that package managers read: no dot, no blank.

    :raises BadInput: the sentence names the option.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9_-]*", value):
        raise BadInput(f"{option}: {value!r} may hold small letters, digits, - and _ only")


def check_once(repositories: t.Sequence[Named], packages: t.Sequence[Named]) -> None:
    """Refuse what is named twice.

    :raises BadInput: the sentence names the option.
    """
    names = [one.name for one in repositories]
    if len(set(names)) != len(names):
        raise BadInput(f"repositories: two have the same name ({', '.join(names)})")
    names = [one.name for one in packages]
    if len(set(names)) != len(names):
        raise BadInput(f"packages: one is named twice ({', '.join(names)})")


def check_addresses(option: Json, schemes: str) -> None:
    """Refuse a repository's url or key_url that is none.

    :param schemes: of the repository, as a pattern.
    :raises BadInput: the sentence names the repository.
    """
    where = f"repositories: {option['name']}:"
    if not re.fullmatch(rf"({schemes})://?[^\s]+", option["url"]):
        raise BadInput(f"{where} url {option['url']!r} isn't an address of a repository")
    if option.get("key_url") and not re.fullmatch(r"(https?|file)://[^\s]+", option["key_url"]):
        raise BadInput(f"{where} key_url {option['key_url']!r} isn't an address of a key")


def key_fields(option: Json) -> dict[str, str]:
    """``key_url``, ``key_text`` and ``key_sha256`` of a repository's option; empty where not given.

    :raises BadInput: key_sha256 is none.
    """
    sha256 = (option.get("key_sha256") or "").lower()
    if sha256 and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise BadInput(f"repositories: {option['name']}: key_sha256 isn't 64 hexadecimal digits")
    text = (option.get("key_text") or "").strip()
    return {"key_url": option.get("key_url") or "", "key_text": text + "\n" if text else "", "key_sha256": sha256}
