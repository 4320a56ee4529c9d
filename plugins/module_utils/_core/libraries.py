# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Libraries that the controller has and nodes may lack: what imports this file plans on the controller alone.

ansible-test imports every file of module_utils without them, and with Python 3.9, which has no tomllib.
"""

from __future__ import annotations

import typing as t

try:
    import jinja2
except ImportError:
    jinja2 = None  # type: ignore[assignment,unused-ignore]
try:
    import tomllib
except ImportError:
    tomllib = None  # type: ignore[assignment,unused-ignore]
try:
    import yaml
    from yaml import SafeLoader
except ImportError:
    yaml = None  # type: ignore[assignment,unused-ignore]

    class SafeLoader:  # type: ignore[no-redef]
        """What is derived from it can be imported."""

        yaml_implicit_resolvers: t.ClassVar[dict[str, t.Any]] = {}

        @classmethod
        def add_implicit_resolver(cls, *_arguments: t.Any) -> None:
            """Do nothing: nothing is read here."""


__all__ = ("SafeLoader", "jinja2", "tomllib", "yaml")
