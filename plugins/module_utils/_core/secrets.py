# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Replace credentials in a text by numbered placeholders before it is shown or edited, and restore them. Pure."""

from __future__ import annotations

import re
import typing as t

PLACEHOLDER = "kubegpu-share-masked"

Span = tuple[int, int]

# Everything between a URL's scheme and the last at sign before its path.
URL = re.compile(r"://(?P<secret>[^\s/]+)@")
_SECRET_KEY = (
    r"(?:[\w.-]*(?:password|passwd|token|secret|credential|api_?key)[\w.-]*|(?:[\w.-]*[.-])?auth(?:orization)?)"
)
# A key and its value in a message or a comment; without quotes behind a "=" only, as in "unexpected token: x".
_ASSIGNED = re.compile(
    rf"(?<![\w.-]){_SECRET_KEY}[\"']?\s*(?:"
    r"[=:]\s*\[?\s*(?P<quote>[\"'])(?P<quoted>(?:(?!(?P=quote))[^\\\n]|\\.)+)"
    r"|=\s*(?P<bare>[^\s\"'\[\]{},;#]+)"
    r"|:\s*(?:basic|bearer)\s+(?P<header>[^\s\"',;]+))",
    re.IGNORECASE,
)
_URL_IN_WORDS = re.compile(r"://(?P<secret>[^\s/\"']+)@")


def masked(text: str, spans: t.Iterable[Span]) -> str:
    """Replace each credential by a numbered placeholder.

    :param spans: of the credentials, in their order and without an overlap.
    """
    parts, done = [], 0
    for number, (start, end) in enumerate(spans, 1):
        parts += [text[done:start], f"{PLACEHOLDER}-{number}"]
        done = end
    return "".join(parts) + text[done:]


def unmasked(text: str, real: str, spans: t.Iterable[Span]) -> str:
    """Restore the credentials of a masked text, which may have been edited.

    :param real: the text that was masked, and ``spans`` its credentials.
    """
    secrets = [real[start:end] for start, end in spans]

    def secret(match: t.Match[str]) -> str:
        number = int(match.group(1))
        return secrets[number - 1] if 0 < number <= len(secrets) else match.group()

    return re.sub(rf"{PLACEHOLDER}-([0-9]+)", secret, text)


def is_secret(key: str) -> bool:
    """Return whether the values of a key are credentials."""
    return re.fullmatch(_SECRET_KEY, key, re.IGNORECASE) is not None


def in_words(text: str) -> list[Span]:
    """Find the credentials of a message or a comment: those of URLs, and values that are assigned to a secret key."""
    spans = [match.span("secret") for match in _URL_IN_WORDS.finditer(text)]
    spans += [match.span(match.lastgroup or 0) for match in _ASSIGNED.finditer(text)]
    return without_overlap(spans)


def without_overlap(spans: t.Iterable[Span]) -> list[Span]:
    """Sort spans, and join those that overlap."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def mask_words(text: str) -> str:
    """Replace the credentials of a daemon's message, which can't be restored."""
    return masked(text, in_words(text))
