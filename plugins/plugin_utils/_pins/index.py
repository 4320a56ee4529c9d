# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The index of a repository of charts, which anybody may have written. Pure."""

from __future__ import annotations

import yaml

from ...module_utils._core.errors import BadInput
from ...module_utils._core.types import JsonObject

# Levels of a repository's index: one has six.
DEEPEST = 50


def entries(content: bytes, name: str) -> list[JsonObject]:
    """Return the entries of a chart in its repository's index; none where it has no such chart.

    :raises BadInput: it isn't an index; the message continues a sentence that begins with its name.
    """
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        # libyaml's own events first: what makes objects of them recurses in C.
        for event in yaml.parse(content, loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST or isinstance(event, yaml.AliasEvent):
                raise BadInput(f"has aliases, or more than {DEEPEST} levels")
        found = yaml.load(content, loader)["entries"].get(name) or []
        return [one for one in found if isinstance(one, dict) and isinstance(one.get("version"), (str, float))]
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInput("isn't an index of charts") from error
