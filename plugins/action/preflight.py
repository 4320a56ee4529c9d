# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Say what would stop the set-up; see the documentation of the module of this name."""

from __future__ import annotations

import os
import typing as t

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import Host, Wish, examine
from ansible_collections.kubegpu.share.plugins.plugin_utils import _image_archive

ARGUMENTS: dict[str, t.Any] = {
    "cluster": {"type": "dict", "required": True},
    "gpu_nodes": {"type": "list", "elements": "str", "required": True},
    "control_plane": {"type": "list", "elements": "str", "default": []},
    "backend": {"type": "str", "default": "gpushare"},
    "memory_unit": {"type": "str", "default": "GiB"},
    "placement": {"type": "str", "default": "binpack"},
    "image_delivery": {"type": "str", "default": "import"},
    "image": {"type": "str", "default": ""},
    "image_archive": {"type": "path", "default": ""},
    "extender_image": {"type": "str", "default": ""},
    "device_plugin_image": {"type": "str", "default": ""},
}
WISH = ("backend", "memory_unit", "placement", "image_delivery", "extender_image", "device_plugin_image")


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset(ARGUMENTS)

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result: dict[str, t.Any] = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=ARGUMENTS)
        names = dict.fromkeys([*params["gpu_nodes"], *params["control_plane"]])
        hostvars = (task_vars or {})["hostvars"]
        hosts = [_host(name, name in params["gpu_nodes"], hostvars[name]) for name in names]
        found = examine(Wish(**{name: params[name] for name in WISH}), params["cluster"], hosts)
        if params["image_delivery"] == "import":
            found.problems += _archive(params["image_archive"], params["image"])
        result.update(changed=False, problems=found.problems, notes=found.notes)
        if found.warnings:
            result["warnings"] = found.warnings
        for note in found.notes:
            self._display.display(note)
        if found.problems:
            count = len(found.problems)
            result.update(
                failed=True,
                msg=found.problems[0] if count == 1 else f"{count} problems:\n" + "\n".join(found.problems),
            )
        return result


def _archive(archive: str, image: str) -> list[str]:
    """What is wrong with the archive that nodes are to import."""
    if not archive:
        return [f"gpushare_image_archive: importing {image} needs an archive; name it, or set gpushare_image_delivery"]
    if not os.path.isfile(archive):
        return [f"gpushare_image_archive: {archive} is no file"]
    try:
        _image_archive.require(archive, image)
    except BadInput as error:
        return [f"gpushare_{error}"]
    return []


def _host(name: str, gpu: bool, variables: t.Mapping[str, t.Any]) -> Host:
    return Host(name, str(variables.get("gpu_node_name") or name), gpu, variables.get("gpu_node"))
