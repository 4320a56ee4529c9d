# Copyright (c) the kubegpu.share authors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Say what would stop the set-up; see the documentation of the module of this name."""

from __future__ import annotations

import dataclasses
import json
import os
import typing as t

from ansible.plugins.action import ActionBase
from ansible_collections.kubegpu.share.plugins.module_utils import _memory_limit
from ansible_collections.kubegpu.share.plugins.module_utils import _runtime as _container_runtime
from ansible_collections.kubegpu.share.plugins.module_utils._errors import BadInput, ShareError
from ansible_collections.kubegpu.share.plugins.module_utils._findings import PROBLEM, WARNING
from ansible_collections.kubegpu.share.plugins.module_utils._node_failures import NodeWish
from ansible_collections.kubegpu.share.plugins.module_utils._preflight import Host, Wish, examine
from ansible_collections.kubegpu.share.plugins.plugin_utils import _image_archive
from ansible_collections.kubegpu.share.plugins.plugin_utils._runtime_plan import make_plan

ARGUMENTS: dict[str, t.Any] = {
    "cluster": {"type": "dict"},
    "gpu_nodes": {"type": "list", "elements": "str", "required": True},
    "control_plane": {"type": "list", "elements": "str", "default": []},
    "nodes": {"type": "list", "elements": "str", "default": []},
    "gpu_operator": {"type": "bool", "default": False},
    "backend": {"type": "str", "default": "gpushare"},
    "memory_unit": {"type": "str", "default": "GiB"},
    "placement": {"type": "str", "default": "binpack"},
    "memory_limit": {"type": "str", "default": "auto"},
    "image_delivery": {"type": "str", "default": "import"},
    "image": {"type": "str", "default": ""},
    "image_archive": {"type": "path", "default": ""},
    "extender_image": {"type": "str", "default": ""},
    "device_plugin_image": {"type": "str", "default": ""},
    "ignore": {"type": "list", "elements": "str", "default": []},
}
WISH = tuple(field.name for field in dataclasses.fields(Wish))

# The module's options by the variables of role runtime, and the facts in which the roles keep what they judged.
RUNTIME = {
    "runtime": "runtime_name",
    "binary": "runtime_nvidia_binary",
    "set_default": "runtime_set_default",
    "cdi": "runtime_cdi",
    "enable_cri": "runtime_enable_cri",
}
DRIVER_CHOICE = "__driver_choice"
TOOLKIT_REFUSED = "__toolkit_refused"


class ActionModule(ActionBase):  # type: ignore[misc]  # ansible-core carries no types
    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True
    _VALID_ARGS = frozenset(ARGUMENTS)

    def run(self, tmp: str | None = None, task_vars: dict[str, t.Any] | None = None) -> dict[str, t.Any]:
        result: dict[str, t.Any] = super().run(tmp, task_vars)
        _spec, params = self.validate_argument_spec(argument_spec=ARGUMENTS)
        named = {name: group for group in ("control_plane", "gpu_nodes") for name in params[group]}
        names = dict.fromkeys([*params["gpu_nodes"], *params["control_plane"]])
        hostvars = (task_vars or {})["hostvars"]
        hosts = [_host(name, named[name], hostvars[name]) for name in names]
        limit = _memory_limit.mode(params["memory_limit"])
        wish = Wish(**{**{name: params[name] for name in WISH}, "memory_limit": limit})
        try:
            found = examine(wish, params["cluster"], hosts, params["ignore"])
        except BadInput as error:
            result.update(failed=True, msg=str(error))
            return result
        if params["cluster"] is not None and params["image_delivery"] == "import":
            for sentence in _archive(params["image_archive"], params["image"]):
                found.problem("image-archive", sentence)
        result.update(
            changed=False,
            problems=found.problems,
            notes=found.notes,
            findings=[dataclasses.asdict(one) for one in found.all],
        )
        if found.warnings:
            result["warnings"] = found.warnings
        if found.all:
            self._display.display(found.table().rstrip("\n"))
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


def _host(name: str, named: str, variables: t.Mapping[str, t.Any]) -> Host:
    seen = variables.get("gpu_node")
    return Host(
        name,
        str(variables.get("gpu_node_name") or name),
        named,
        seen,
        _node_wish(variables),
        (*_judged(variables), *_runtime(name, seen, variables)) if named == "gpu_nodes" and seen else (),
    )


def _judged(variables: t.Mapping[str, t.Any]) -> t.Iterator[tuple[str, str, str]]:
    """What the roles driver and toolkit refuse of the host (their tasks ``judge``)."""
    for sentence in (variables.get(DRIVER_CHOICE) or {}).get("refusals") or []:
        yield "driver-refused", PROBLEM, str(sentence)
    for sentence in variables.get(TOOLKIT_REFUSED) or []:
        yield "toolkit-refused", PROBLEM, str(sentence)


def _runtime(
    host: str, seen: t.Mapping[str, t.Any], variables: t.Mapping[str, t.Any]
) -> t.Iterator[tuple[str, str, str]]:
    """What role runtime's own plan says of the host."""
    if "runtimes" not in seen:
        return
    given = {option: variables.get(variable) for option, variable in RUNTIME.items()}
    params = {
        name: spec.get("default") if given.get(name) is None else given[name]
        for name, spec in _container_runtime.ARGUMENTS.items()
    }
    try:
        # Ansible's values carry tags, with which the files' libraries don't know what to do.
        plain = json.loads(json.dumps({"runtimes": seen["runtimes"], "kubelet": seen.get("kubelet"), "params": params}))
        wanted = _container_runtime.wanted_of(plain["params"])
        planned = make_plan(plain["params"]["runtime"], wanted, plain["runtimes"], plain["kubelet"])
    except ShareError as error:
        yield "runtime-refused", PROBLEM, f"host {host}: {error}"
    else:
        for sentence in planned.warnings:
            yield "runtime-warning", WARNING, f"host {host}: {sentence}"


def _node_wish(variables: t.Mapping[str, t.Any]) -> NodeWish:
    """What the nodes' roles will be asked for; what isn't set has the roles' defaults."""
    defaults = NodeWish()
    names = {"maintenance": "gpu_maintenance"}
    return NodeWish(
        **{
            field.name: str(variables.get(names.get(field.name, field.name), getattr(defaults, field.name)))
            for field in dataclasses.fields(NodeWish)
        }
    )
