# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Names as users write them: nodes of the inventory's hosts, and lists as text."""

from __future__ import annotations

import typing as t

NODE = "gpu_node_name"


def node_name(host: str, variables: t.Mapping[str, t.Any]) -> str:
    """Return the name that the cluster has for a host: ``gpu_node_name``, or else the host's own."""
    return str(variables.get(NODE) or host)


def node_names(hosts: t.Iterable[str], hostvars: t.Mapping[str, t.Mapping[str, t.Any]]) -> list[str]:
    """Return the names that the cluster has for hosts, in their order."""
    # The get of Ansible's hostvars has no default.
    return [node_name(host, hostvars[host] if host in hostvars else {}) for host in hosts]  # noqa: SIM401


def listed(given: t.Any) -> list[str]:
    """Return a list that may be text with commas, as from the command line or a survey of AWX."""
    words = given.split(",") if isinstance(given, str) else given
    return [word for word in (str(one).strip() for one in words) if word]
