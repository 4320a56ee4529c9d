# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""kubernetes.core's connection options of a module. No I/O."""

from __future__ import annotations

import typing as t

from .._core.types import JsonObject

try:
    from ansible_collections.kubernetes.core.plugins.module_utils.args_common import (  # type: ignore[import-untyped,import-not-found,unused-ignore]
        AUTH_ARG_SPEC,
    )
except ImportError:
    # RealKube reports it.
    AUTH_ARG_SPEC = {}


def auth_arguments() -> JsonObject:
    """Return kubernetes.core's connection options."""
    return dict(AUTH_ARG_SPEC)


def _credentials(kubeconfig: JsonObject) -> set[str]:
    """Return every text in the users of a kubeconfig: keys, tokens, passwords, environment of plugins."""

    def texts(value: t.Any) -> t.Iterator[str]:
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            for part in value.values():
                yield from texts(part)
        elif isinstance(value, list):
            for part in value:
                yield from texts(part)

    users = kubeconfig.get("users")
    entries = [user.get("user") for user in users if isinstance(user, dict)] if isinstance(users, list) else []
    return {text for entry in entries for text in texts(entry) if text}


def hide_credentials(module: t.Any) -> None:
    """Register the credentials of a kubeconfig that is a dictionary as values that Ansible never prints."""
    if isinstance(module.params.get("kubeconfig"), dict):
        module.no_log_values.update(_credentials(module.params["kubeconfig"]))
