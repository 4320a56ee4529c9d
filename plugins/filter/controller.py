# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Paths on the controller, and texts that it prints."""

from __future__ import annotations

import typing as t


def kubeconfig(value: t.Any) -> t.Any:
    from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import local_path as paths
    from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import node_results

    # Of the tasks that reach the cluster, those of another collection's modules have no action of this one.
    node_results.require()
    return paths.kubeconfig(value)


def local_path(value: t.Any) -> t.Any:
    from ansible_collections.kubegpu.share.plugins.plugin_utils._actions import local_path as paths

    return paths.local_path(value)


def printable(value: t.Any) -> str:
    from ansible_collections.kubegpu.share.plugins.module_utils._core.untrusted import line

    return line(value)


class FilterModule:
    def filters(self) -> dict[str, object]:
        return {"kubeconfig": kubeconfig, "local_path": local_path, "printable": printable}
