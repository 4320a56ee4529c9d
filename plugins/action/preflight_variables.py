# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Report variables that would stop a run: what roles refuse or don't know, and files that aren't there.

Each finding names the file and line where the variable is set. It connects to no machine and doesn't fail; the role
does where there is a problem.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import typing as t

from ansible.errors import AnsibleError
from ansible_collections.kubegpu.share.plugins.module_utils._core.types import JsonObject
from ansible_collections.kubegpu.share.plugins.module_utils._preflight.evaluate import described
from ansible_collections.kubegpu.share.plugins.plugin_utils._actions.base import ShareAction
from ansible_collections.kubegpu.share.plugins.plugin_utils._plan import preload
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight import listing, specifications
from ansible_collections.kubegpu.share.plugins.plugin_utils._preflight.variables import Variables, examine

# This task is the first, and ansible-playbook imports its action itself.
preload.load()

ARGUMENTS: JsonObject = {
    "gpu_nodes": {"type": "list", "elements": "str", "required": True},
    "control_plane": {"type": "list", "elements": "str", "default": []},
    "cluster": {"type": "bool", "default": True},
    "ignore": {"type": "list", "elements": "str", "default": []},
}


class ActionModule(ShareAction):
    """Examines the variables of all hosts without connecting to any."""

    _requires_connection = False
    arguments = ARGUMENTS

    def ensure(self, params: JsonObject, task_vars: JsonObject | None) -> JsonObject:
        known = task_vars or {}
        hostvars, options = known["hostvars"], specifications.options()
        play = self._of_play(options, known)
        groups = {
            specifications.GPU: params["gpu_nodes"],
            specifications.CONTROL: params["control_plane"],
            specifications.LOCAL: [specifications.LOCAL],
        }
        names = dict.fromkeys(name for members in groups.values() for name in members)
        hosts = [
            Variables(
                name,
                frozenset(group for group, members in groups.items() if name in members),
                collections.ChainMap(hostvars[name], play) if play else hostvars[name],
                functools.partial(_raw, hostvars, name, play),
            )
            for name in names
        ]
        findings = examine(options, specifications.prefixes(), hosts, params["cluster"])
        findings.ignore(params["ignore"], described())
        return listing.report(self._display, findings)

    def _of_play(self, options: t.Iterable[str], known: JsonObject) -> JsonObject:
        """Return the variables of a play that imports site.yml, which hostvars doesn't have."""
        own, values = known["hostvars"][known["inventory_hostname"]], {}
        for name in options:
            # This role's own have defaults.
            if name in known and name not in own and not name.startswith("preflight_"):
                # Another role's default may need what that role finds out.
                with contextlib.suppress(AnsibleError):
                    values[name] = self._templar.template(known[name])
        return values


def _raw(hostvars: t.Any, name: str, play: JsonObject) -> JsonObject:
    """Return a host's variables as they were read, with their templates and tags."""
    return {**play, **hostvars.raw_get(name)}
